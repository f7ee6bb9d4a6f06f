"""One port for the ranks' ``init_process_group()``: a TCPStore that the kernel itself serves on the loopback.

torchrun does the same in its agent (TORCHELASTIC_USE_AGENT_STORE): all ranks are clients, so no two runs race for a
port and no rank waits for rank 0 to listen.
"""

from __future__ import annotations

import socket
import uuid
from types import TracebackType

_HOST = "127.0.0.1"  # a number: the host's own name need not resolve


class Rendezvous:
    """Serves the store until ``close``."""

    def __init__(self) -> None:
        from torch.distributed import TCPStore

        # By itself a TCPStore listens on every interface; handed a socket, it serves on that one.
        listener = socket.socket()
        listener.bind((_HOST, 0))
        listener.listen(1024)
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            _HOST, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def environment(self, nprocs: int) -> dict[str, str]:
        """What torchrun's agent tells its workers, but for the variables that differ by rank."""
        n = str(nprocs)
        return {
            "WORLD_SIZE": n,
            "LOCAL_WORLD_SIZE": n,
            "ROLE_WORLD_SIZE": n,
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": f"nbspawn-{uuid.uuid4().hex[:12]}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def close(self) -> None:
        """Stop serving."""
        self._store = None

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
