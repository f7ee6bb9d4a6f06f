"""An ssh without a server: ``NBSPAWN_SSH="python fake_ssh.py"`` runs the command here, as a login would, with noise
before it, a bare environment and nothing of this one. As with ssh, its end closes the command's input and output.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any

print("Welcome to this host!", flush=True)
print("This login's profile has printed a warning.", file=sys.stderr, flush=True)
environment = {"HOME": os.environ["HOME"], "PATH": "/usr/bin:/bin", "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
command = subprocess.Popen(
    ["sh", "-c", sys.argv[-1]],
    env=environment,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    start_new_session=True,
)


def copy(source: IO[Any] | None, sink: IO[Any] | None) -> None:
    assert source is not None and sink is not None
    with suppress(OSError), sink:
        while part := os.read(source.fileno(), 1 << 16):
            view = memoryview(part)
            while view:
                view = view[os.write(sink.fileno(), view) :]


threading.Thread(target=copy, args=(sys.stdin, command.stdin), daemon=True).start()
outward = [(command.stdout, sys.stdout), (command.stderr, sys.stderr)]
threads = [threading.Thread(target=copy, args=pair) for pair in outward]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os._exit(command.wait() & 0xFF)
