"""``%load_ext nbspawn``: registers the magics and their completion, and starts the fork server in the background."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import gc
import os
import sys
import types
from contextlib import suppress
from typing import Any

from nbspawn._carried import replaced
from nbspawn._engine.start import forkserver
from nbspawn._notebook import arguments, front_end
from nbspawn._notebook.graphical import GraphicalDebugger
from nbspawn._notebook.magic import SpawnMagics
from nbspawn._payload.names import FUTURES
from nbspawn._process import imports, traced
from nbspawn._protocol.edits import Reload
from nbspawn._session import hooks, views
from nbspawn._session.attachment import stream_view

_COMPLETED = ("%%spawn", "%%ranks", "%ranks")
_IDLE = 0.5
"""Seconds after a cell until the kernel imports what the first cell on ranks needs."""


class _Extension:
    """Everything that is registered with one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._pid = os.getpid()
        self._importing: asyncio.TimerHandle | None = None

    def load(self) -> None:
        shell = self._shell
        self._magics = SpawnMagics(shell)
        shell.register_magics(self._magics)
        for magic in _COMPLETED:
            shell.set_hook("complete_command", self._complete, str_key=magic)
        shell.events.register("post_run_cell", self._after_cell)
        hooks.make_default = lambda: front_end.default_view(shell)
        hooks.make_background = lambda: front_end.default_background_view(shell)
        hooks.display = lambda subject, text: front_end.display(shell, subject, text)
        hooks.cell_names = self._cell_names
        hooks.colors = lambda: shell.colors
        hooks.compiler_flags = lambda: shell.compile.flags & FUTURES
        hooks.autoreload = lambda: _autoreload(shell)
        atexit.register(_end_ranks)
        self._debugger = None
        if hasattr(debugger := front_end.debugger(shell), "_forward_message"):
            _pass_over(debugger)
            self._debugger = GraphicalDebugger(shell.kernel)
        self._warm_up()

    def unload(self) -> None:
        shell = self._shell
        for kind, name in (("cell", "spawn"), ("cell", "ranks"), ("line", "ranks")):
            shell.magics_manager.magics[kind].pop(name, None)
        notices = self._ending_notices()
        self._magics.sessions.clear()
        self._magics.auto.unload()
        for magic in _COMPLETED:
            shell.strdispatchers["complete_command"].strs.pop(magic, None)
        shell.events.unregister("post_run_cell", self._after_cell)
        if self._importing is not None:
            self._importing.cancel()
        hooks.make_default = views.StreamView
        hooks.make_background = stream_view
        hooks.display = hooks.print_text
        hooks.cell_names = dict
        hooks.colors = str
        hooks.compiler_flags = int
        hooks.autoreload = hooks.no_autoreload
        if self._debugger is not None:
            self._debugger.remove()
            vars(front_end.debugger(shell)).pop("_forward_message", None)
        atexit.unregister(_end_ranks)
        _end_ranks()
        forkserver.server.stop()
        for notice in notices:
            print(notice)

    def _ending_notices(self) -> list[str]:
        """A line for each session that ends with the extension."""
        if not self._magics.sessions:
            return []
        from nbspawn._notebook import ranks  # imports torch

        return ranks.ending_notices(self._magics.sessions)

    def _complete(self, shell: Any, event: Any) -> list[str]:
        return arguments.complete(event.line)

    def _cell_names(self) -> dict[str, str]:
        """The cells' names in tracebacks; empty under IPython 7, which does not store the numbers."""
        numbers = getattr(self._shell.compile, "_filename_map", {})
        return {file: f"Cell In[{number}]" for file, number in numbers.items()}

    def _after_cell(self, result: Any) -> None:
        """Record what the cell has set, and which one made fork unsafe; preload what the notebook has imported for the
        next run."""
        if os.getpid() != self._pid:  # a forked rank inherits this hook, and needs no fork server of its own
            return
        replaced.note()
        if "torch" in sys.modules or "jax" in sys.modules:
            from nbspawn._engine.start import fork_safety

            fork_safety.note_cell(getattr(result, "execution_count", None) or 0)
        if _has_started_ranks():
            self._warm_up()
        elif "torch" in sys.modules and self._importing is None:
            with suppress(RuntimeError):  # IPython in a terminal, whose loop does not run here
                self._importing = asyncio.get_running_loop().call_later(_IDLE, _import_for_first_cell)

    def _warm_up(self) -> None:
        """Have the fork server import the modules that the notebook's variables are, or are defined in: ranks then need
        not import them."""
        modules = set()
        for value in list(self._shell.user_ns.values()):
            # Not isinstance, which asks a proxy for its class: it may connect to a server first.
            kind: Any = type(value)
            with suppress(Exception):  # a metaclass may raise at any attribute
                if issubclass(kind, types.ModuleType):
                    modules.add(str(value.__name__))
                else:
                    modules.add(str((value if issubclass(kind, (type, types.FunctionType)) else kind).__module__))
        forkserver.server.warm_up(imports.installed(sorted(modules)))


def _has_started_ranks() -> bool:
    return "nbspawn._engine.run.local" in sys.modules


def _import_for_first_cell() -> None:
    """The first cell on ranks would spend 0.1 s on it, and as much on the collection of torch's heap that it brings on.

    Not in a thread: a process that the user forks meanwhile would inherit the lock of a module that is being imported.
    """
    if not _has_started_ranks():
        from nbspawn._notebook import cell, controls, gpu_memory, pump, ranks, tails, view  # noqa: F401

        gc.collect()


def _pass_over(debugger: Any) -> None:
    """Have it step over nbspawn, and the workers of its executors, which raise an error each time that they begin to
    wait, as over the kernel itself, of which it is told when it is switched on."""
    folders = [os.path.dirname(os.path.dirname(__file__)), *concurrent.futures.__path__]
    traced.step_over(folders)
    own = [{"path": f"{folder}/**", "include": False} for folder in folders]
    forward = debugger._forward_message

    async def forward_message(message: Any) -> Any:
        if message.get("command") == "attach":
            message["arguments"]["rules"] = [*message["arguments"].get("rules", ()), *own]
        return await forward(message)

    debugger._forward_message = forward_message


def _autoreload(shell: Any) -> Reload | None:
    """Which edited modules the notebook itself loads again (``%autoreload``); None: none."""
    magics = shell.magics_manager.registry.get("AutoreloadMagics")
    reloader = getattr(magics, "_reloader", None)
    if reloader is None or not reloader.enabled:
        return None
    return Reload(frozenset(reloader.skip_modules if reloader.check_all else reloader.modules), not reloader.check_all)


_extension: _Extension | None = None


def load(shell: Any) -> None:
    """Register with the shell, in less than 0.1 s: torch is imported by the server now, by the kernel when needed."""
    global _extension
    _extension = _Extension(shell)
    _extension.load()


def unload(shell: Any) -> None:
    """Undo ``load``, and stop the fork server."""
    global _extension
    if _extension is not None:
        _extension.unload()
        _extension = None


def _end_ranks() -> None:
    """At the kernel's exit: otherwise multiprocessing would wait for ranks that are not supervised any more."""
    pool = sys.modules.get("nbspawn._session.pool")
    if pool is not None:
        pool.end_all()
    local = sys.modules.get("nbspawn._engine.run.local")
    for context in list(local.running) if local is not None else ():
        context.close()
