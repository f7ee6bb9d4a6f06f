"""Libraries that draw for a front end (rich, tqdm, ipywidgets, IPython's displays) draw text in a rank, whatever the
start method, and whether they were imported in the notebook or are in the cell."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import ipywidgets  # type: ignore[import-untyped]
import pytest
from kernels import Kernel, Reply, ok, once, plain

from nbspawn._render.lines import LineBuffer

IMPORTS = """
import rich
import ipywidgets
from rich.console import Console
from rich.live import Live
from rich.progress import Progress, track
from tqdm.auto import tqdm as auto_tqdm
from tqdm.notebook import tqdm, trange
"""


@pytest.fixture(scope="module")
def with_libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook that has imported all of them, and has used them."""
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        ok(kernel.execute("%load_ext nbspawn\n" + IMPORTS))
        ok(kernel.execute("rich.print('here')\nconsole = Console()"))
        ok(kernel.execute("out = ipywidgets.Output()\nfor _ in trange(2): pass"))
        yield kernel


@pytest.fixture(params=["imported in the cell", "imported before"])
def run(request: pytest.FixtureRequest, kernel: Kernel, with_libraries: Kernel, method: str) -> Iterator[Run]:
    """Runs a cell by a start method, in a notebook that has imported these libraries and in one that has not."""
    yield Run(with_libraries if request.param == "imported before" else kernel, method)
    with_libraries.assert_no_rank()


class Run:
    def __init__(self, kernel: Kernel, method: str) -> None:
        self.kernel = kernel
        self.method = method

    def __call__(self, cell: str) -> Reply:
        return ok(self.kernel.execute(f"%%spawn 2 -m {self.method}\n{IMPORTS}{cell}"))


def of(reply: Reply, rank: int) -> list[str]:
    """What the rank printed, without colours."""
    return [plain(line) for line in reply.of(rank)]


def tables(reply: Reply) -> str:
    """The table as text, if it has been drawn."""
    return "".join(output["data"].get("text/plain", "") for output in reply.saved if output["type"] == "display_data")


# ---------------------------------------------------------------- rich


def test_rich_progress_is_text(run: Run) -> None:
    """What is printed meanwhile stands above; each bar is left once, full."""
    reply = run("""
with Progress() as progress:
    tasks = [progress.add_task(name, total=30) for name in ('one', 'two', 'three')]
    for step in range(30):
        for task in tasks: progress.update(task, advance=1, refresh=True)
        if step % 10 == 0: print('at', step)
for _ in track(range(3), 'tracked'): pass
print('end')""")
    for rank in range(2):
        words = [re.sub(r" +━.*100%.*", " full", line) for line in of(reply, rank) if line.strip()]
        assert words == ["at 0", "at 10", "at 20", "one full", "two full", "three full", "tracked full", "end"]
    assert reply.shown == []


def test_what_a_logger_says_beside_a_rich_bar_stands_above_it(run: Run) -> None:
    """Its handler holds the stream that was sys.stderr before rich took it over, as Lightning's does."""
    reply = run("""
import logging, sys
logger = logging.getLogger('beside a bar')
logger.addHandler(logging.StreamHandler(sys.stderr)); logger.propagate = False
with Progress() as progress:
    task = progress.add_task('one', total=2)
    for step in range(2):
        progress.update(task, advance=1, refresh=True)
        logger.warning('at %s', step)
print('end')""")
    for rank in range(2):
        words = [re.sub(r" +━.*100%.*", " full", line) for line in of(reply, rank) if line.strip()]
        assert words == ["at 0", "at 1", "one full", "end"]


def test_rich_live_leaves_its_last_state(run: Run) -> None:
    reply = run("""
from rich.table import Table
def table(rows):
    drawn = Table('step')
    for row in range(rows): drawn.add_row(f'{row} of {rows}')
    return drawn
with Live(auto_refresh=False) as live:
    for rows in range(1, 9):
        live.update(table(rows), refresh=True)
        live.console.print('above', rows)
print('end')""")
    for rank in range(2):
        lines = of(reply, rank)
        assert lines[:8] == [f"above {rows}" for rows in range(1, 9)]
        assert [line for line in lines if " of " in line] == [f"│ {row} of 8 │" for row in range(8)]
        assert lines[-1] == "end" and reply.text().count("┏") == reply.text().count("└")
    assert reply.shown == []


def test_rich_print_is_text_in_colour(run: Run) -> None:
    reply = run("rich.print('[red]word[/]'); Console().print([rank])")
    assert of(reply, 1) == ["word", "[1]"]
    assert "\x1b[31mword\x1b[0m" in reply.text()
    assert reply.shown == []


def test_a_console_of_the_notebook_draws_text_while_it_runs(with_libraries: Kernel, tmp_path: Path) -> None:
    """It was made for Jupyter; under fork it is inherited."""
    go = tmp_path / "go"
    cell = with_libraries.submit(
        "%%spawn 1 -m fork\nimport os\nconsole.print('begin')\n"
        "with Progress(console=console, auto_refresh=False) as progress:\n"
        "    progress.update(progress.add_task('half', total=2), advance=1, refresh=True)\n"
        f"    while not os.path.exists({str(go)!r}): pass"
    )
    cell.see(lambda: cell.over or re.search("half +50%", tables(cell.reply)), "the table shows how far it is")
    go.touch()
    reply = ok(cell.wait())
    assert [line.split()[0] for line in of(reply, 0) if line] == ["begin", "half"] and reply.shown == []


def test_rich_where_the_kernel_says_nothing_of_colours(own_kernel: Kernel) -> None:
    """Older versions of ipykernel, and Python outside of a notebook."""
    ok(own_kernel.execute("import os\nos.environ.pop('FORCE_COLOR', None)"))
    cell = "from rich.live import Live\nwith Live('first') as live: live.update('last')\nprint('end')"
    for method in ("fork", "forkserver"):
        reply = ok(own_kernel.execute(f"%%spawn 1 -m {method}\n{cell}"))
        assert of(reply, 0) == ["last", "end"]


def test_an_interrupt_of_a_rich_live(run: Run) -> None:
    cell = run.kernel.submit(f"""%%spawn 2 -m {run.method}
{IMPORTS}
import time
with Progress() as progress:
    task = progress.add_task('endless', total=100)
    print('started')
    while True: progress.update(task, completed=50); time.sleep(0.01)""")
    cell.until_ranks("started", range(2))
    run.kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt"
    for rank in range(2):
        assert sum("endless" in line for line in of(reply, rank)) <= 1


@once
def test_rows_wait_while_the_cursor_is_hidden(method: str) -> None:
    """In pieces of any size: no row is left behind that is drawn again."""
    from rich.console import Console
    from rich.progress import Progress

    file = io.StringIO()
    with Progress(console=Console(file=file, force_terminal=True, width=60), auto_refresh=False) as progress:
        tasks = []
        for step in range(6):
            tasks.append(progress.add_task(f"task {step}", total=6 - step))
            for task in tasks:
                progress.update(task, advance=1, refresh=True)
            progress.console.print("printed", step)
    written = (file.getvalue() + "end\n").encode()
    for size in (5, 100, len(written)):
        buffer = LineBuffer()
        pieces = [written[start : start + size] for start in range(0, len(written), size)]
        lines = [plain(line) for piece in pieces for line in buffer.feed(piece)[0]]
        lines += map(plain, buffer.finish())
        assert lines[:6] == [f"printed {step}" for step in range(6)]
        assert [line[:6] for line in lines[6:]] == [f"task {step}" for step in range(6)] + ["end"]


# ---------------------------------------------------------------- tqdm


def test_notebook_bars_are_text_bars(run: Run) -> None:
    """With the arguments that only they have."""
    reply = run("""
for _ in tqdm(range(5), desc='bar', ncols='100%', mininterval=0): pass
for _ in trange(6, display=False, disable=None): pass
for _ in trange(7, leave=False): pass
bar = tqdm(total=3, ncols=40)
bar.update(2); bar.reset(total=4); bar.set_description('again'); bar.update(4); bar.close()
for _ in auto_tqdm(range(8)): pass
print('end')""")
    for rank in range(2):
        lines = of(reply, rank)
        assert [re.sub(r"^(\w*).*?(\d+/\d+).*", r"\1 \2", line) for line in lines] == [
            *("bar 5/5", "100 6/6", "again 4/4", "100 8/8"),
            "end",
        ]
        bar = re.sub("–[0-9.]+", "", lines[2])  # of one rank
        assert all("100%|█" in line for line in lines[:-1]) and len(bar) <= 40
    assert reply.shown == []


BARS_OF_THE_NOTEBOOK = """
from tqdm.std import tqdm as text_bar
from tqdm.notebook import tqdm
theirs, hidden, plain = tqdm(total=5, desc="theirs"), tqdm(total=5, display=False), text_bar(total=5, desc="plain")
"""


def test_bars_of_the_notebook_draw_text_in_a_forked_rank(own_kernel: Kernel) -> None:
    """And leave the kernel's in peace: all bars share a lock between processes."""
    ok(own_kernel.execute(BARS_OF_THE_NOTEBOOK))
    ok(own_kernel.execute("theirs.colour = 'green'"))
    cell = (
        "theirs.update(2); theirs.refresh(); theirs.reset(total=4); theirs.set_description('again')\n"
        "for bar in (theirs, hidden, plain): bar.update(3); bar.refresh(); bar.close()"
    )
    reply = ok(own_kernel.execute(f"%%spawn 1 -m fork\n{cell}"))
    drawn = " ".join(of(reply, 0))
    assert re.search("again: +75%.*3/4", drawn) and re.search("plain: +60%.*3/5", drawn)
    assert reply.shown == []
    ok(own_kernel.execute("for bar in (theirs, hidden, plain): bar.update(5); bar.close()", 10))


def test_a_forked_rank_that_dies_in_a_bar_holds_up_no_bar_of_the_kernel(own_kernel: Kernel) -> None:
    """It holds the lock of all bars then, its own."""
    ok(own_kernel.execute(BARS_OF_THE_NOTEBOOK))
    own_kernel.execute("%%spawn 1 -m fork\nimport os\ntext_bar.get_lock().acquire()\nos._exit(1)")
    ok(own_kernel.execute("for _ in text_bar(range(3)): pass", 10))
    ok(own_kernel.execute("%%spawn 2 -m fork -t 20\nfor _ in text_bar(range(3)): pass"))


def test_automatic_bars_need_no_widgets(kernel: Kernel, method: str) -> None:
    """Each rank would import them, only to draw a text bar."""
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nimport sys, tqdm.auto\n'tqdm.notebook' in sys.modules"))
    assert reply.result == "[0-1] False"


def test_the_table_shows_how_far_a_notebook_bar_is(kernel: Kernel, method: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = kernel.submit(
        f"%%spawn 1 -m {method}\nimport os\nfrom tqdm.notebook import tqdm\n"
        f"bar = tqdm(total=4, mininterval=0); bar.update(3)\nwhile not os.path.exists({str(go)!r}): pass"
    )
    cell.see(lambda: cell.over or "75% 3/4" in tables(cell.reply), "the table shows how far it is")
    go.touch()
    ok(cell.wait())


# ---------------------------------------------------------------- ipywidgets


def test_widgets_show_as_text(run: Run) -> None:
    reply = run("""
bar = ipywidgets.IntProgress(max=3)
for bar.value in range(4): pass
display(bar)
html = ipywidgets.HTML('first'); html.value = 'second'
display(ipywidgets.HBox([html]), ipywidgets.FloatProgress(0.5))
shown = ipywidgets.interact(lambda x: print('called with', x) or [x], x=3)
html.close()
print('end')""")
    for rank in range(2):
        lines = [line for line in of(reply, rank) if not line.startswith("interactive(")]
        assert lines == [
            "IntProgress(value=3, max=3)",
            "HBox(children=(HTML(value='second'),))",
            "FloatProgress(value=0.5)",
            *("called with 3", "[3]", "end"),
        ]
    assert reply.shown == []


@pytest.mark.skipif(ipywidgets.__version__ < "8", reason="ipywidgets 7 displays what is only asked for its text")
@once
def test_a_widget_as_the_cells_value_is_shown_once(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nimport ipywidgets\nipywidgets.IntProgress(value=3)"))
    assert reply.result == "[0-1] IntProgress(value=3)" and reply.lines == []


def test_output_lets_everything_through(run: Run) -> None:
    reply = run("""
from IPython.display import HTML
mine = ipywidgets.Output()
with mine:
    print('printed')
    display(HTML('shown'))
@mine.capture()
def captured(): print('captured')
captured()
print('end')""")
    for rank in range(2):
        assert of(reply, rank) == ["printed", "captured", "end"]
    assert [data["text/html"] for data in reply.shown] == ["shown", "shown"]


def test_widgets_of_the_notebook_are_not_heard_from_a_rank(with_libraries: Kernel) -> None:
    """Their comms are the kernel's: what a forked rank sent there would hang, or get into the notebook."""
    cell = "%%spawn 2 -m fork\nwith out:\n    print('through', rank)\nout.msg_id = 'of a rank'"
    reply = ok(with_libraries.execute(cell))
    assert [reply.of(rank) for rank in range(2)] == [["through 0"], ["through 1"]]
    assert with_libraries.value("out.msg_id") == ""


def test_who_holds_the_kernel_is_not_heard_either(with_libraries: Kernel) -> None:
    """jupyter_client would complain in the kernel's terminal, and wait for ever."""
    ok(with_libraries.execute("held = get_ipython().kernel"))
    before = with_libraries.terminal
    cell = """%%spawn 1 -m fork -t 20
held.session.send(held.iopub_socket, 'stream', {'name': 'stdout', 'text': 'from a rank'}), held.session.recv(None)"""
    reply = ok(with_libraries.execute(cell))
    assert reply.result == "[0] (None, (None, None))" and reply.lines == []
    assert with_libraries.terminal == before


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("get_ipython().run_line_magic('run', {script!r})", "ZeroDivisionError: division by zero"),
        ("get_ipython().run_line_magic('run', '-m fails')", "ZeroDivisionError: division by zero"),
        ("get_ipython().run_line_magic('run', {notebook!r})", "ZeroDivisionError: division by zero"),
        ("get_ipython().run_line_magic('run', {leaves!r})", "process 1 terminated with exit code 3"),
        ("get_ipython().run_line_magic('time', '1 / 0')", "ZeroDivisionError: division by zero"),
        ("ipywidgets.interact(lambda x: {{}}[x], x=3)", "KeyError: 3"),
        ("exec('with ipywidgets.Output(): 1 / 0')", "ZeroDivisionError: division by zero"),
    ],
)
@once
def test_an_error_that_a_library_shows_is_the_cells(kernel: Kernel, method: str, code: str, error: str) -> None:
    """It would show it and go on, and peers would wait for ever."""
    names = {name: kernel.folder / f"fails.{kind}" for name, kind in (("script", "py"), ("notebook", "ipy"))}
    for path in names.values():
        path.write_text("print('script')\n1 / 0\n")
    names["leaves"] = kernel.folder / "leaves.py"
    names["leaves"].write_text("import sys\nsys.exit(3)\n")
    called = code.format(**{name: str(path) for name, path in names.items()})
    cell = f"%%spawn 2 -m {method} -b gloo\nimport sys, ipywidgets, torch.distributed as dist\n"
    cell += f"sys.path.insert(0, {str(kernel.folder)!r})\nif rank: {called}\ndist.barrier()\nprint('end')"
    reply = kernel.execute(cell)
    assert reply.status == "error" and f"rank 1 of 2: {error}" in reply.traceback, str(reply)
    assert "end" not in reply.of(1)
    assert "(line 4)" in reply.traceback or "exit code" in error or "notebook" in code  # whose cells have lines, too


@once
@pytest.mark.parametrize(
    "code",
    [
        "try: 1 / 0\nexcept ZeroDivisionError: get_ipython().showtraceback()",
        "assert get_ipython().run_cell('1 / 0').error_in_exec",
    ],
)
def test_an_error_that_the_user_shows_is_only_shown(kernel: Kernel, method: str, code: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\n{code}\nprint('end')"))
    for rank in range(2):
        assert [plain(line) for line in reply.of(rank)][-2:] == ["ZeroDivisionError: division by zero", "end"]


def test_an_interrupt_ends_a_loop_around_output(run: Run) -> None:
    """Output's own way is to show it and to go on; kept ranks would have to be killed."""
    ok(run.kernel.execute(f"%%spawn 2 --keep -m {run.method}\n{IMPORTS}\nkept = rank"))
    cell = run.kernel.submit(
        "%%ranks\nimport time\nloop = ipywidgets.Output()\nprint('started')\nwhile True:\n    with loop: time.sleep(10)"
    )
    cell.until_ranks("started", range(2))
    run.kernel.interrupt()
    assert cell.wait().ename == "KeyboardInterrupt"
    assert ok(run.kernel.execute("%%ranks\nkept")).result == "[0] 0\n[1] 1"
    ok(run.kernel.execute("%ranks stop"))


# ---------------------------------------------------------------- IPython


def test_displays_that_are_updated_and_cleared(run: Run) -> None:
    """An update that came before is not shown in the place of what came later, nor is one of what was cleared."""
    reply = run("""
from IPython.display import HTML, ProgressBar, clear_output
handle = display(HTML('first'), display_id=True)
handle.update(HTML('second'))
for _ in ProgressBar(4): pass
for frame in range(3):
    clear_output(wait=True)
    display(HTML(f'frame {frame}'))
handle.update(HTML('late'))
for _ in ProgressBar(4): pass""")
    assert len(reply.shown) == 4
    assert [data["text/html"] for data in reply.shown].count("frame 2") == 2
    assert sum("4/4" in data["text/plain"] for data in reply.shown) == 2


def test_a_question_mark(run: Run) -> None:
    """Under fork the answer would be sent along with the reply of a kernel that does not reply."""
    reply = run("import textwrap\ntextwrap.dedent?")
    assert any("Remove any common leading whitespace" in line for line in of(reply, 1))


def test_there_is_no_kernel_in_a_rank(run: Run) -> None:
    """One rule for all start methods, and for every library that asks."""
    reply = run("""
from ipykernel.kernelbase import Kernel
hasattr(get_ipython(), 'kernel') or Kernel.initialized() or 'IPKernelApp' in get_ipython().config""")
    assert reply.result == "[0-1] False"


# ---------------------------------------------------------------- kept ranks, and spawn


ALL = """
with Progress(auto_refresh=False) as progress:
    for name in 'ab': progress.update(progress.add_task(name, total=2), advance=2, refresh=True)
with ipywidgets.Output(): display(ipywidgets.IntProgress(value=1))
for _ in tqdm(range(5)): pass
for _ in auto_tqdm(range(6)): pass
print('end')"""


def check_all(reply: Reply) -> None:
    for rank in range(2):
        words = [re.sub(r" *[━|].*", "", line) for line in of(ok(reply), rank)]
        assert words == ["a", "b", "IntProgress(value=1)", "100%", "100%", "end"]
    assert reply.shown == []


def test_in_kept_ranks(run: Run) -> None:
    ok(run.kernel.execute(f"%%spawn 2 --keep -m {run.method}\n1"))
    for _ in range(2):
        check_all(run.kernel.execute("%%ranks\n" + IMPORTS + ALL))
    ok(run.kernel.execute("%ranks stop"))


@pytest.mark.extended
def test_in_spawned_ranks(kernel: Kernel, with_libraries: Kernel) -> None:
    for one in (kernel, with_libraries):
        check_all(one.execute("%%spawn 2 -m spawn\n" + IMPORTS + ALL))


@once
def test_few_pictures_where_nobody_can_be_asked(kernel: Kernel, method: str) -> None:
    """jupyter-server-documents appends each update of a display to the notebook. The last state is shown."""
    cell = f"""%%spawn 2 -m {method}
import time
from IPython.display import display
shown = display(-1, display_id=True)
for step in range(30):
    time.sleep(0.1)
    shown.update(step)
"""
    headless, asked = (ok(kernel.execute(cell, stdin=stdin)) for stdin in (False, True))
    assert headless.updates <= 18 < asked.updates, "a table and two displays, as often as the time has doubled"
    for reply in (headless, asked):
        assert [data["text/plain"] for data in reply.shown if data["text/plain"] == "29"] == ["29"] * 2
        assert "✓ done" in reply.table["text/plain"]


ERRORS = """
def fail():
    assert rank != 1, "one"
fail()
"""


def test_richs_tracebacks(own_kernel: Kernel, method: str) -> None:
    """Its handler does not ask ``_render_traceback_``: the rank's traceback is there, and no way through nbspawn."""
    ok(own_kernel.execute("%load_ext nbspawn\n%load_ext rich"))
    reply = own_kernel.execute(f"%%spawn 2 -m {method}{ERRORS}")
    said = plain(reply.outputs[-1]["data"]["text/plain"])
    assert re.search(r"RankRaisedError: rank 1 of 2: AssertionError: one \(line 3\)", said), str(reply)
    assert re.search(r"in fail\b.*AssertionError: one", said, re.DOTALL), said
    assert "nbspawn/_" not in said and len(said) < 2000
    assert ok(own_kernel.execute("import sys\nassert 'in fail' in str(sys.last_value.__cause__)"))
    for bad, name in (
        ("%%spawn 2 --nosuch\n1", "UsageError"),
        ("%ranks nosuch", "UsageError"),
        ("%%spawn\n x = =", "Synt"),
    ):
        reply = own_kernel.execute(bad)
        said = plain(reply.outputs[-1]["data"]["text/plain"])
        assert said.startswith(name) and len(said) < 300, said


def test_hydra_finds_its_files_beside_the_notebook(own_kernel: Kernel, method: str) -> None:
    """It asks for the name of the shell's class, and takes the first directory that the notebook has been in."""
    pytest.importorskip("hydra")
    (own_kernel.folder / "conf").mkdir()
    (own_kernel.folder / "conf" / "config.yaml").write_text("lr: 0.1\n")
    (own_kernel.folder / "elsewhere").mkdir()
    ok(own_kernel.execute("%load_ext nbspawn\n%cd -q elsewhere"))
    cell = """
from hydra import compose, initialize
with initialize(version_base=None, config_path="conf"):
    config = compose("config")
config.lr"""
    assert ok(own_kernel.execute(cell)).result == "0.1"
    assert ok(own_kernel.execute(f"%%spawn 2 -m {method}{cell}")).result == "[0-1] 0.1"
