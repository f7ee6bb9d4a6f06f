"""Imported by the private fork server alone: what every rank would otherwise import again, 2 s each time.

Importing this module has effects, which is its purpose: the server's own streams become /dev/null (they would be the
kernel's, and a rank that dies before it has a log would write there), and the ranks' imports are done.
"""

import os

_began_with = frozenset(os.environ)

_null = os.open(os.devnull, os.O_RDWR)
for _fd in (0, 1, 2):
    os.dup2(_null, _fd)
os.close(_null)

import asyncio  # noqa: E402, F401

import cloudpickle  # noqa: E402, F401
import torch.distributed  # noqa: E402
import torch.multiprocessing  # noqa: E402, F401

import nbspawn.rank.environment  # noqa: E402
import nbspawn.rank.main  # noqa: E402

nbspawn.rank.environment.server_began_with = _began_with
