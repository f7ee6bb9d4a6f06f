"""Auto mode: plain cells run in the kept ranks, and it shows; magics and ``%%`` cells stay in the notebook."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Cell, Kernel, assigned, ok, once

MARK = "AUTO MODE: every plain cell runs in these ranks"


@pytest.fixture
def auto(kernel: Kernel, method: str) -> Iterator[Kernel]:
    """Two ranks, auto mode on."""
    ok(kernel.execute(f"%%spawn 2 --keep -m {method}\nx = rank"))
    assert "auto mode is ON" in ok(kernel.execute("%ranks auto on")).text()
    yield kernel
    kernel.execute("%ranks auto off")
    kernel.execute("%ranks stop")


def test_a_plain_cell_runs_in_the_ranks_and_says_so(auto: Kernel) -> None:
    reply = ok(auto.execute("y = x + 1\ny"))
    assert reply.result == "[0] 1\n[1] 2" and MARK in reply.table["text/plain"] and MARK in reply.table["text/html"]
    reply = ok(auto.execute("print('said', y)"))
    assert reply.of(1) == ["said 2"] and MARK in reply.table["text/plain"]
    assert MARK in ok(auto.execute("y;")).table["text/plain"]
    assert ok(auto.execute("# a comment\n")).outputs == []


@once
def test_lines_of_tracebacks_are_the_cells(auto: Kernel) -> None:
    reply = auto.execute("# %% a title\nz = 1\nif x: z / 0")
    assert "rank 1 of 2: ZeroDivisionError: division by zero (line 3)" in reply.traceback
    assert "# %% a title" in reply.traceback
    reply = auto.execute("%matplotlib inline\nz = 1\nif x: z / 0")
    assert "ZeroDivisionError: division by zero (line 3)" in reply.traceback


def test_what_stays_in_the_notebook(auto: Kernel, method: str) -> None:
    ok(auto.execute(f"%env HERE_{method}=notebook"))
    assert ok(auto.execute(f"import os\nos.environ.get('HERE_{method}', 'unset')")).result == "[0-1] 'unset'"
    assert "[0" not in ok(auto.execute("!echo once")).text()
    assert "notebook" in ok(auto.execute(f"%%time\nimport os\nos.environ['HERE_{method}']")).result
    assert ok(auto.execute("%%ranks 1\nx")).result == "[1] 1"
    assert ok(auto.execute("%%spawn 3\nrank")).result == "[0] 0\n[1] 1\n[2] 2"
    assert "2 ranks" in ok(auto.execute("%ranks")).text()
    assert auto.execute("x?").status == "ok"


@once
def test_magics_at_the_head_stay_and_the_rest_goes(auto: Kernel) -> None:
    reply = ok(auto.execute("%env ONE=1\n!echo here\n\nx"))
    assert reply.result == "[0] 0\n[1] 1" and "here" in reply.text().splitlines()
    assert ok(auto.execute(f"a = {assigned('echo ranks')}\na[0]")).result == "[0-1] 'ranks'"


@once
def test_what_a_front_end_asks_for_itself_stays_in_the_notebook(auto: Kernel) -> None:
    """The list of variables, for one."""
    Cell(auto, auto._client.execute("asked_by = 'a front end'", silent=True), ()).wait()
    ok(auto.execute("%ranks auto off"))
    assert auto.value("asked_by") == "a front end"


@once
def test_off_is_off(auto: Kernel) -> None:
    assert "auto mode is off" in ok(auto.execute("%ranks auto off")).text()
    assert "x" not in ok(auto.execute("'here'")).result and "NameError" in auto.execute("y0").traceback


@once
def test_ranks_that_have_gone(auto: Kernel) -> None:
    auto.execute("import os\nos._exit(3)")
    reply = auto.execute("x")
    assert reply.ename == "UsageError" and "with `%ranks auto off` cells run in the notebook again" in reply.traceback
    assert "auto mode is off" in ok(auto.execute("%ranks stop")).text()
    assert ok(auto.execute("1 + 1")).result == "2"


@once
def test_a_cell_that_is_typed_is_not_complete_too_early(auto: Kernel) -> None:
    check = "get_ipython().check_complete('for i in range(2):')[0]"
    assert ok(auto.execute(f"%time print({check})")).text().startswith("incomplete")
