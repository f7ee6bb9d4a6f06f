"""Imported only by the private fork server: imports what every rank would otherwise import itself, which takes seconds.

The import of this module has side effects, which are its purpose. The server's own streams become /dev/null: they would
be the kernel's, and a rank that dies before it has a log would write to them. Then the ranks' modules are imported. The
file at ``preload.PATH`` says which (``Plan``); the result is written to a file next to it (``Report``).
"""

import atexit
import gc
import os

from nbspawn._rank import ending, huge_pages, plan, process

_began_with = frozenset(os.environ)

_null = os.open(os.devnull, os.O_RDWR)
for _fd in (0, 1, 2):
    os.dup2(_null, _fd)
os.close(_null)
_plan = plan.load()  # raises in a server that the kernel has ended meanwhile
process.prefer_as_oom_victim()

gc.disable()  # imports leave little garbage, and the search for it takes a sixth of their time
with plan.recording() as _read, ending.keeping_handlers():
    import asyncio  # noqa: F401

    import cloudpickle  # noqa: F401
    import torch.distributed
    import torch.multiprocessing  # noqa: F401

    import nbspawn._rank.environment
    import nbspawn._rank.imports
    import nbspawn._rank.loggers
    import nbspawn._rank.main
    import nbspawn._rank.pools

    if _plan.shell:
        import nbspawn._rank.preload_shell

    _report = plan.carry_out(_plan)

nbspawn._rank.environment.server_began_with = _began_with
nbspawn._rank.main.preloaded = nbspawn._rank.imports.Preloaded(_report.modules)
nbspawn._rank.loggers.note_preloaded()
_report.read = _read
nbspawn._rank.pools.keep_small()
gc.enable()
if _plan.modules:  # not in the first server, for which a run may be waiting
    huge_pages.collapse()
plan.write(_report)
# The finalization of an interpreter with all these modules takes a second, for which the server would outlive the
# kernel. (The last registered handler is called first. A rank forgets it: `_rank/ending.py`.)
atexit.register(os._exit, 0)
