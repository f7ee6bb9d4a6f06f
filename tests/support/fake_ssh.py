"""An ``ssh`` without a server: ``NBSPAWN_SSH="python fake_ssh.py"`` runs the command here, as a login would, with noise
before it, a bare environment and nothing of this one."""

from __future__ import annotations

import os
import sys

print("Welcome to this host!", flush=True)
print("This login's profile has printed a warning.", file=sys.stderr, flush=True)
environment = {"HOME": os.environ["HOME"], "PATH": "/usr/bin:/bin", "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
os.execve("/bin/sh", ["sh", "-c", sys.argv[-1]], environment)
