"""``%load_ext nbspawn``: registers the magic and its completion, and warms the fork server behind the person's back."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

from nbspawn import views
from nbspawn.engine import forkserver
from nbspawn.notebook import arguments, front_end
from nbspawn.notebook.magic import SpawnMagics

_COMPLETED = "%%spawn"

_kernel = 0  # the process that has loaded the extension


def load(shell: Any) -> None:
    """Takes less than 0.1 s: torch is imported by the server now, and by this kernel when it is needed."""
    global _kernel
    _kernel = os.getpid()
    shell.register_magics(SpawnMagics)
    shell.set_hook("complete_command", _complete, str_key=_COMPLETED)
    shell.events.register("post_run_cell", _after_cell)
    views.make_default = lambda: front_end.view(shell)
    atexit.register(_end_ranks)
    forkserver.server.warm_up(forkserver.site_packages_imported())


def unload(shell: Any) -> None:
    """Undo ``load``: the fork server ends too."""
    shell.magics_manager.magics["cell"].pop("spawn", None)
    shell.strdispatchers["complete_command"].strs.pop(_COMPLETED, None)
    shell.events.unregister("post_run_cell", _after_cell)
    views.make_default = views.StreamView
    atexit.unregister(_end_ranks)
    _end_ranks()
    forkserver.server.stop()


def _complete(shell: Any, event: Any) -> list[str]:
    return arguments.complete(event.line)


def _after_cell(result: Any) -> None:
    """Remember which cell made fork unsafe, and have what the notebook imported since ready for the next run."""
    if os.getpid() != _kernel:  # a forked rank inherits this hook, and needs no fork server of its own
        return
    if "torch" in sys.modules or "jax" in sys.modules:
        from nbspawn.engine import fork_safety

        fork_safety.note_cell(getattr(result, "execution_count", None) or 0)
    if "nbspawn.engine.local" in sys.modules:
        forkserver.server.warm_up(forkserver.site_packages_imported())


def _end_ranks() -> None:
    """At the kernel's exit: multiprocessing would wait for ranks that nobody watches any more."""
    local = sys.modules.get("nbspawn.engine.local")
    for context in list(local.running) if local is not None else ():
        context.close()
