"""Ranks that are forked from a hosted notebook's kernel. Colab's own code is on no package index: what it changes in
the shell is done here in the same way (google/colab/_shell.py and _shell_customizations.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import IPython
import pytest
from kernels import WARM, Kernel, ok

pytestmark = pytest.mark.skipif(IPython.version_info >= (8,), reason="Colab's code is for IPython 7.34")

COLAB = r"""
import os


class ColabTraceback:
    def __init__(self, lines):
        self.stb = lines


class FormattedTracebackError(Exception):
    def __init__(self, message, lines):
        super().__init__(message)
        self.lines = lines

    def _render_traceback_(self):
        return ColabTraceback(self.lines)


def handle_import_error(shell, kind, error, traceback, tb_offset=None):
    lines = shell.InteractiveTB.structured_traceback(kind, error, traceback, tb_offset=tb_offset)
    wrapped = FormattedTracebackError(str(error), [*lines, "", "NOTE: install it with !pip"])
    shell.showtraceback(exc_tuple=(kind, wrapped, traceback))


def showtraceback(self, kind, error, lines):
    return native_showtraceback(self, kind, error, lines.stb if isinstance(lines, ColabTraceback) else lines)


def polling(native):
    def command(self, *args, **kwargs):
        if os.getenv("USE_NATIVE_IPYTHON_SYSTEM_COMMANDS"):
            return native(self, *args, **kwargs)
        return self.kernel.stdin_socket.recv()

    return command


Shell = type(get_ipython())
native_showtraceback = Shell._showtraceback
Shell._showtraceback = showtraceback
vars(get_ipython()).pop("_showtraceback")  # ipykernel has bound it when it started
Shell.system, Shell.getoutput = polling(Shell.system), polling(Shell.getoutput)
get_ipython().set_custom_exc((ImportError,), handle_import_error)
"""


@pytest.fixture
def colab(tmp_path: Path) -> Iterator[Kernel]:
    """A kernel with what Colab changes in it."""
    with Kernel(tmp_path) as kernel:
        ok(kernel.execute(COLAB))
        ok(kernel.execute("%load_ext nbspawn"))
        ok(kernel.execute(WARM))
        yield kernel
        kernel.assert_no_rank()


def test_an_import_error(colab: Kernel, method: str) -> None:
    """Its traceback names the cell's line, in the notebook and in ranks."""
    reply = colab.execute("import no_such_module")
    assert "NOTE: install it" in reply.traceback, "the stand-in works"
    reply = colab.execute(f"%%spawn 2 -m {method}\nx = 1\nimport no_such_module")
    assert reply.ename == "RankRaisedError"
    assert "ModuleNotFoundError: No module named 'no_such_module'" in reply.evalue
    assert "line 3" in reply.traceback and "import no_such_module" in reply.traceback
    assert "NOTE" not in reply.traceback and "Handler failed" not in reply.text() + reply.text("stderr")


def test_commands(colab: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method} -t 20\n!echo from rank $rank\nget_ipython().getoutput('echo kept')[0]"
    reply = ok(colab.execute(cell))
    assert [reply.of(rank) for rank in range(2)] == [["from rank 0"], ["from rank 1"]]
    assert reply.result == "[0-1] 'kept'"


def test_a_magic_with_options_alone(colab: Kernel) -> None:
    """Colab gives it a cell that is a space."""
    reply = colab.execute("get_ipython().run_cell_magic('spawn', '2', ' ')")
    assert reply.ename == "UsageError" and "the cell is empty" in reply.evalue
