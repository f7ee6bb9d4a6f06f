"""torchrun for notebooks: ``%%spawn 4`` runs a cell on four ranks.

``%load_ext nbspawn`` registers the magics; ``nbspawn.spawn`` and ``nbspawn.start_processes`` are the functions of
torch.multiprocessing, ``nbspawn.Session`` keeps ranks alive. Importing this package imports neither torch nor IPython:
names are loaded at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nbspawn._api import spawn as spawn
    from nbspawn._api import start_processes as start_processes
    from nbspawn._engine.run.local_context import LocalContext as LocalContext
    from nbspawn._notebook.interact import interact as interact
    from nbspawn._rank.report.logged import log as log
    from nbspawn._results import Results as Results
    from nbspawn._session.background import BackgroundRun as BackgroundRun
    from nbspawn._session.comparison import Difference as Difference
    from nbspawn._session_api import RankSubset as RankSubset
    from nbspawn._session_api import Session as Session
    from nbspawn._version import __version__ as __version__
    from nbspawn.errors import PayloadError as PayloadError
    from nbspawn.errors import RankExitedError as RankExitedError
    from nbspawn.errors import RankRaisedError as RankRaisedError
    from nbspawn.errors import RunTimeoutError as RunTimeoutError
    from nbspawn.errors import SpawnError as SpawnError
    from nbspawn.errors import StartError as StartError
    from nbspawn.errors import UsageError as UsageError

_HOME = {
    "spawn": "nbspawn._api",
    "start_processes": "nbspawn._api",
    "interact": "nbspawn._notebook.interact",
    "log": "nbspawn._rank.report.logged",
    "Session": "nbspawn._session_api",
    "RankSubset": "nbspawn._session_api",
    "Results": "nbspawn._results",
    "LocalContext": "nbspawn._engine.run.local_context",
    "BackgroundRun": "nbspawn._session.background",
    "Difference": "nbspawn._session.comparison",
    "SpawnError": "nbspawn.errors",
    "UsageError": "nbspawn.errors",
    "StartError": "nbspawn.errors",
    "PayloadError": "nbspawn.errors",
    "RankRaisedError": "nbspawn.errors",
    "RankExitedError": "nbspawn.errors",
    "RunTimeoutError": "nbspawn.errors",
    "__version__": "nbspawn._version",
}

__all__ = [
    "BackgroundRun",
    "Difference",
    "LocalContext",
    "PayloadError",
    "RankExitedError",
    "RankRaisedError",
    "RankSubset",
    "Results",
    "RunTimeoutError",
    "Session",
    "SpawnError",
    "StartError",
    "UsageError",
    "__version__",
    "interact",
    "log",
    "spawn",
    "start_processes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'nbspawn' has no attribute {name!r}")
    from nbspawn._engine.kernel import interrupt_flag

    with interrupt_flag.deferred():
        module = importlib.import_module(_HOME[name])
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext nbspawn``."""
    from nbspawn._process import traced

    with traced.suspended():
        from nbspawn._notebook import extension

        extension.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext nbspawn``."""
    from nbspawn._notebook import extension

    extension.unload(shell)
