"""``%%spawn`` in a real kernel: what a cell finds, what comes back, which errors a user sees."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import IPython
import pytest
from kernels import ExecutedKernel, Kernel, Reply, assigned, ok, once, wait_until

CELL_NUMBERS = IPython.version_info[0] >= 8  # "Cell In[5], line 2"; IPython 7 shows the cell's file name

TORCHRUN = """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK
ROLE_WORLD_SIZE
MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_RUN_ID
TORCHELASTIC_USE_AGENT_STORE OMP_NUM_THREADS""".split()


def values(kernel: Kernel, cell: str) -> list[object]:
    """Each rank's value, from a cell that is run with ``-o``."""
    first, _, body = cell.partition("\n")
    ok(kernel.execute(f"{first} -o values_\n{body}"))
    return kernel.value("list(values_)")


def single_error(reply: Reply, name: str) -> str:
    """The cell failed with one error of one line; returns that line."""
    assert (reply.status, reply.ename) == ("error", name), str(reply)
    assert "\n" not in reply.evalue
    assert reply.traceback == f"{name}: {reply.evalue}"
    assert [output["type"] for output in reply.outputs] == ["error"], str(reply)
    return reply.evalue


# ---------------------------------------------------------------- what a rank finds, and what comes back


def test_a_rank_knows_its_place(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 3 -m {method}\n(rank, world_size, local_rank, str(device), __name__)"
    assert values(kernel, cell) == [(rank, 3, rank, "cpu", "__main__") for rank in range(3)]


@once
def test_environment_is_torchruns(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\nimport os\n{{name: os.environ.get(name) for name in {TORCHRUN}}}"
    found = values(kernel, cell)
    for rank, environment in enumerate(found):
        missing = [name for name, value in environment.items() if value is None]
        assert not missing
        for name in ("RANK", "LOCAL_RANK", "ROLE_RANK"):
            assert environment[name] == str(rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"):
            assert environment[name] == "2"
        assert environment["GROUP_RANK"] == "0"
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"] != "29500"


def test_values_are_shown_as_out(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 4 -m {method}\nrank * rank"))
    assert reply.result == "[0] 0\n[1] 1\n[2] 4\n[3] 9"
    assert kernel.value("list(_)") == [0, 1, 4, 9]
    assert ok(kernel.execute("%%spawn 3\n'same'")).result == "[0-2] 'same'"


def test_no_value_shows_nothing(kernel: Kernel) -> None:
    assert ok(kernel.execute("%%spawn 2\nx = rank")).result == ""
    assert ok(kernel.execute("%%spawn 2\nNone")).result == ""


def test_semicolon_silences(kernel: Kernel, method: str) -> None:
    assert ok(kernel.execute(f"%%spawn 2 -m {method}\nrank + 5;")).result == ""
    assert ok(kernel.execute(f"%%spawn 2 -m {method}\nrank + 5  ;  # quiet")).result == ""
    assert values(kernel, f"%%spawn 2 -m {method}\nrank + 5;") == [5, 6]
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nfrom IPython.display import HTML\nHTML('x');"))
    assert reply.shown == [] and reply.result == ""


def test_out_binds_and_does_not_show(kernel: Kernel) -> None:
    reply = ok(kernel.execute("%%spawn 2 -o bound\nrank + 7"))
    assert reply.result == ""
    assert kernel.value("[bound[0], bound[-1], len(bound), bound[:1], list(bound)]") == [7, 8, 2, [7], [7, 8]]


def test_cpu_word_means_the_cores(kernel: Kernel) -> None:
    cores = kernel.value("len(__import__('os').sched_getaffinity(0))")
    assert values(kernel, "%%spawn cpu\nworld_size") == [cores] * cores


def test_variables_functions_and_classes_of_other_cells(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("factor = 10\nnested = {'a': [1, 2, {3}]}\ndef scale(x): return inner(x) * factor"))
    ok(kernel.execute("def inner(x): return x + 1"))
    ok(kernel.execute("class Base:\n    def __init__(self, x): self.x = x\nclass Point(Base):\n    tag = 'p'"))
    ok(kernel.execute(f"%%spawn 2 -m {method} -o back\np = Point(scale(rank))\np.rest = nested\np"))
    assert kernel.value("[(type(p) is Point, isinstance(p, Base), p.x, p.rest) for p in back]") == [
        (True, True, 10, {"a": [1, 2, {3}]}),
        (True, True, 20, {"a": [1, 2, {3}]}),
    ]


def test_a_class_of_the_cell_itself_comes_back(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method} -o back
from dataclasses import dataclass
@dataclass
class Found:
    rank: int
Found(rank)"""
    ok(kernel.execute(cell))
    assert kernel.value("[f.rank for f in back]") == [0, 1]


def test_cell_rebinds_a_global_that_a_sent_function_reads(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("setting = 'kernel'\ndef read(): return setting"))
    assert values(kernel, f"%%spawn 2 -m {method}\nsetting = f'rank {{rank}}'\nread()") == ["rank 0", "rank 1"]
    assert kernel.value("setting") == "kernel"


def test_what_a_rank_changes_stays_its_own(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("import torch\nshared_list = [0]\nweights = torch.zeros(100_000)"))
    cell = f"%%spawn 2 -m {method}\nshared_list.append(rank)\nweights += rank + 1\nfloat(weights[0])"
    assert values(kernel, cell) == [1.0, 2.0]
    assert kernel.value("[shared_list, float(weights.sum())]") == [[0], 0.0]


def test_imports_of_the_notebook_are_there(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("import math\nimport collections as co\nfrom os.path import join as j"))
    assert (
        values(kernel, f"%%spawn 2 -m {method}\n(math.floor(2.5), co.Counter('aa')['a'], j('a', 'b'))")
        == [(2, 2, "a/b")] * 2
    )


def test_a_module_that_is_edited_is_never_stale(kernel: Kernel, method: str) -> None:
    (kernel.folder / f"edited_{method}.py").write_text("ANSWER = 1\n")
    ok(kernel.execute("import sys, os, importlib; sys.dont_write_bytecode = True; sys.path.insert(0, os.getcwd())"))
    cell = f"%%spawn 2 -m {method}\nimport edited_{method} as e\ne.ANSWER"
    assert values(kernel, cell) == [1, 1]
    (kernel.folder / f"edited_{method}.py").write_text("ANSWER = 22\n")
    assert values(kernel, cell) == [22, 22]


def test_environment_and_directory_of_the_moment(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("import os; os.environ['LATER'] = 'set'; home = os.getcwd(); os.makedirs('sub', exist_ok=True)"))
    ok(kernel.execute("os.chdir('sub')"))
    try:
        cell = f"%%spawn 2 -m {method}\nimport os\n(os.environ['LATER'], os.path.basename(os.getcwd()))"
        assert values(kernel, cell) == [("set", "sub")] * 2
    finally:
        ok(kernel.execute("os.chdir(home); del os.environ['LATER']"))


# ---------------------------------------------------------------- IPython's own syntax


def test_shell_command(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("word = 'kernel'"))
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nprint('a')\n!echo from $word {{rank}}\nprint('b')"))
    assert [reply.of(0), reply.of(1)] == [["a", "from kernel 0", "b"], ["a", "from kernel 1", "b"]]
    cell = f"%%spawn 2 -m {method}\nfound = {assigned('echo one; echo two')}\nlist(found)"
    assert values(kernel, cell) == [["one", "two"]] * 2


def test_aliases_are_the_notebooks(kernel: Kernel, method: str) -> None:
    """Also those that have a meaning in every IPython."""
    ok(kernel.execute("%alias greet echo hello\n%alias ll echo mine"))
    try:
        reply = ok(kernel.execute(f"%%spawn 2 -m {method}\n%greet you\n%ll"))
        assert reply.of(1) == ["hello you", "mine"], str(reply)
    finally:
        ok(kernel.execute("%unalias greet\n%alias ll ls -F -o --color"))


OWN_MAGICS = """
import os, sys
sys.path.insert(0, os.getcwd())
from IPython.core.magic import Magics, line_cell_magic, magics_class, register_cell_magic, register_line_magic
offset = 5
@register_line_magic
def shifted(line): return int(line) + offset
@register_cell_magic
def counted(line, cell): return line, len(cell.splitlines())
@magics_class
class Counting(Magics):
    count = 0
    @line_cell_magic
    def count_up(self, line, cell=None):
        self.count += 1
        return self.count, self.shell.user_ns["rank"]
get_ipython().register_magics(Counting)
%alias_magic -l up count_up
%load_ext extension_of_mine
def in_a_function(): return get_ipython().run_line_magic("shifted", "1")
"""

EXTENSION = """
import threading
from IPython.core.magic import Magics, line_magic, magics_class
@magics_class
class Mine(Magics):
    @line_magic
    def mine(self, line): return f"mine: {line}"
@magics_class
class Locked(Magics):
    def __init__(self, shell):
        super().__init__(shell)
        self.lock = threading.Lock()
    @line_magic
    def locked(self, line): return line
def load_ipython_extension(shell):
    shell.register_magics(Mine, Locked)
"""


def test_magics_of_the_notebook(kernel: Kernel, method: str) -> None:
    """Its own, those of a class, by another name, and those of an extension, whose objects may not travel."""
    (kernel.folder / "extension_of_mine.py").write_text(EXTENSION)
    ok(kernel.execute(OWN_MAGICS))
    cell = "x = %shifted 3\noffset = 7\ny = %shifted 3\nz = %up\nz = %count_up\nw = %mine ho\nx, y, z, w"
    assert values(kernel, f"%%spawn 2 -m {method}\n{cell}") == [(8, 10, (2, rank), "mine: ho") for rank in range(2)]
    assert values(kernel, f"%%spawn 1 -m {method}\n%%counted a b\n1\n2") == [("a b", 2)]
    ok(kernel.execute(f"%%spawn 2 --keep -m {method}\npass"))
    assert values(kernel, "%%ranks\n%shifted 4") == [9, 9]
    for count in (1, 2):  # what a magic keeps in a rank stays there
        assert values(kernel, "%%ranks\nx = %count_up\nx") == [(count, 0), (count, 1)]
    ok(kernel.execute("%ranks stop"))


def test_magics_that_are_not_sent(kernel: Kernel) -> None:
    """The error says why, and what to do."""
    (kernel.folder / "extension_of_mine.py").write_text(EXTENSION)
    ok(kernel.execute(OWN_MAGICS))
    for call, advice in (
        ("%locked 1", "%locked is a magic of an extension: add `%load_ext extension_of_mine` to the cell."),
        ("in_a_function()", "%shifted exists in the notebook, but was not sent, because the cell's own code does not"),
        ("%connect_info", "%connect_info is a magic of ipykernel for the notebook itself: ranks do not have it."),
    ):
        reply = kernel.execute(f"%%spawn 1 -m forkserver\n{call}")
        assert advice in reply.traceback, str(reply)
    assert values(kernel, "%%spawn 1 -m forkserver\n%load_ext extension_of_mine\n%locked 1") == ["1"]
    assert values(kernel, "%%spawn 1 -m fork\nin_a_function()") == [6]
    reply = kernel.execute("%%spawn 1\n%no_such_magic")
    assert "UsageError: Line magic function `%no_such_magic` not found" in reply.evalue
    assert "is a magic of" not in reply.traceback


def test_line_magic(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\n%time y = rank\nprint('y', y)"))
    for rank in range(2):
        assert any(line.startswith("Wall time") for line in reply.of(rank)), str(reply)
        assert f"y {rank}" in reply.of(rank)


def test_cell_magic_inside(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\n%%time\nprint('in', rank)"))
    assert all("Wall time" in "".join(reply.of(rank)) for rank in range(2))
    assert "in 1" in reply.of(1)


def test_cell_magics_outside(kernel: Kernel) -> None:
    reply = ok(kernel.execute("%%time\n%%spawn 2\nprint('x', rank)"))
    assert "[1]   x 1" in reply.text()
    assert reply.text().count("Wall time") == 1
    reply = ok(kernel.execute("%%capture held\n%%spawn 2\nprint('x', rank)\nrank"))
    assert reply.outputs == []
    assert "x 1" in kernel.value("held.stdout")
    assert kernel.value("'text/html' in held.outputs[0].data")


def test_top_level_await(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\nimport asyncio\nasync def f(): return rank + 1\nawait asyncio.sleep(0)\nawait f()"
    assert values(kernel, cell) == [1, 2]


def test_asyncio_run(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\nimport asyncio\nasync def f(): return rank + 1\nasyncio.run(f())"
    reply = kernel.execute(cell)
    if reply.status == "error":  # as in any cell of a kernel, whose loop runs already
        assert "running event loop" in reply.evalue
    else:
        assert reply.result == "[0] 1\n[1] 2"


def test_variables_expand_in_the_line(kernel: Kernel) -> None:
    ok(kernel.execute("n, how = 3, 'forkserver'"))
    assert values(kernel, "%%spawn {n} -m $how\n'{n}'") == ["{n}"] * 3


def test_cell_after_blank_lines_and_indented(kernel: Kernel) -> None:
    assert values(kernel, "%%spawn 2\n\n\n    x = rank\n    x + 1") == [1, 2]


def test_main_guard_runs(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nif __name__ == '__main__':\n    print('guarded')"))
    assert reply.of(0) == reply.of(1) == ["guarded"]


# ---------------------------------------------------------------- errors of the cell


def test_syntax_error_starts_nothing(kernel: Kernel, method: str) -> None:
    reply = kernel.execute(f"%%spawn 4 -m {method}\nok = 1\nx = = 3")
    assert (reply.status, reply.ename) == ("error", "SyntaxError")
    assert [output["type"] for output in reply.outputs] == ["error"]
    assert "x = = 3" in reply.traceback
    assert "line 3" in reply.traceback or "line 3" in reply.evalue
    assert "nbspawn/" not in reply.traceback


def test_an_error_that_only_the_compiler_finds_shows_its_line(kernel: Kernel) -> None:
    reply = kernel.execute("%%spawn 2\nx = 1\nfor n in range(3):\n    return x")
    assert reply.ename == "SyntaxError" and "    return x" in reply.traceback.splitlines(), reply.traceback


HELPER = 'def helper(batch):\n    width = batch["width"]\n    return batch["hieght"] * width\n'


def test_error_of_a_rank(kernel: Kernel, method: str) -> None:
    ok(kernel.execute(HELPER))
    body = 'a = 1\n# comment\nif rank == 2:\n    helper({"width": 3, "height": 4})\nimport time\ntime.sleep(600)'
    reply = kernel.execute(f"%%spawn 4 -m {method} -g 60\n{body}")
    assert (reply.status, reply.ename) == ("error", "RankRaisedError")
    assert reply.evalue == "rank 2 of 4: KeyError: 'hieght' (line 5)"
    assert reply.traceback.count("----> 3 ") == 1 and reply.traceback.count("----> 5 ") == 1, reply.traceback
    assert reply.traceback.count('return batch["hieght"] * width') == 1
    assert reply.traceback.count("\nKeyError: 'hieght'") == 1
    if CELL_NUMBERS:
        assert reply.traceback.count("Cell In[") == 2
    assert "in helper(batch)" in reply.traceback
    for hidden in ("nbspawn/_rank", "nbspawn/_notebook", "interactiveshell.py", "multiprocessing"):
        assert hidden not in reply.traceback
    assert "time.sleep(600)" in reply.traceback, "the peers' line is told"
    assert "KeyError" in reply.table["text/plain"]
    assert "✗ failed" in reply.table["text/plain"]


def test_error_carries_what_a_program_needs(kernel: Kernel, method: str) -> None:
    kernel.execute(f"%%spawn 2 -m {method}\nif rank: raise ValueError('bad', rank)")
    ok(kernel.execute("import sys, torch.multiprocessing as tm; e = sys.last_value"))
    facts = kernel.value("[e.rank, e.node, type(e.pid).__name__, isinstance(e, tm.ProcessRaisedException), e.others]")
    assert facts == [1, 0, "int", True, ()]
    assert "ValueError" in kernel.value("str(e)")


def test_every_rank_fails_alike(kernel: Kernel, method: str, patient: None) -> None:
    reply = kernel.execute(f"%%spawn 4 -m {method}\nraise KeyError('same')")
    assert reply.ename == "RankRaisedError"
    assert reply.traceback.count("raise KeyError('same')") == 1, reply.traceback
    assert "also ranks" in reply.traceback or "also rank " in reply.traceback


@once
def test_first_error_in_time_is_raised(kernel: Kernel, method: str, patient: None, tmp_path: Path) -> None:
    mark = tmp_path / "raised"
    cell = f"""%%spawn 2 -m {method}
import os, time
if rank == 1:
    try:
        raise KeyError('the cause')
    finally:
        open({str(mark)!r}, 'w').close()
while not os.path.exists({str(mark)!r}): time.sleep(0.001)
time.sleep(0.05)
raise RuntimeError('a consequence')"""
    reply = kernel.execute(cell)
    assert reply.evalue == "rank 1 of 2: KeyError: 'the cause' (line 5)"
    assert "also rank 0: RuntimeError: a consequence" in reply.traceback


def test_chained_exceptions(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\ntry:\n    1 / 0\nexcept ZeroDivisionError as z:\n    raise ValueError('v') from z"
    reply = kernel.execute(cell)
    assert "ValueError: v (line 5)" in reply.evalue
    assert "1 / 0" in reply.traceback and "direct cause" in reply.traceback


def test_getsource_of_a_cell_function(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("# a comment\n\ndef sourced(x):\n    return x  # kept\n"))
    found = values(kernel, f"%%spawn 2 -m {method}\nimport inspect\ninspect.getsource(sourced)")
    assert found == ["def sourced(x):\n    return x  # kept\n"] * 2


@once
@pytest.mark.parametrize(
    ("code", "reported"),
    [
        ("import os; print('last words'); os._exit(7)", "exit code 7"),
        ("import sys; print('last words'); sys.exit('no data found')", "exit code 1: no data found"),
        ("import sys; print('last words'); sys.exit(3)", "exit code 3"),
        ("import os; print('last words'); os._exit(0)", "exit code 0 before it had finished"),
        ("import os, signal; print('last words'); os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
    ],
)
def test_a_rank_that_leaves(kernel: Kernel, method: str, code: str, reported: str) -> None:
    reply = kernel.execute(f"%%spawn 2 -m {method}\nif rank:\n    {code}")
    assert reply.ename == "RankExitedError", str(reply)
    assert reported in reply.evalue
    assert reply.evalue.startswith("rank 1 of 2: ")
    assert "last words" in reply.text()
    assert kernel.value("__import__('sys').last_value.rank") == 1


def test_sys_exit_0_is_an_end_in_good_order(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nimport sys\nprint('bye')\nsys.exit()"))
    assert reply.text("stderr") == ""
    assert reply.of(0) == ["bye"]


@pytest.mark.extended
def test_a_rank_under_spawn_says_nothing_by_itself(tmp_path: Path) -> None:
    """IPython warns in each new shell of a virtual environment that is not its own."""
    with Kernel(tmp_path, VIRTUAL_ENV=str(tmp_path)) as kernel:
        ok(kernel.execute("%load_ext nbspawn"))
        assert ok(kernel.execute("%%spawn 1 -m spawn\nprint('this')")).text() == "[0] this\n"


def test_outputs_of_earlier_cells(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("41 + 1"))
    number = kernel.value("max(Out)")
    assert values(kernel, f"%%spawn 2 -m {method}\n_{number}") == [42, 42]
    ok(kernel.execute("42 + 1"))
    assert values(kernel, f"%%spawn 2 -m {method}\n_") == [43, 43]
    ok(kernel.execute("43 + 1"))
    ok(kernel.execute(f"%%spawn 2 -m {method} -o results\nrank"))
    assert ok(kernel.execute("_")).result == "44"


def test_colours_are_the_notebooks(kernel: Kernel, method: str) -> None:
    colours = kernel.value("get_ipython().colors")
    ok(kernel.execute("%colors NoColor"))
    plain = kernel.execute(f"%%spawn 2 -m {method}\n1 / 0").coloured
    ok(kernel.execute(f"%colors {colours}"))
    assert "ZeroDivisionError" in plain and "\x1b" not in plain
    assert "\x1b" in kernel.execute(f"%%spawn 2 -m {method}\n1 / 0").coloured


def test_exit_and_quit(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nprint('bye')\nexit()"))
    assert reply.of(1) == ["bye"]


# ---------------------------------------------------------------- usage


def test_the_number_of_ranks_in_torchruns_words(kernel: Kernel) -> None:
    for line in ("--nproc-per-node 3", "--nnodes 1 --nproc-per-node 3", "3 --nnodes 1 --nproc-per-node 3"):
        assert ok(kernel.execute(f"%%spawn {line}\nworld_size")).result == "[0-2] 3"


@pytest.mark.parametrize(
    ("line", "body", "reported"),
    [
        ("2 --nnodes 2", "x", "2 nodes need a cluster: --on ray"),
        ("2 --nproc-per-node 3", "x", "--nnodes 1 times --nproc-per-node 3 is not NPROCS 2: leave one of them out"),
        (
            "2 --on mars",
            "x",
            "'mars' is no place for ranks: use local, ray or ray:HOST:PORT, ssh:HOST,HOST, slurm or slurm:JOB",
        ),
        ("--nproc-per-node zero", "x", "must be a number of 1 or more, got 'zero'"),
        ("2 --local-ranks-filter a", "x", "'a' is not a list of numbers such as 0,2"),
        ("2 --local-ranks-filter 0,2", "x", "--local-ranks-filter 2: there is no such rank, the last one is 1"),
        ("2 --bad", "x", "--bad"),
        ("0", "x", "nprocs must be between 1 and 512, got 0"),
        ("-3", "x", "-3"),
        ("100000", "x", "nprocs must be between 1 and 512, got 100000"),
        ("many", "x", "'many'"),
        ("2.5", "x", "'2.5'"),
        ("2 3", "x", "3"),
        ("2", " ", "empty"),
        ("2", "\n\n  ", "empty"),
        ("2 -m threads", "x", "threads"),
        ("2 -o not-a-name", "x", "'not-a-name'"),
        ("2 -t soon", "x", "'soon'"),
        ("2 -t -1", "x", "-1"),
        ("2 -t nan", "x", "nan"),
        ("2 -g inf", "x", "inf"),
        ("2 --env NOVALUE", "x", "NOVALUE"),
        ("2 --threads 0", "x", "'0'"),
        ("2 --devices a,b", "x", "'a,b'"),
        ("2 --view loud", "x", "loud"),
        ("2 --out", "x", "--out"),
        ("2 'open", "x", "quotation"),
        ("gpu", "x", "GPU"),
        ("2 --log-dir /proc/none", "x", "'/proc/none'"),
        ("2 --log-dir /dev/null", "x", "--log-dir"),
    ],
)
def test_usage_errors(kernel: Kernel, line: str, body: str, reported: str) -> None:
    ok(kernel.execute("precious = 1"))
    assert reported in single_error(kernel.execute(f"%%spawn {line}\n{body}"), "UsageError")
    assert kernel.value("precious") == 1


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help(kernel: Kernel, flag: str) -> None:
    reply = ok(kernel.execute(f"%%spawn {flag}\nraise SystemExit"))
    for option in ("--start-method", "--backend", "--out", "--timeout", "--grace-period", "--env", "--log-dir"):
        assert option in reply.text()


def test_question_mark(kernel: Kernel) -> None:
    assert "--start-method" in kernel.inspect("%%spawn")
    shown = ok(kernel.execute("%%spawn?")).payload
    assert "--start-method" in shown[0]["data"]["text/plain"]


def test_completion(kernel: Kernel) -> None:
    assert {"--start-method"} <= set(kernel.complete("%%spawn 4 --st"))
    assert {"--timeout", "--out"} <= set(kernel.complete("%%spawn 4 --"))
    assert {"fork", "forkserver"} <= set(kernel.complete("%%spawn 4 -m fork"))
    assert "spawn" in "".join(kernel.complete("%%spa"))


def test_completion_and_inspection_in_the_body(kernel: Kernel) -> None:
    ok(kernel.execute("import torch\nlong_variable_name = 1"))
    assert "long_variable_name" in kernel.complete("%%spawn 2\nlong_var")
    assert "int" in kernel.inspect("%%spawn 2\nlong_variable_name")


# ---------------------------------------------------------------- what cannot travel


def test_a_lock_falls_back_to_fork_and_says_so(kernel: Kernel) -> None:
    ok(kernel.execute("import threading\nlock = threading.Lock()"))
    reply = ok(kernel.execute("%%spawn 2\nwith lock:\n    print('held', rank)"))
    assert "held 1" in reply.of(1)
    heading = reply.table["text/plain"].splitlines()[0]
    assert "fork:" in heading and "lock" in heading and "cannot travel" in heading


def test_a_lock_with_forkserver_is_an_error_with_a_remedy(kernel: Kernel) -> None:
    ok(kernel.execute("import threading\nlock = threading.Lock()\ndef uses():\n    return lock"))
    reported = single_error(kernel.execute("%%spawn 2 -m forkserver\nlock"), "PayloadError")
    assert reported.startswith("lock cannot travel") and "inside the cell" in reported
    reported = single_error(kernel.execute("%%spawn 2 -m forkserver\nuses()"), "PayloadError")
    assert reported.startswith("uses cannot travel") and "lock" in reported


def test_a_first_cell_says_at_once_what_it_waits_for(tmp_path: Path) -> None:
    """The import of torch takes seconds; nothing is left of the sentence."""
    with ExecutedKernel(tmp_path) as kernel:
        ok(kernel.execute("%load_ext nbspawn"))
        cell = kernel.submit("%%spawn 2\nrank")
        said = "torch is being imported into the notebook, for its first ranks …"
        cell.see(lambda: any(said in str(output.get("data")) for output in cell.reply.outputs), "it is said")
        assert kernel.ranks() == []
        reply = ok(cell.wait())
        assert said not in str(reply.saved) and reply.result == "[0] 0\n[1] 1"


def test_an_idle_kernel_imports_what_its_first_cell_on_ranks_needs(tmp_path: Path) -> None:
    """If it has torch: importing that takes seconds, in which a cell would wait."""
    imported = "sorted(name for name in sys.modules if name.startswith('nbspawn.'))"
    needed = "nbspawn._notebook.view"
    timer = "import asyncio, sys\nfrom nbspawn._notebook import extension\nawait asyncio.sleep(2 * extension._IDLE)"
    with ExecutedKernel(tmp_path) as kernel:
        ok(kernel.execute("%load_ext nbspawn"))
        ok(kernel.execute(timer))
        assert not {"torch", needed}.intersection(kernel.value("sorted(sys.modules)"))
        ok(kernel.execute("import torch\nextension._extension._after_cell(None)\n%unload_ext nbspawn"))
        ok(kernel.execute(timer))
        assert needed not in kernel.value(imported)
        ok(kernel.execute("%load_ext nbspawn"))
        wait_until(lambda: needed in kernel.value(imported), "it is imported")
        idle = kernel.value(imported)
        assert ok(kernel.execute("%%spawn 2\nrank")).result == "[0] 0\n[1] 1"
        buttons = {"nbspawn._notebook.buttons", "nbspawn._notebook.slots"}  # of a cell that takes longer than a second
        assert {*kernel.value(imported)} - {*idle} <= buttons


def test_a_result_that_cannot_travel_is_shown(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\n(i for i in range(3))"))
    assert "<generator object" in reply.result
    single = kernel.execute("_[1]")
    assert single.ename == "PayloadError" and "rank 1" in single.evalue and "generator" in single.evalue
    said = ok(kernel.execute(f"%%spawn 2 -m {method} -o out\n(i for i in range(3)) if rank else 3")).text()
    assert said.startswith("out has the text only of what rank 1 returned: the result is a generator. Return something")


def test_fork_refused_after_a_process_group(own_kernel: Kernel) -> None:
    setup = """import tempfile, torch.distributed as dist
dist.init_process_group('gloo', store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)"""
    ok(own_kernel.execute(setup))
    reported = single_error(own_kernel.execute("%%spawn 2 -m fork\nrank"), "StartError")
    assert "process group" in reported and "cell" in reported and "-m forkserver" in reported
    assert ok(own_kernel.execute("%%spawn 2\nrank")).result == "[0] 0\n[1] 1"
    ok(own_kernel.execute("dist.destroy_process_group()"))
    assert ok(own_kernel.execute("%%spawn 2 -m fork\nrank")).result == "[0] 0\n[1] 1"


# ---------------------------------------------------------------- input


def test_input(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nprint('first')\ninput('name? ')", answers=["ada", "bob"]))
    assert sorted(reply.prompts) == [("[0] name? ", False), ("[1] name? ", False)]
    found = ast.literal_eval("{" + reply.result.replace("[", "").replace("] ", ": ").replace("\n", ",") + "}")
    asked = [int(prompt[1]) for prompt, _ in reply.prompts]
    assert [found[rank] for rank in asked] == ["ada", "bob"]


def test_getpass(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\nfrom getpass import getpass\ngetpass('token: ') if rank else None"
    reply = ok(kernel.execute(cell, answers=["secret"]))
    assert reply.prompts == [("[1] token: ", True)]
    assert "[1] 'secret'" in reply.result


def test_input_where_nobody_can_answer(kernel: Kernel, method: str) -> None:
    reply = kernel.execute(f"%%spawn 2 -m {method}\ninput('name? ')", stdin=False)
    assert reply.ename == "RankRaisedError"
    assert "nobody can answer" in reply.evalue
    assert reply.prompts == []


def test_stop_at_a_prompt(kernel: Kernel, method: str) -> None:
    cell = kernel.submit(f"%%spawn 2 -m {method}\ninput('name? ') if rank == 0 else None").asked()
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt"


def test_profile_tells_where_the_time_went(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method} -b gloo --timings\nimport time\ntime.sleep(0.3)\nrank"))
    reported = re.search(r"^Time: (.*)$", reply.table["text/plain"], re.MULTILINE)
    assert reported and reported[1] in reply.table["text/html"]
    parts = dict(part.split(" ", 1) for part in reported[1].split(" · "))
    assert list(parts) == ["payload", "start", "rendezvous", "run", "results", "teardown"]
    assert int(parts["run"].removesuffix(" ms")) >= 300


# ---------------------------------------------------------------- the kernel goes on


def test_queued_cells_run_afterwards(kernel: Kernel, method: str) -> None:
    first = kernel.submit(f"%%spawn 2 -m {method} -o queued\nimport time\ntime.sleep(0.3)\nrank")
    second = kernel.submit("list(queued)")
    replies = {}

    def pump() -> bool:
        for channel, message in kernel.messages():
            first.take(channel, message)
            second.take(channel, message)
        replies.update(first=first.over, second=second.over)
        return all(replies.values())

    wait_until(pump, "both cells end")
    assert (first.reply.status, second.reply.status, second.reply.result) == ("ok", "ok", "[0, 1]")


def test_an_error_leaves_the_kernel_as_it_was(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("import signal, os; kept = 3; before = (signal.getsignal(2), os.getcwd(), dict(os.environ))"))
    assert kernel.execute(f"%%spawn 3 -m {method}\nkept = 4\n1 / 0").status == "error"
    assert kernel.value("kept") == 3
    assert kernel.value("before == (signal.getsignal(2), os.getcwd(), dict(os.environ))")
    assert ok(kernel.execute(f"%%spawn 2 -m {method}\nkept + rank")).result == "[0] 3\n[1] 4"


def test_the_users_own_multiprocessing(own_kernel: Kernel) -> None:
    ok(own_kernel.execute("%%spawn 2 -m forkserver\nrank"))
    ok(own_kernel.execute("%%spawn 2 -m fork\nrank"))
    ok(own_kernel.execute("import multiprocessing as mp; mp.set_start_method('spawn')"))
    assert own_kernel.value("mp.get_start_method()") == "spawn"
    ok(own_kernel.execute("with mp.get_context('fork').Pool(2) as pool: got = pool.map(abs, [-1, -2])"))
    assert own_kernel.value("got") == [1, 2]
    assert ok(own_kernel.execute("%%spawn 2\nrank")).result == "[0] 0\n[1] 1"


def test_multiprocessing_inside_a_rank(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method}
import multiprocessing as mp
with mp.get_context('fork').Pool(2) as pool:
    got = pool.map(abs, [-1, -rank])
got"""
    assert values(kernel, cell) == [[1, 0], [1, 1]]


@once
def test_dataloader_workers_inside_a_rank(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method}
import torch
from torch.utils.data import DataLoader
sum(int(batch.sum()) for batch in DataLoader(list(range(8)), batch_size=2, num_workers=1))"""
    assert values(kernel, cell) == [28, 28]


def test_load_ext_twice_and_unload(unloaded: Kernel) -> None:
    ok(unloaded.execute("%load_ext nbspawn"))
    ok(unloaded.execute("%reload_ext nbspawn"))
    assert ok(unloaded.execute("%%spawn 2\nrank")).result == "[0] 0\n[1] 1"
    ok(unloaded.execute("%unload_ext nbspawn"))
    reply = unloaded.execute("%%spawn 2\nrank")
    assert "spawn" in reply.text("stderr") + reply.traceback and "not found" in reply.text("stderr") + reply.traceback
    ok(unloaded.execute("%load_ext nbspawn"))
    assert ok(unloaded.execute("%%spawn 2\nrank")).result == "[0] 0\n[1] 1"


# ---------------------------------------------------------------- options


@once
def test_env(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method} --env COLOR=red EMPTY= --env 'SPACED=a b=c'\nimport os\n"
    cell += "[os.environ[name] for name in ('COLOR', 'EMPTY', 'SPACED')]"
    assert values(kernel, cell) == [["red", "", "a b=c"]] * 2
    assert kernel.value("'COLOR' in __import__('os').environ") is False


@once
def test_threads(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method} --threads 3\nimport os, torch\n"
    cell += "(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
    assert values(kernel, cell) == [(3, "3")] * 2


def test_threads_by_default_are_the_cores_shared_out(kernel: Kernel, method: str) -> None:
    cores = kernel.value("len(__import__('os').sched_getaffinity(0))")
    cell = f"%%spawn 2 -m {method}\nimport torch\ntorch.get_num_threads()"
    assert values(kernel, cell) == [max(1, cores // 2)] * 2


@once
def test_log_dir(kernel: Kernel, method: str, tmp_path: Path) -> None:
    logs = tmp_path / "my logs"
    reply = ok(kernel.execute(f"%%spawn 2 -m {method} --log-dir '{logs}'\nprint('kept', rank)"))
    assert "kept 1" in reply.text()
    assert [(logs / f"rank-{rank}.log").read_text() for rank in range(2)] == ["kept 0\n", "kept 1\n"]
    assert sorted(path.name for path in logs.iterdir()) == ["rank-0.log", "rank-1.log"]


@once
def test_timeout_tells_where_ranks_stood(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method} -t 3 -g 60\nimport time\nif rank:\n    time.sleep(500)\nelse:\n    time.sleep(600)"
    reply = kernel.execute(cell)
    assert reply.ename == "RunTimeoutError"
    assert "line 4" in reply.traceback and "line 6" in reply.traceback, reply.traceback
    assert kernel.value("isinstance(__import__('sys').last_value, TimeoutError)")


@once
def test_backend_makes_the_process_group(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method} --backend gloo
import torch, torch.distributed as dist
x = torch.tensor([rank + 1.0])
dist.all_reduce(x)
(float(x), dist.get_rank(), dist.get_world_size())"""
    assert values(kernel, cell) == [(3.0, 0, 2), (3.0, 1, 2)]


@once
def test_init_process_group_without_arguments(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method}
import torch, torch.distributed as dist
dist.init_process_group('gloo')
x = torch.tensor([rank + 1.0])
dist.all_reduce(x)
dist.destroy_process_group()
float(x)"""
    assert values(kernel, cell) == [3.0, 3.0]


@once
def test_error_under_a_collective_is_the_cause(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 3 -m {method} --backend gloo -g 1
import torch, torch.distributed as dist
if rank == 1:
    raise LookupError('the cause')
dist.all_reduce(torch.ones(1))"""
    reply = kernel.execute(cell)
    assert reply.evalue == "rank 1 of 3: LookupError: the cause (line 4)", str(reply)


def test_the_parallel_torch_kernel(own_kernel: Kernel) -> None:
    """After a parallel operation in the kernel, one in a forked rank hung for ever."""
    ok(own_kernel.execute("import torch\na = torch.ones(600, 600)\nb = (a @ a).relu().sum()"))
    for method in ("fork", "forkserver"):
        cell = f"%%spawn 2 -m {method} --threads 2 -t 40\nfloat((a @ a).relu().sum())"
        assert values(own_kernel, cell) == [600.0**3] * 2
        assert own_kernel.value("float((a @ a).sum())") == 600.0**3
        own_kernel.assert_no_rank()


@pytest.mark.parametrize("kind", ["html", "text", "quiet"])
def test_views(kernel: Kernel, kind: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 --view {kind}\nprint('said', rank)"))
    assert "said 1" in reply.text()
    if kind == "quiet":
        assert [output["type"] for output in reply.outputs] == ["stdout"]
    else:
        assert ("text/html" in reply.table) == (kind == "html")
        assert "✓ done" in reply.table["text/plain"]


def test_variables_that_only_strings_name(kernel: Kernel, method: str) -> None:
    """In the cell, and in a function that it calls; where one is too large, the error says what to do."""
    pytest.importorskip("pandas")
    ok(
        kernel.execute(
            "import pandas as pd\ntable = pd.DataFrame({'a': [1, 2, 3]})\nlimit, rate, large = 1, 0.5, [0] * 10**6\n"
            "def count():\n    return len(table.query('a > @limit')), globals()['rate'], '{rate}'.format_map(globals())"
        )
    )
    assert values(kernel, f"%%spawn 2 -m {method}\ncount()") == [(2, 0.5, "0.5")] * 2
    cell = "len(table.query('a > @limit')), pd.eval('rate * 2'), eval('limit'), globals()['rate']"
    assert values(kernel, f"%%spawn 2 -m {method}\n{cell}") == [(2, 1.0, 1, 0.5)] * 2
    for used in ("table.query('a in @large')", "globals()['large']", "eval('large')"):
        reply = kernel.execute(f"%%spawn 2 -m {method}\n{used}")
        if method == "fork":
            ok(reply)
        else:
            assert (
                "large was not sent, because the cell's code does not name it, or in a string only" in reply.traceback
            )


def test_what_startup_files_define(tmp_path: Path) -> None:
    """IPython hides it from ``%who``, as it hides its own variables."""
    startup = tmp_path / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "start.py").write_text("import math\nfactor = 7\ndef scaled(x):\n    return x * factor\n")
    with Kernel(tmp_path, IPYTHONDIR=str(tmp_path / "ipython")) as kernel:
        ok(kernel.execute("%load_ext nbspawn\n1 + 1"))
        assert values(kernel, "%%spawn 2\nscaled(2), factor, math.floor(2.5)") == [(14, 7, 2)] * 2
        reply = ok(kernel.execute("%%spawn 2\nIn, Out, exit"))
        assert "ExitAutocall" in reply.result and "factor" not in reply.result


def test_a_variable_that_the_cell_does_not_name(kernel: Kernel) -> None:
    """``eval`` hides it from us; the error says what to do instead of leaving the user to wonder."""
    assert kernel.execute("hidden_variable = 5").status == "ok"
    reply = kernel.execute("%%spawn 2 -m forkserver\neval('hidden_' + 'variable')")
    assert "hidden_variable was not sent, because the cell's code does not name it" in reply.traceback
    assert kernel.execute("%%spawn 2 -m fork\neval('hidden_' + 'variable')").status == "ok"


def test_forked_ranks_beside_a_librarys_threads(own_kernel: Kernel) -> None:
    """Who asks for fork gets it, and a sentence; the default does without fork, and says why."""
    thread = """
import ctypes, threading
libc, thread, semaphore = ctypes.CDLL(None), ctypes.c_ulong(), ctypes.create_string_buffer(64)
libc.sem_init(semaphore, 0, 0)
libc.pthread_create(ctypes.byref(thread), None, libc.sem_wait, semaphore)
libc.pthread_setname_np(thread, b"mine-0")
lock = threading.Lock()
"""
    ok(own_kernel.execute(f"%load_ext nbspawn{thread}"))
    said = "a library's threads (mine-0) run in this kernel, which forked ranks do not have."
    table = ok(own_kernel.execute("%%spawn 2 -m fork\nlock.locked()")).table["text/plain"]
    assert f"Fork may not work here: {said}" in table
    reply = own_kernel.execute("%%spawn 2\nlock.locked()")
    assert reply.ename == "PayloadError" and f"is unsafe: {said}" in reply.evalue
    assert "threads" not in ok(own_kernel.execute("%%spawn 2\n1")).table["text/plain"]
