"""Imported by the private fork server alone: what every rank would otherwise import again, seconds each time.

Importing this module has effects, which is its purpose: the server's own streams become /dev/null (they would be the
kernel's, and a rank that dies before it has a log would write there), and the ranks' imports are done. What to import
is in the file that ``PLAN`` names; what became of it is written beside that file (``Report``).
"""

import atexit
import os

from nbspawn._rank import huge_pages, plan, process

_plan = plan.take()
_began_with = frozenset(os.environ)

_null = os.open(os.devnull, os.O_RDWR)
for _fd in (0, 1, 2):
    os.dup2(_null, _fd)
os.close(_null)
process.go_before_the_kernel()

with plan.recording() as _read:
    import asyncio  # noqa: F401

    import cloudpickle  # noqa: F401
    import torch.distributed
    import torch.multiprocessing  # noqa: F401

    import nbspawn._rank.environment
    import nbspawn._rank.imports
    import nbspawn._rank.loggers
    import nbspawn._rank.main

    if _plan.shell:
        import nbspawn._rank.preload_shell

    _report = plan.carry_out(_plan)

nbspawn._rank.environment.server_began_with = _began_with
nbspawn._rank.main.preloaded = nbspawn._rank.imports.Preloaded(_report.modules)
nbspawn._rank.loggers.note_preloaded()
_report.read = _read
if _plan.modules:  # not in the first server, which a run may be waiting for
    huge_pages.collapse()
plan.write(_report)
# The teardown of an interpreter with all these modules takes a second, in which the server would outlive the kernel.
# (What is registered last is called first. Ranks do not come here: they leave by os._exit.)
atexit.register(os._exit, 0)
