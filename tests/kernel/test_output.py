"""What ranks print and display, as it arrives under the cell: order, marks, bounds, and the table that stays."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from kernels import Kernel, Reply, ok, once, plain, ranks_in
from methods import PATIENCE


def words_of(reply: Reply, rank: int) -> list[str]:
    """What a rank printed and displayed, in the order of the cell's outputs; displays are HTML here."""
    found: list[str] = []
    for output in reply.outputs[1:]:
        if output["type"] == "stdout":
            marked = (re.match(r"\[([\d,-]+)\] *(.*)", line) for line in output["text"].splitlines())
            found += [match[2] for match in marked if match and rank in ranks_in(match[1]) and match[2] != "↓"]
        elif output["type"] == "display_data":
            found.append(output["data"]["text/html"])
    return found


# ---------------------------------------------------------------- of which ranks


def test_the_output_of_some_ranks_only(kernel: Kernel, method: str, tmp_path: Path) -> None:
    shows = "from IPython.display import HTML, display\nprint('line of', rank)\ndisplay(HTML(f'<b>{rank}</b>'))\nrank"
    reply = ok(kernel.execute(f"%%spawn 3 -m {method} --local-ranks-filter 0,2 --log-dir {tmp_path}\n{shows}"))
    printed = [[word for word in words_of(reply, rank) if word.startswith("line")] for rank in range(3)]
    assert printed == [["line of 0"], [], ["line of 2"]]
    displayed = [output["data"]["text/html"] for output in reply.outputs[1:] if output["type"] == "display_data"]
    assert sorted(displayed) == ["<b>0</b>", "<b>2</b>"]
    assert reply.result == "[0] 0\n[1] 1\n[2] 2", "their values are those of all"
    assert "line of 1" in (tmp_path / "rank-1.log").read_text()


# ---------------------------------------------------------------- the table


def test_table_is_the_first_output_and_its_last_state_stays(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 3 -m {method}\nprint('working', rank)\nrank * 11"))
    table = reply.outputs[0]
    assert table["type"] == "display_data" and set(table["data"]) == {"text/html", "text/plain"}
    for text in table["data"].values():
        assert text.count("done") == 3 and "22" in text
        assert "● running" not in text and "○ starting" not in text
    assert "<script" not in table["data"]["text/html"] and "<table" in table["data"]["text/html"]
    assert sum(output["type"] == "display_data" for output in reply.outputs) == 1


def test_table_of_a_failed_run(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 3 -m {method} -g 60\nimport time\nif rank == 1:\n    raise ValueError('<b>&')\ntime.sleep(60)"
    reply = kernel.execute(cell)
    assert "ValueError: <b>& (line 4)" in reply.table["text/plain"]
    assert "ValueError: &lt;b&gt;&amp; (line 4)" in reply.table["text/html"]
    assert "interrupted" in reply.table["text/plain"]
    assert [output["type"] for output in reply.outputs][0] == "display_data"
    assert [output["type"] for output in reply.outputs][-1] == "error"


def test_table_is_live(kernel: Kernel, method: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = kernel.submit(
        f"%%spawn 2 -m {method}\nimport os\nprint('here', rank)\nwhile not os.path.exists({str(go)!r}): pass"
    )
    cell.until("here", times=2)
    cell.read_until(lambda: cell.reply.table["text/plain"].count("● running") == 2, "both rows say running", PATIENCE)
    go.touch()
    assert "✓ done" in ok(cell.wait()).table["text/plain"]


# ---------------------------------------------------------------- order


def test_prints_and_displays_keep_their_order(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method}
from IPython.display import HTML, display
for i in range(100):
    print(f'p{{i}}')
    display(HTML(f'd{{rank}}-{{i}}'))
print('end')"""
    reply = ok(kernel.execute(cell))
    for rank in range(2):
        mine = [word for word in words_of(reply, rank) if not word.startswith(f"d{1 - rank}")]
        assert mine == [word for i in range(100) for word in (f"p{i}", f"d{rank}-{i}")] + ["end"]


def test_stdout_and_stderr_keep_their_order(kernel: Kernel, method: str) -> None:
    cell = (
        f"%%spawn 2 -m {method}\nimport sys\nfor i in range(50):\n    print('o', i)\n    print('e', i, file=sys.stderr)"
    )
    reply = ok(kernel.execute(cell))
    for rank in range(2):
        assert reply.of(rank) == [f"{word} {i}" for i in range(50) for word in "oe"]


def test_lines_of_c_code_keep_their_order(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method}
import ctypes, os
libc = ctypes.CDLL(None)
for i in range(20):
    print(f'python {{i}}')
    libc.printf(b'printf %d\\n', i); libc.fflush(None)
    os.write(1, f'write {{i}}\\n'.encode())
libc.printf(b'unflushed %d\\n', rank)"""
    reply = ok(kernel.execute(cell))
    for rank in range(2):
        expected = [f"{word} {i}" for i in range(20) for word in ("python", "printf", "write")]
        assert reply.of(rank) == [*expected, f"unflushed {rank}"]


def test_a_line_without_an_end(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nprint('half', end='')\nprint(' whole')\nprint('rest', end='')"))
    assert reply.of(0) == reply.of(1) == ["half whole", "rest"]


# ---------------------------------------------------------------- text


def test_utf8_split_between_writes(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method}
import os, time
for byte in 'aé漢🙂b\\n'.encode():
    os.write(1, bytes([byte]))
    time.sleep(0.005)
os.write(1, b'bad \\xff byte\\n')"""
    reply = ok(kernel.execute(cell))
    assert reply.of(0)[0] == reply.of(1)[0] == "aé漢🙂b"
    assert re.fullmatch(r"bad .+ byte", reply.of(0)[1])


def test_colours(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nprint('\\x1b[31mred\\x1b[0m plain')"))
    assert "\x1b[31mred\x1b[0m plain" in reply.text()
    assert set(plain(line) for line in reply.of(0) + reply.of(1)) == {"red plain"}
    assert "\x1b" not in reply.table["text/plain"] and "\x1b" not in reply.table["text/html"]


def test_carriage_returns(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nfor i in range(5): print(f'\\rstep {{i}}', end='')\nprint()"))
    assert reply.of(0) == reply.of(1) == ["step 4"]


def test_tqdm_leaves_one_line(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\nfrom tqdm import tqdm\nfor i in tqdm(range(50), mininterval=0): pass\nprint('end')"
    reply = ok(kernel.execute(cell))
    for rank in range(2):
        bar, end = reply.of(rank)
        assert "100%" in bar and "50/50" in bar and end == "end"


def test_prints_beside_a_bar_are_lines_of_their_own_at_once(kernel: Kernel, method: str, tmp_path: Path) -> None:
    go = tmp_path / "go"
    cell = kernel.submit(
        f"""%%spawn 2 -m {method}
import os, sys, time
from tqdm import tqdm
outer = tqdm(total=2, mininterval=0, desc='outer')
for step in range(2):
    for _ in tqdm(range(3), mininterval=0, desc='inner', leave=False):
        print('step', step, end='')
        print('', 'said')
    outer.update()
while not os.path.exists({str(go)!r}): time.sleep(0.01)
outer.close()
print('end')
sys.stderr.write('50 %\\r'); print('after')"""
    )
    cell.until("step 1 said", times=3)
    go.touch()
    reply = ok(cell.wait())
    for rank in range(2):
        lines = [re.sub(r"\|.*", "", line).rstrip() for line in reply.of(rank)]
        assert lines == ["step 0 said"] * 3 + ["step 1 said"] * 3 + ["outer: 100%", "end", "after"]


def test_a_bar_that_is_left_unfinished_is_one_line(kernel: Kernel, method: str) -> None:
    """It stands below what is printed after it, and draws itself for the last time when the rank ends."""
    cell = (
        f"%%spawn 2 -m {method}\nfrom tqdm import tqdm\nbar = tqdm(total=9, mininterval=0)\nbar.update(6)\nprint('end')"
    )
    reply = ok(kernel.execute(cell))
    for rank in range(2):
        end, bar = reply.of(rank)
        assert end == "end" and "6/9" in bar


def test_a_warning_beside_a_bar_is_a_line_of_its_own(kernel: Kernel, method: str) -> None:
    cell = "import warnings\nfrom tqdm import tqdm\nfor step in tqdm(range(9), mininterval=0):\n"
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\n{cell}    if step == 4: warnings.warn('careful')"))
    for rank in range(2):
        warning, _, bar = reply.of(rank)
        assert re.search(r"^\S+: UserWarning: careful$", warning) and "9/9" in bar


def test_bars_of_all_ranks_are_one_line_each(kernel: Kernel, method: str) -> None:
    """In order, whatever each rank's rates are, though one rank alone prints between them."""
    cell = f"""%%spawn 3 -m {method} -b gloo
import time, torch.distributed as dist
from tqdm import tqdm
for epoch in range(3):
    for step in tqdm(range(4), desc=f'epoch {{epoch}}', mininterval=0):
        time.sleep(0.01 * (1 + rank))
    dist.barrier()
    if rank == 0: print('loss of', epoch)
    time.sleep(0.5)"""
    lines = [line for line in ok(kernel.execute(cell)).text().splitlines() if "[Gloo]" not in line]  # older torch's
    assert [re.sub(r" \d+%.*", "", line) for line in lines] == [
        line for epoch in range(3) for line in (f"[0-2] epoch {epoch}:", f"[0]   loss of {epoch}")
    ], lines
    assert all(re.search(r"4/4 \[00:00<00:00, [\d.]+–[\d.]+it/s\]$", line) for line in lines[::2]), lines


def test_a_bar_goes_on_below_a_display(kernel: Kernel, method: str) -> None:
    """A live plot, replaced at each step: one display, and one bar at the end."""
    cell = f"""%%spawn 1 -m {method}
from IPython.display import HTML, clear_output, display
from tqdm import tqdm
for step in tqdm(range(5), mininterval=0):
    clear_output(wait=True)
    display(HTML(f'<b>{{step}}</b>'))"""
    reply = ok(kernel.execute(cell))
    assert [shown["text/html"] for shown in reply.shown] == ["<b>4</b>"]
    assert reply.text().count("↓") == 1 and ["5/5" in bar for bar in reply.of(0)] == [True], reply


AUTO = "from tqdm.auto import tqdm\nfor i in tqdm(range(30), mininterval=0): pass\nprint('end')"


def test_tqdm_auto_is_text_in_a_rank(own_kernel: Kernel) -> None:
    """Before the notebook has imported it, and afterwards."""

    def check(method: str) -> None:
        reply = ok(own_kernel.execute(f"%%spawn 2 -m {method}\n{AUTO}"))
        for rank in range(2):
            assert any("30/30" in line for line in reply.of(rank)), str(reply)
            assert reply.of(rank)[-1] == "end"
        assert reply.shown == []

    check("fork")
    check("forkserver")
    ok(own_kernel.execute("from tqdm.auto import tqdm"))
    for method in ("fork", "forkserver"):
        check(method)
        reply = ok(own_kernel.execute("for i in tqdm(range(3)): pass"))
        assert "widget-view" in str(reply.outputs), "the notebook's own bars are as before"
        reply = ok(own_kernel.execute(f"%%spawn 2 -m {method}\nfor i in tqdm(range(30), mininterval=0): pass"))
        assert any("30/30" in line for line in reply.of(1))


def test_nothing_goes_to_the_kernels_terminal(kernel: Kernel, method: str) -> None:
    before = len(kernel.terminal)
    cell = f"""%%spawn 2 -m {method}
import os, sys, logging
print('python out'); print('python err', file=sys.stderr); print('dunder', file=sys.__stdout__)
os.write(1, b'raw out\\n'); os.write(2, b'raw err\\n')
logging.warning('logged')
!echo from the shell"""
    reply = ok(kernel.execute(cell))
    for word in ("python out", "python err", "dunder", "raw out", "raw err", "from the shell"):
        assert word in reply.of(1)
    assert any("logged" in line for line in reply.of(1))
    assert kernel.terminal[before:] == ""


def test_warnings_show_the_users_line(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nimport warnings\nwarnings.warn('careful')"))
    assert any("UserWarning: careful" in line for line in reply.of(1))


def test_a_segfaults_stack_is_shown(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method}
import ctypes
print('before the crash')
def crash():
    ctypes.string_at(0)
if rank == 1:
    crash()"""
    reply = kernel.execute(cell)
    assert reply.ename == "RankExitedError"
    assert "SIGSEGV" in reply.evalue
    assert "before the crash" in reply.of(1)
    assert reply.evalue.splitlines()[0].endswith("(line 5)"), "where it was in the cell"
    assert "Fatal Python error: Segmentation fault\n" in reply.traceback
    assert re.search(
        r"line 7, in <.*>\n    crash\(\)\n.* line 5, in crash\n    ctypes.string_at\(0\)\n", reply.traceback
    )


# ---------------------------------------------------------------- a flood


def test_a_flood_is_bounded_and_whole_on_disk(kernel: Kernel, method: str, tmp_path: Path) -> None:
    cell = f"""%%spawn 4 -m {method} --log-dir {tmp_path}
for i in range(10_000): print(f'rank {{rank}} line {{i}} ' + 'x' * 20)"""
    reply = ok(kernel.execute(cell))
    for rank in range(4):
        lines = (tmp_path / f"rank-{rank}.log").read_text().splitlines()
        assert lines == [f"rank {rank} line {i} " + "x" * 20 for i in range(10_000)]
    assert len(reply.text().encode()) < 250_000
    assert str(tmp_path) in reply.text(), "a line says where the rest is"
    assert all(f"rank {rank} line 9999 " in reply.text() for rank in range(4)), "the last lines are shown"


def _printed(log: Path) -> list[str]:
    """The cell's lines. Until torch 2.9 gloo prints one of its own, about its connections."""
    with open(log) as lines:
        return [line for line in lines if not line.startswith("[Gloo]")]


def test_the_error_arrives_behind_a_flood(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 4 -m {method} -b gloo
import torch.distributed as dist
for i in range(10_000): print(f'rank {{rank}} line {{i}} ' + 'x' * 20)
dist.barrier()
if rank == 3: raise KeyError('after the flood')"""
    reply = kernel.execute(cell)
    assert reply.evalue == "rank 3 of 4: KeyError: 'after the flood' (line 5)"
    assert len(reply.text().encode()) < 250_000
    logs = re.search(r"Full logs: (\S+)", reply.traceback)
    assert logs and len(_printed(Path(logs[1], "rank-0.log"))) == 10_000


def test_a_rank_does_not_remember_what_it_has_printed(kernel: Kernel, method: str) -> None:
    """IPython 9's shell would, as long as the cell runs."""
    cell = "import psutil\nme = psutil.Process()\nbefore = me.memory_info().rss\n"
    cell += "for n in range(100_000): print('x' * 100, n)\nme.memory_info().rss - before"
    assert int(ok(kernel.execute(f"%%spawn 1 -m {method}\n{cell}")).result.removeprefix("[0] ")) < 5_000_000


@pytest.mark.extended
def test_two_million_lines(kernel: Kernel) -> None:
    """The error still arrives, the logs are whole, the notebook stays small, and the kernel's memory flat."""
    ok(
        kernel.execute("%%spawn 4 -b gloo\nfor i in range(50_000): print(f'rank {rank} line {i}')")
    )  # imports come first
    before = psutil.Process(kernel.pid).memory_info().rss
    cell = kernel.submit(
        "%%spawn 4 -b gloo\nimport torch.distributed as dist\n"
        "for i in range(500_000): print(f'rank {rank} line {i}')\n"
        "dist.barrier()\nif rank == 3: raise KeyError('after it')"
    )
    most = before

    def over() -> bool:
        nonlocal most
        most = max(most, psutil.Process(kernel.pid).memory_info().rss)
        return cell.over

    cell.read_until(over, "the cell ends", 120)
    reply = cell.reply
    assert reply.evalue == "rank 3 of 4: KeyError: 'after it' (line 5)"
    assert sum(len(str(output)) for output in reply.saved) < 200_000
    assert most - before < 90e6, "all lines at once would be 160 MB"
    logs = re.search(r"Full logs: (\S+)", reply.traceback)
    assert logs
    for rank in range(4):
        lines = _printed(Path(logs[1], f"rank-{rank}.log"))
        assert lines == [f"rank {rank} line {number}\n" for number in range(500_000)], "the log is whole"


def test_logs_of_a_run_that_was_cut_stay(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nfor i in range(10_000): print(f'line {{i}} ' + 'x' * 30, rank)"))
    where = re.search(r"the rest is in (\S+);", reply.text())
    assert where and len(Path(where[1], "rank-1.log").read_text().splitlines()) == 10_000


def test_one_endless_line(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\nprint('y' * 3_000_000)\nprint('after')"))
    assert len(reply.text().encode()) < 250_000
    assert reply.of(0)[-1] == "after"


# ---------------------------------------------------------------- displays


def test_html(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\nfrom IPython.display import HTML, display\ndisplay(HTML(f'<b>{{rank}}</b>'))"
    reply = ok(kernel.execute(cell))
    assert sorted(data["text/html"] for data in reply.shown) == ["<b>0</b>", "<b>1</b>"]
    before = [reply.outputs[i - 1]["text"].splitlines()[-1] for i in (2, 4)]
    assert sorted(line[:3] for line in before) == ["[0]", "[1]"], "a line marks each display with its rank"


def test_figures(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\nimport matplotlib.pyplot as plt\nplt.plot([1, 2, rank])\nplt.show()\nprint('end')"
    reply = ok(kernel.execute(cell))
    assert len(reply.shown) == 2
    assert all(data["image/png"].startswith("iVBOR") for data in reply.shown)
    assert reply.of(0)[-1] == reply.of(1)[-1] == "end"


def test_a_start_does_not_wait_for_the_notebooks_streams_for_each_rank(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("import sys\nkind, calls = type(sys.stdout), []\nflush = kind.flush"))
    try:
        ok(kernel.execute("kind.flush = lambda self: calls.append(sys._getframe(1).f_code.co_name) or flush(self)"))
        reply = ok(kernel.execute(f"%%spawn 8 -m {method}\nprint('said')"))
        assert reply.of(7) == ["said"]
        assert kernel.value("'_flush_std_streams' not in calls") and not kernel.value("'flush' in vars(sys.stdout)")
    finally:
        ok(kernel.execute("kind.flush = flush"))


def test_figure_without_show(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\nimport matplotlib.pyplot as plt\nfig, ax = plt.subplots()\nax.plot([1, 2]);"
    reply = ok(kernel.execute(cell))
    assert sum("image/png" in data for data in reply.shown) == 2, str(reply)


def test_figures_when_the_notebook_had_plotted(own_kernel: Kernel) -> None:
    ok(own_kernel.execute("%matplotlib inline\nimport matplotlib.pyplot as plt\nplt.plot([1]); plt.show()"))
    for method in ("fork", "forkserver"):
        reply = ok(own_kernel.execute(f"%%spawn 2 -m {method}\nplt.plot([1, 2, rank])\nplt.show()"))
        assert sum("image/png" in data for data in reply.shown) == 2, str(reply)


def test_data_frames(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\nimport pandas as pd\nframe = pd.DataFrame({{'a': [rank]}})\ndisplay(frame)\nframe"
    reply = ok(kernel.execute(cell))
    assert len(reply.shown) == 4, "one by display(), one as the cell's value, from each rank"
    assert all("<table" in data["text/html"] for data in reply.shown)
    assert kernel.value("[int(frame['a'][0]) for frame in _]") == [0, 1]


def test_update_display(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method}
from IPython.display import HTML, display
handle = display(HTML('first'), display_id=True)
for i in range(50): handle.update(HTML(f'{{rank}} at {{i}}'))
display(HTML('named'), display_id='same')
display(HTML(f'named {{rank}}'), display_id='same', update=True)"""
    reply = ok(kernel.execute(cell))
    assert sorted(data["text/html"] for data in reply.shown) == ["0 at 49", "1 at 49", "named 0", "named 1"]


@pytest.mark.timing  # equal lines are merged for as long as the view buffers
def test_an_update_of_a_display_does_not_part_a_line_that_all_ranks_print(kernel: Kernel, method: str) -> None:
    """What rank 0 had printed before its update is read with that, and the same line of its peer a moment later."""
    cell = f"""%%spawn 2 -m {method} -b gloo
import torch.distributed as dist
from IPython.display import HTML, display
handle = display(HTML('begin'), display_id=True)
for i in range(20):
    if rank == 1: print('at', i, flush=True)
    dist.barrier()
    if rank == 0: print('at', i, flush=True); handle.update(HTML(f'{{i}}'))
    dist.barrier()"""
    lines = [line for line in ok(kernel.execute(cell)).text().splitlines() if " at " in line]
    assert lines == [f"[0-1] at {i}" for i in range(20)]


@once
def test_a_limit_of_displays_counts_what_stays(kernel: Kernel, method: str) -> None:
    """The last frame of an animation is the last, and what is left out is said once."""
    cell = f"""%%spawn 1 -m {method}
from IPython.display import HTML, clear_output, display
for i in range(700):
    clear_output(wait=True)
    display(HTML(f'frame {{i}}'))"""
    reply = ok(kernel.execute(cell))
    assert [data["text/html"] for data in reply.shown] == ["frame 699"] and "displays of this cell" not in reply.text()
    cell = "from IPython.display import HTML\nfor i in range(510): display(HTML(f'<b>{i}</b>'))"
    reply = ok(kernel.execute(f"%%spawn 1 -m {method}\n{cell}"))
    assert len(reply.shown) == 500 and reply.shown[-1]["text/html"] == "<b>499</b>"
    assert reply.text().count("the displays of this cell are over 500 displays or 20 MB") == 1
    assert reply.of(0)[-1] == "<IPython.core.display.HTML object>"


@once
def test_a_display_of_an_earlier_cell_is_updated(kernel: Kernel, method: str) -> None:
    imports = "from IPython.display import HTML, display"
    own = ok(kernel.execute(f"{imports}\nown = display(HTML('of the notebook'), display_id='own')"))
    cell = f"%%spawn 2 --keep -m {method}\n{imports}\nhandle = display(HTML('first'), display_id=True)"
    first = ok(kernel.execute(cell))
    others = "display(HTML('by rank 0'), display_id='own', update=True)"
    ok(kernel.execute(f"%%ranks\nif rank: handle.update(HTML('second'))\nelse: {others}"))
    assert sorted(data["text/html"] for data in first.shown) == ["first", "second"]
    assert own.outputs[-1]["data"]["text/html"] == "by rank 0"
    ok(kernel.execute("%ranks stop"))


def test_clear_output_loop_leaves_one(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method}
from IPython.display import HTML, clear_output, display
for i in range(30):
    clear_output(wait=True)
    display(HTML(f'{{rank}} frame {{i}}'))"""
    reply = ok(kernel.execute(cell))
    assert sorted(data["text/html"] for data in reply.shown) == ["0 frame 29", "1 frame 29"]
    assert "✓ done" in reply.table["text/plain"], "the table is not cleared"


def test_clear_output_at_once(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method}
from IPython.display import HTML, clear_output, display
display(HTML('gone'))
clear_output()
print('after')"""
    reply = ok(kernel.execute(cell))
    assert reply.shown == []
    assert reply.of(0) == reply.of(1) == ["after"]


def test_text_displays_are_lines(kernel: Kernel, method: str) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\ndisplay({{'rank': rank}})\ndisplay(1, 'two')"))
    assert reply.of(1) == ["{'rank': 1}", "1", "'two'"]


def test_widgets_do_not_break_a_cell(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\nimport ipywidgets\ndisplay(ipywidgets.IntSlider(value=3))\nprint('end')"
    reply = ok(kernel.execute(cell))
    assert reply.of(0)[-1] == reply.of(1)[-1] == "end"


def test_display_from_a_thread_of_a_rank(kernel: Kernel, method: str) -> None:
    cell = f"""%%spawn 2 -m {method}
import threading
from IPython.display import HTML, display
def work(): print('in thread'); display(HTML('from thread'))
thread = threading.Thread(target=work); thread.start(); thread.join()"""
    reply = ok(kernel.execute(cell))
    assert reply.of(0) == ["in thread"] and len(reply.shown) == 2


def test_a_childs_output_belongs_to_its_rank(kernel: Kernel, method: str) -> None:
    cell = f"%%spawn 2 -m {method}\nimport subprocess\n_ = subprocess.run(['echo', f'child of {{rank}}'])"
    reply = ok(kernel.execute(cell))
    assert reply.of(0) == ["child of 0"] and reply.of(1) == ["child of 1"]
