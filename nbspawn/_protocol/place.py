"""Where the ranks of one node are among all ranks of a run."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

_LOOPBACK = "127.0.0.1"  # an address: the host's own name need not resolve


def new_run_id() -> str:
    """The name of a run, as torchrun gives it to its ranks."""
    return f"nbspawn-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True)
class Place:
    """The ranks from ``first`` on, ``local`` of them, of ``total``. A rank's number in all messages is its index among
    those of its node; the number in its program is ``first`` more.

    ``addresses`` are those of the nodes, by their numbers, of which this one has ``node``. ``master`` is the host and
    the port of the TCPStore at which ranks meet; with a single node the kernel serves one of its own, and ranks meet at
    a file. ``slow_dns``: this node asks DNS for names in vain, for seconds each time.
    """

    first: int
    local: int
    total: int
    node: int = 0
    addresses: tuple[str, ...] = (_LOOPBACK,)
    master: tuple[str, int] | None = None
    slow_dns: bool = False
    run_id: str = field(default_factory=new_run_id)

    @classmethod
    def alone(cls, nprocs: int) -> Place:
        """The place of ranks that are all on this machine."""
        return cls(0, nprocs, nprocs)

    def environment(self, port: int) -> dict[str, str]:
        """What torchrun's agent sets for its workers, except for what differs by rank; ``port`` is that of the kernel's
        own store."""
        host, port = self.master or (_LOOPBACK, port)
        return {
            "WORLD_SIZE": str(self.total),
            "LOCAL_WORLD_SIZE": str(self.local),
            "ROLE_WORLD_SIZE": str(self.total),
            "GROUP_RANK": str(self.node),
            "GROUP_WORLD_SIZE": str(len(self.addresses)),
            "ROLE_NAME": "default",
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
