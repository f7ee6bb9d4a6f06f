"""``%load_ext nbspawn``: registers the magic and its completion, and warms the fork server behind the person's back."""

from __future__ import annotations

import atexit
import os
import sys
import types
from contextlib import suppress
from typing import Any

from nbspawn._engine import forkserver
from nbspawn._notebook import arguments, front_end
from nbspawn._notebook.magic import SpawnMagics
from nbspawn._rank import imports
from nbspawn._session import views

_COMPLETED = ("%%spawn", "%%ranks", "%ranks")


class _Extension:
    """What is registered with one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._pid = os.getpid()

    def load(self) -> None:
        shell = self._shell
        self._magics = SpawnMagics(shell)
        shell.register_magics(self._magics)
        for magic in _COMPLETED:
            shell.set_hook("complete_command", self._complete, str_key=magic)
        shell.events.register("post_run_cell", self._after_cell)
        views.make_default = lambda: front_end.default_view(shell)
        views.make_background = lambda: front_end.default_background_view(shell)
        views.cell_names = self._cell_names
        views.colors = lambda: shell.colors
        atexit.register(_end_ranks)
        self._warm_up()

    def unload(self) -> None:
        shell = self._shell
        for kind, name in (("cell", "spawn"), ("cell", "ranks"), ("line", "ranks")):
            shell.magics_manager.magics[kind].pop(name, None)
        ended = self._ending()
        self._magics.sessions.clear()
        self._magics.auto.unload()
        for magic in _COMPLETED:
            shell.strdispatchers["complete_command"].strs.pop(magic, None)
        shell.events.unregister("post_run_cell", self._after_cell)
        views.make_default = views.StreamView
        views.make_background = None
        views.cell_names = dict
        views.colors = str
        atexit.unregister(_end_ranks)
        _end_ranks()
        forkserver.server.stop()
        for told in ended:
            print(told)

    def _ending(self) -> list[str]:
        """What to say of the ranks that are about to end."""
        if not self._magics.sessions:
            return []
        from nbspawn._notebook import ranks  # has torch in its train

        return ranks.end_of(self._magics.sessions)

    def _complete(self, shell: Any, event: Any) -> list[str]:
        return arguments.complete(event.line)

    def _cell_names(self) -> dict[str, str]:
        """IPython 7 does not keep the numbers."""
        numbers = getattr(self._shell.compile, "_filename_map", {})
        return {file: f"Cell In[{number}]" for file, number in numbers.items()}

    def _after_cell(self, result: Any) -> None:
        """Remember which cell made fork unsafe, and have what the notebook imported ready for the next run."""
        if os.getpid() != self._pid:  # a forked rank inherits this hook, and needs no fork server of its own
            return
        if "torch" in sys.modules or "jax" in sys.modules:
            from nbspawn._engine import fork_safety

            fork_safety.note_cell(getattr(result, "execution_count", None) or 0)
        if "nbspawn._engine.local" in sys.modules:  # this notebook does start ranks
            self._warm_up()

    def _warm_up(self) -> None:
        """Ranks need not import again what the notebook has: the modules that its names are, or come from."""
        homes = set()
        for value in list(self._shell.user_ns.values()):
            with suppress(Exception):  # a proxy may raise whatever it is asked
                if isinstance(value, types.ModuleType):
                    homes.add(str(value.__name__))
                else:
                    homes.add(str((value if isinstance(value, (type, types.FunctionType)) else type(value)).__module__))
        forkserver.server.warm_up(imports.installed(sorted(homes)))


_extension: _Extension | None = None


def load(shell: Any) -> None:
    """Takes less than 0.1 s: torch is imported by the server now, and by this kernel when it is needed."""
    global _extension
    _extension = _Extension(shell)
    _extension.load()


def unload(shell: Any) -> None:
    """Undo ``load``: the fork server ends too."""
    global _extension
    if _extension is not None:
        _extension.unload()
        _extension = None


def _end_ranks() -> None:
    """At the kernel's exit: multiprocessing would wait for ranks that nobody watches any more."""
    pool = sys.modules.get("nbspawn._session.pool")
    if pool is not None:
        pool.end_all()
    local = sys.modules.get("nbspawn._engine.local")
    for context in list(local.running) if local is not None else ():
        context.close()
