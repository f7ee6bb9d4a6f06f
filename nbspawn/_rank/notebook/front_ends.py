"""Has libraries that draw for a front end (rich, tqdm, ipywidgets) draw text in a rank, where no front end is.

They ask whether there is a kernel, and get one answer whatever the start method: there is none. ``leave_kernel`` takes
an inherited kernel away, and the shell is then a ``RankShell`` (_rank/shell.py), which has none either. So widgets talk
to nobody and show as text, ``with ipywidgets.Output():`` lets everything through, and rich writes to a terminal.
What libraries do not ask each time, ``draw_text`` settles: for those that the kernel has imported, and for those that
the cell will.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from nbspawn._process import streams
from nbspawn._process.after_import import after_import


def leave_kernel(kernel: Any) -> None:
    """Under fork: nothing finds the kernel any more, and what holds on to it (widgets of the notebook do) is not heard:
    an inherited ZMQ socket hangs for ever when it is used."""
    type(kernel).clear_instance()
    kernel.session.send = lambda *args, **kwargs: None
    kernel.session.recv = lambda *args, **kwargs: (None, None)


def plain_errors(shell: Any) -> None:
    """Under fork: remove handlers that were set with ``set_custom_exc``. Colab shows an ImportError by one, whose
    traceback is an object with a button, not a list of lines (google/colab/_shell_customizations.py). A rank's error is
    sent as lines."""
    shell.custom_exceptions = ()


def draw_text(config: Any) -> None:
    """Have libraries draw text, also those that were imported while there was a kernel."""
    # transformers asks for this name in the shell's configuration, and tqdm.auto for this module.
    config.pop("IPKernelApp", None)
    sys.modules.pop("ipykernel.zmqshell", None)
    # By this newer versions of ipykernel tell tools that escape sequences are understood, as they are in a rank's log.
    # Without, rich draws nothing before the end, and Live leaves its last line unfinished.
    os.environ.setdefault("FORCE_COLOR", "1")
    after_import("rich.console", _text_consoles)
    after_import("tqdm.notebook", _text_bars)
    if "tqdm.std" in sys.modules:
        _bars_of_the_notebook()


def find_files_beside_the_notebook(cell: Callable[[], str]) -> None:
    """Hydra looks for its configuration beside the notebook if the shell's class is ipykernel's, else beside the
    ``cell``'s file. That is somewhere in a temp directory for ipykernel, and in a terminal it is no file."""

    def is_notebook() -> bool:
        return os.path.isabs(cell())

    def ask_for_the_cell() -> None:
        sys.modules["hydra._internal.utils"].is_notebook = is_notebook  # type: ignore[attr-defined]

    after_import("hydra._internal.utils", ask_for_the_cell)


def _text_consoles() -> None:
    """A console asks for Jupyter when it is made: one that the notebook has made would go on to display HTML and
    widgets, and as text it would draw no progress before the end."""
    console = sys.modules["rich.console"].Console
    console.is_jupyter = property(lambda self: False, lambda self, value: None)
    console.is_interactive = property(lambda self: self.is_terminal and not self.is_dumb_terminal, lambda *_: None)


def _text_bars() -> None:
    """``tqdm.notebook`` replaces what a bar of ``tqdm.std`` does by widgets, and would stand at 0 %: without its own
    methods its bars are those that they inherit from."""
    bar, inherited = sys.modules["tqdm.notebook"].tqdm_notebook, vars(sys.modules["tqdm.std"].tqdm)

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("display", None)
        if isinstance(kwargs.get("ncols"), str):  # a width of CSS
            del kwargs["ncols"]
        kwargs["disable"] = bool(kwargs.get("disable"))  # None stands for "unless on a terminal" in tqdm.std
        super(bar, self).__init__(*args, **kwargs)

    for name, value in list(vars(bar).items()):
        if name in (*inherited, "colour") and (callable(value) or isinstance(value, (staticmethod, property))):
            delattr(bar, name)
    bar.__init__ = __init__
    bar.colour = None


def _bars_of_the_notebook() -> None:
    """A forked rank has those that stand in the notebook: they have begun to write to the kernel's streams, or have a
    widget. (One that is closed draws nothing any more.)"""
    for bar in list(sys.modules["tqdm.std"].tqdm._instances):
        if streams.is_replaced(getattr(bar.fp, "_wrapped", bar.fp)):
            bar.fp = sys.stderr
            bar.sp = bar.status_printer(bar.fp)
            if isinstance(bar.ncols, str):
                bar.ncols = None
