"""Edit and go on: modules that are edited on disk, and functions and classes that --push defines anew, reach ranks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import IPython
import pytest
from kernels import Kernel, Reply, ok, once
from methods import EVERY_METHOD

_numbers = itertools.count()


class Module:
    """A file in the notebook's folder, of which each version has another size."""

    def __init__(self, kernel: Kernel) -> None:
        self.name = f"edited_{next(_numbers)}"
        self.path = kernel.folder / f"{self.name}.py"

    def write(self, text: str) -> None:
        self.path.write_text(text)

    def returns(self, value: str) -> None:
        """The functions ``answer`` and ``at`` and the class ``Net`` give this."""
        self.write(
            f"import torch\ndef answer():\n    return {value}\n"
            f"class Net(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x), {value}\n"
        )


@pytest.fixture
def stopped(kernel: Kernel) -> Iterator[None]:
    """No rank is left."""
    yield
    kernel.execute("%ranks stop")


@pytest.fixture
def module(kernel: Kernel, stopped: None) -> Module:
    """What it defines gives 1 at first."""
    module = Module(kernel)
    module.returns("1")
    return module


def start(kernel: Kernel, module: Module, options: str = "", body: str = "") -> Reply:
    """Two kept ranks that have imported the module."""
    code = f"import torch, {module.name} as module\nfrom {module.name} import answer, Net\nearly = answer\n"
    return ok(kernel.execute(f"%%spawn 2 --keep {options}\n{code}{body}"))


ASK = "%%ranks\nearly(), module.answer()"
MADE = """model = Net(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
class Mine(Net): pass
mine = Mine(1, 1)
"""


# Under spawn, too: each has its own way of what a rank has imported.
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_functions_classes_and_instances_follow(kernel: Kernel, module: Module, method: str) -> None:
    start(kernel, module, f"--autoreload -m {method}", MADE)
    assert ok(kernel.execute(ASK)).result == "[0-1] (1, 1)"
    module.returns("'edited'")
    assert ok(kernel.execute(ASK)).result == "[0-1] ('edited', 'edited')"
    ask = "%%ranks\nmodel(torch.ones(1, 2))[1], mine(torch.ones(1, 1))[1], isinstance(model, module.Net), "
    ask += "isinstance(mine, Net), optimizer.param_groups[0]['params'][0] is model.weight"
    assert ok(kernel.execute(ask)).result == "[0-1] ('edited', 'edited', True, True, True)"
    module.returns("'once more'")
    assert ok(kernel.execute(ASK)).result == "[0-1] ('once more', 'once more')"


def test_what_the_notebook_has_imported_follows_in_forked_ranks(kernel: Kernel, module: Module) -> None:
    """The notebook's own does not, without %autoreload."""
    define = "class Own:\n    def value(self):\n        return "
    ok(kernel.execute(f"from {module.name} import answer, Net\nmodel = Net(2, 2)\n{define}1\nown = Own()"))
    ok(kernel.execute(f"%%spawn 2 --keep --autoreload -m fork\nimport torch, {module.name} as module\nanswer()"))
    module.returns("'edited'")
    reply = ok(kernel.execute("%%ranks\nanswer(), model(torch.ones(1, 2))[1], type(model) is Net is module.Net"))
    assert reply.result == "[0-1] ('edited', 'edited', True)"
    assert kernel.value("answer()") == 1
    ok(kernel.execute(f"{define}2"))
    assert ok(kernel.execute("%%ranks --push Own\nown.value(), type(own) is Own")).result == "[0-1] (2, True)"


@once
def test_without_it_nothing_follows_until_it_is_turned_on(kernel: Kernel, module: Module, method: str) -> None:
    start(kernel, module, f"-m {method}")
    module.returns("'edited'")
    assert ok(kernel.execute(ASK)).result == "[0-1] (1, 1)"
    cell = ASK.replace("%%ranks", "%%ranks --autoreload")
    assert ok(kernel.execute(cell)).result == "[0-1] ('edited', 'edited')", "edits since the import"
    module.returns("'once more'")
    assert ok(kernel.execute(ASK)).result == "[0-1] ('once more', 'once more')", "from then on"


@once
def test_an_edit_while_a_cell_runs(kernel: Kernel, module: Module, method: str) -> None:
    """Its module is imported, and edited before the cell ends."""
    ok(kernel.execute(f"%%spawn 2 --keep --autoreload -m {method}\npass"))
    flag = module.path.with_suffix(".flag")
    loop = f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)"
    cell = kernel.submit(f"%%ranks\nfrom {module.name} import answer\nprint('imported')\n{loop}\nanswer()")
    cell.until_ranks("imported", range(2))
    module.returns("'edited'")
    flag.touch()
    assert ok(cell.wait()).result == "[0-1] 1"
    assert ok(kernel.execute("%%ranks\nanswer()")).result == "[0-1] 'edited'"


@once
def test_a_rank_that_did_not_run_the_last_cells_follows_later(kernel: Kernel, module: Module, method: str) -> None:
    start(kernel, module, f"--autoreload -m {method}")
    module.returns("'edited'")
    assert ok(kernel.execute(ASK.replace("%%ranks", "%%ranks 1"))).result == "[1] ('edited', 'edited')"
    assert ok(kernel.execute(ASK)).result == "[0-1] ('edited', 'edited')"


def test_an_error_in_the_edited_module_is_the_cells_and_the_next_edit_repairs_it(
    kernel: Kernel, module: Module, method: str
) -> None:
    start(kernel, module, f"--autoreload -m {method}")
    module.write("def answer():\n    return 1 +\n")
    for _ in range(2):
        reply = kernel.execute("%%ranks\nprint('it ran')")
        assert reply.ename == "RankRaisedError" and "SyntaxError: invalid syntax" in reply.evalue
        assert f'File "{module.path}", line 2\n' in reply.traceback and "return 1 +" in reply.traceback
        assert "The rank ran nothing: an edited module could not be loaded again." in reply.traceback
        assert "it ran" not in reply.text() and "autoreload" not in reply.text("stderr")
    module.write("x = 5\nx / 0\n")
    reply = kernel.execute(ASK)
    assert "ZeroDivisionError" in reply.evalue and f'File "{module.path}", line 2, in <module>' in reply.traceback
    assert "nbspawn/_rank" not in reply.traceback and "superreload" not in reply.traceback
    reply = kernel.execute("%%ranks 1 --pdb\n1", answers=["p x", "q"])
    assert reply.of(1)[-1] == "5" and "ZeroDivisionError" in reply.evalue
    module.write("import time\nprint('loading')\ntime.sleep(600)\n")
    cell = kernel.submit("%%ranks\nprint('it ran')")
    cell.until_ranks("loading", range(2))
    kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt" and "it ran" not in cell.reply.text()
    module.returns("'repaired'")
    assert ok(kernel.execute(ASK)).result == "[0-1] ('repaired', 'repaired')"


@once
def test_an_error_in_one_rank(kernel: Kernel, module: Module, method: str) -> None:
    """As if its cell raised at the first line: the peers that wait for it are released, all stay usable."""
    start(kernel, module, f"--autoreload -b gloo -m {method}")
    there = kernel.folder / f"there-{method}"
    module.write(
        "import os\ndef answer():\n    return 2\nif os.environ['RANK'] == '1':\n"
        f"    while not os.path.exists({str(there)!r}): pass\n    raise ValueError('not here')\n"
    )
    together = f"%%ranks\nimport torch.distributed as dist; t = torch.ones(1); open({str(there)!r}, 'w').close()\n"
    together += "dist.all_reduce(t)\nt.item(), early()"
    reply = kernel.execute(together)
    assert reply.ename == "RankRaisedError" and "rank 1 of 2: ValueError: not here" in reply.evalue
    assert (
        f'File "{module.path}", line 6' in reply.traceback and "Rank 0 was at line 3, in all_reduce" in reply.traceback
    )
    assert "is created again" in reply.table["text/plain"]
    assert "ValueError: not here" in kernel.execute(together).evalue, "not with old code in one of them"
    module.returns("'repaired'")
    assert ok(kernel.execute(together)).result == "[0-1] (2.0, 'repaired')"


AFTER_THE_LOOK = """
from nbspawn._engine.run.edits import Edits as _Edits
_attach = _Edits.attach
def _attach_and_write(self, commands):
    _Edits.attach = _attach
    commands = _attach(self, commands)
    with open({path!r}, "w") as file:
        file.write({text!r})
    return commands
_Edits.attach = _attach_and_write
"""
"""The file is written once more when the command is on its way."""


@once
def test_a_file_that_is_saved_while_the_command_is_on_its_way_waits_for_the_next(
    kernel: Kernel, module: Module, method: str
) -> None:
    start(kernel, module, f"--autoreload -m {method}")
    late = "def answer():\n    return 'too late'\n"
    ok(kernel.execute(AFTER_THE_LOOK.format(path=str(module.path), text=late)))
    assert ok(kernel.execute(ASK)).result == "[0-1] (1, 1)"
    assert module.path.read_text() == late
    assert ok(kernel.execute(ASK)).result == "[0-1] ('too late', 'too late')"


@once
def test_a_second_edit_while_the_first_is_on_its_way_is_an_error(kernel: Kernel, module: Module, method: str) -> None:
    """No rank can have the version that was sent, and those that were quicker might."""
    start(kernel, module, f"--autoreload -m {method}")
    late = "def answer():\n    return 'too late'\n"
    ok(kernel.execute(AFTER_THE_LOOK.format(path=str(module.path), text=late)))
    module.returns("'edited'")
    reply = kernel.execute(ASK)
    assert reply.ename == "RankRaisedError" and f"{module.path} was written once more while" in reply.traceback
    assert ok(kernel.execute(ASK)).result == "[0-1] ('too late', 'too late')"


@pytest.fixture
def following(kernel: Kernel, module: Module) -> Iterator[Module]:
    """The notebook has imported the module, and follows edits itself; at the end it does not."""
    if IPython.version_info < (8,) and sys.version_info >= (3, 12):
        pytest.skip("IPython 7's own autoreload needs imp, which Python has no longer")
    ok(kernel.execute(f"%load_ext autoreload\n%autoreload 2\nimport {module.name} as module"))
    yield module
    kernel.execute(
        "%autoreload 0\nget_ipython().magics_manager.registry['AutoreloadMagics']._reloader.skip_modules.clear()"
    )


@pytest.mark.extended
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_notebooks_autoreload_reaches_its_ranks(kernel: Kernel, following: Module, method: str) -> None:
    start(kernel, following, f"-m {method}")
    following.returns("'edited'")
    assert ok(kernel.execute(ASK)).result == "[0-1] ('edited', 'edited')"
    assert kernel.value("module.answer()") == "edited"
    ok(kernel.execute("%autoreload 0"))
    following.returns("'once more'")
    assert ok(kernel.execute(ASK)).result == "[0-1] ('edited', 'edited')"
    ok(kernel.execute(f"%autoreload 2\n%aimport -{following.name}"))
    assert ok(kernel.execute(ASK)).result == "[0-1] ('edited', 'edited')", "as in the notebook"
    ok(kernel.execute(f"%autoreload 1\n%aimport {following.name}"))
    assert ok(kernel.execute(ASK)).result == "[0-1] ('once more', 'once more')"


@pytest.mark.extended
def test_an_error_of_the_notebooks_autoreload_is_not_printed_by_forked_ranks(kernel: Kernel, following: Module) -> None:
    start(kernel, following, "-m fork")
    following.write("1 / 0\n")
    reply = kernel.execute(ASK)
    assert "ZeroDivisionError" in reply.evalue and "autoreload of" not in reply.text()
    following.returns("'repaired'")
    assert ok(kernel.execute(ASK)).result == "[0-1] ('repaired', 'repaired')"


DEFINE = """import torch
class Net(torch.nn.Linear):
    def forward(self, x):
        return {}
def loss(y):
    return {}
"""


def test_what_push_defines_anew_is_followed(kernel: Kernel, method: str, stopped: None) -> None:
    ok(kernel.execute(DEFINE.format("'old'", "'old'")))
    ok(kernel.execute(f"%%spawn 2 --keep -m {method}\nimport torch\n{MADE}early = loss\nmodel(1)"))
    ok(kernel.execute(DEFINE.format("super().forward(x) * 0", "y + 1")))
    ask = "model(torch.ones(1, 2)).sum().item() == 0, mine(torch.ones(1, 1)).item() == 0, early(1), loss(1), "
    ask += "isinstance(model, Net), isinstance(mine, Net), optimizer.param_groups[0]['params'][0] is model.weight"
    reply = ok(kernel.execute(f"%%ranks --push Net,loss\n{ask}"))
    assert reply.result == "[0-1] (True, True, 2, 2, True, True, True)"
    assert reply.text() == reply.text("stderr") == "", "nothing is said"


@once
def test_push_changes_no_function_of_a_library(kernel: Kernel, method: str, module: Module) -> None:
    start(kernel, module, f"-m {method}", "def helper(): return 1\nother = helper\nfrom textwrap import dedent")
    ok(kernel.execute("def dedent(text):\n    return 'mine'\ndef other():\n    return 2"))
    reply = ok(
        kernel.execute(
            "%%ranks --push dedent,other\nimport textwrap\ndedent(''), textwrap.dedent(' x'), other(), helper()"
        )
    )
    assert reply.result == "[0-1] ('mine', 'x', 2, 1)"


SESSION = """import nbspawn
with nbspawn.Session(2, start_method={method!r}, autoreload=True) as session:
    def say(rank):
        from {name} import answer
        return answer()
    class Thing:
        def value(self):
            return 1
    session.push(Thing=Thing)
    found = [list(session.run(say)), session.execute("thing = Thing(); 0").by_rank[0]]
    with open({path!r}, "w") as file:
        file.write("def answer():\\n    return 'edited'\\n")
    found += [list(session.run(say)), session.execute("import {name}; {name}.answer()").by_rank[1]]
    class Thing:
        def value(self):
            return 2
    session[0].push(Thing=Thing)
    found.append(list(session.execute("thing.value(), isinstance(thing, Thing)")))
found"""


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_session(kernel: Kernel, module: Module, method: str) -> None:
    code = SESSION.format(method=method, name=module.name, path=str(module.path))
    assert kernel.value(code) == [[1, 1], 0, ["edited", "edited"], "edited", [(2, True), (1, True)]]


@once
def test_auto_mode_and_the_background(kernel: Kernel, module: Module, method: str) -> None:
    start(kernel, module, f"--autoreload -m {method}")
    ok(kernel.execute("%ranks auto on"))
    module.returns("'edited'")
    assert ok(kernel.execute("early()")).result == "[0-1] 'edited'"
    ok(kernel.execute("%ranks auto off"))
    module.returns("'once more'")
    ok(kernel.execute("%%ranks --background -o handle\nearly()"))
    assert kernel.value("list(handle.result())") == ["once more", "once more"]
    ok(kernel.execute("%ranks restart"))
    ok(kernel.execute(f"%%ranks\nfrom {module.name} import answer as early"))
    module.returns("'after a restart'")
    assert ok(kernel.execute("%%ranks\nearly()")).result == "[0-1] 'after a restart'"


@once
def test_usage(kernel: Kernel, method: str) -> None:
    reply = kernel.execute("%%spawn 2 --autoreload\n1")
    assert reply.ename == "UsageError"
    assert "autoreload is for kept ranks (--keep): others import every module anew" in reply.traceback
    for magic in ("%%spawn 4 --keep", "%%ranks"):
        assert kernel.complete(f"{magic} --autor") == ["--autoreload"]
