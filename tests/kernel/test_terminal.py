"""``%%spawn`` where no kernel is: IPython in a terminal, with and without cursor movement, and in a pipe."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pexpect
import pytest
from kernels import ranks_of, wait_until
from leftovers import gone
from methods import PATIENCE

from nbspawn._notebook.console import ConsoleView
from nbspawn._render.lines import strip_ansi
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import Run

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>()][0-9A-B]?|\x1b\][^\x07]*\x07")
_CODES = r"(?:\x1b\[[0-9;?]*[A-Za-z])*"


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "IPYTHONDIR": str(folder), "COLUMNS": "100", "LINES": "30", **more}


class Terminal:
    """IPython under a pseudo-terminal."""

    def __init__(self, folder: Path, *options: str, term: str) -> None:
        self.cells = 0
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "IPython", "--no-banner", "--no-confirm-exit", *options],
            env=environment(folder, TERM=term),
            cwd=str(folder),
            dimensions=(30, 100),
            encoding="utf-8",
            timeout=PATIENCE,
        )
        self.process.delaybeforesend = None
        self._prompted()

    def _prompted(self) -> str:
        """What came before the next prompt; prompt_toolkit draws one prompt several times."""
        self.cells += 1
        self.process.expect(rf"In \[{_CODES}{self.cells}{_CODES}\]")
        return self.process.before

    def run(self, cell: str) -> str:
        """Type the cell, and the two empty lines that end a ``%%`` cell; returns what is shown."""
        self.start(cell)
        return self._prompted()

    def start(self, cell: str) -> None:
        """Type the cell and return at once."""
        for line in cell.split("\n"):
            self.process.send(line + "\r")
        if "\n" in cell:
            self.process.send("\r\r")

    def close(self) -> None:
        self.process.close(force=True)


@pytest.fixture(scope="module")
def terminals() -> Iterator[dict[str, Terminal]]:
    """Those that are open, by their kind."""
    found: dict[str, Terminal] = {}
    yield found
    for terminal in found.values():
        terminal.close()


@pytest.fixture(params=["simple", "live"])
def terminal(
    request: pytest.FixtureRequest, terminals: dict[str, Terminal], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Terminal]:
    """The one of this kind; another one after a test that has failed."""
    kind, failed = request.param, request.session.testsfailed
    if kind not in terminals:
        options = ("--simple-prompt", "--colors=NoColor") if kind == "simple" else ()
        terminals[kind] = Terminal(tmp_path_factory.mktemp("terminal"), *options, term="xterm")
        terminals[kind].run("%load_ext nbspawn")
    yield terminals[kind]
    if request.session.testsfailed > failed:
        terminals.pop(kind).close()
    else:
        wait_until(lambda: not ranks_of(terminals[kind].process.pid), "ranks end")


def shown(text: str) -> str:
    return _CONTROL.sub("", text).replace("\r", "")


def test_a_cell(terminal: Terminal, request: pytest.FixtureRequest) -> None:
    text = terminal.run("%%spawn 2\nprint('said by', rank)\nrank * 7")
    assert "said by 0" in shown(text) and "said by 1" in shown(text)
    assert shown(text).count("✓ done") >= 2
    assert "[0] 0" in shown(text) and "[1] 7" in shown(text)
    if request.node.callspec.params["terminal"] == "simple":
        assert "\x1b" not in text
        assert text.count("✓ done") == 2, "the table is drawn once"


def test_an_error(terminal: Terminal, request: pytest.FixtureRequest) -> None:
    text = terminal.run("%%spawn 2\nprint('before')\n1 / 0")
    assert "RankRaisedError: rank" in shown(text)
    assert "ZeroDivisionError: division by zero (line 3)" in shown(text)
    assert shown(text).count("----> 3 1 / 0") == 1
    if request.node.callspec.params["terminal"] == "simple":
        assert "\x1b" not in text
    assert "4" in shown(terminal.run("2 + 2"))


@pytest.mark.extended
def test_where_the_time_went_in_80_columns(terminal: Terminal) -> None:
    terminal.run("import os, time; os.environ['COLUMNS'] = '80'")  # the next tests can do with it
    wait = f"time.sleep(1.2 + 0 * len({'x' * 90!r}))"
    _, title, profile = shown(terminal.run(f"%%spawn 2 --profile\n{wait}")).partition("Where the time went")
    lines = profile.splitlines()
    ((_, line, percent),) = [line.split()[:3] for line in lines if line.startswith("a ")]
    assert title and line == "2" and int(percent) > 50, "a busy machine needs its time to begin and to end"
    assert lines[2].startswith("rank 0 ") and "aaaaa" in lines[2]
    assert max(map(len, lines)) <= 79


def test_ctrl_c(terminal: Terminal, tmp_path: Path) -> None:
    terminal.start(f"%%spawn 2 -g 1\nimport time\nopen(f'{tmp_path}/ready-{{rank}}', 'w').close()\ntime.sleep(60)")
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "the ranks run")
    terminal.process.sendintr()
    assert "KeyboardInterrupt" in shown(terminal._prompted())
    wait_until(lambda: not ranks_of(terminal.process.pid), "ranks end")
    assert "[1] 1" in shown(terminal.run("%%spawn 2\nrank"))


def test_ranks_that_stay_and_one_in_the_background(terminal: Terminal) -> None:
    terminal.run("%%spawn 2 --keep\nx = rank")
    terminal.run(f"import nbspawn._notebook.console as view; view.AT_ONCE = {PATIENCE}")  # a busy machine takes longer
    text = shown(terminal.run("%%ranks\nprint('said by', x)\nx + 1"))
    assert "said by 1" in text and "[1] 2" in text and "done" not in text
    terminal.run("%%ranks --background -o h\nname = input('who? ') if rank else 'nobody'\n1 / rank")
    assert "7" in shown(terminal.run("3 + 4")), "the prompt is free"
    terminal.start("h.wait()")
    terminal.process.expect(r"\[1\] who\? ")
    terminal.process.send("ada\r")
    assert "rank 0 of 2: ZeroDivisionError" in shown(terminal._prompted())
    terminal.run("%ranks auto on")
    assert "AUTO MODE" in (text := shown(terminal.run("x * 3"))) and "[1] 3" in text
    terminal.run("%ranks auto off")
    assert "[1] 'ada'" in shown(terminal.run("%%ranks\nname"))
    terminal.run("%ranks stop")


def test_input(terminal: Terminal) -> None:
    terminal.start("%%spawn 2\nname = input('who? ') if rank else 'nobody'\nname")
    terminal.process.expect(r"\[1\] who\? ")
    terminal.process.send("ada\r")
    assert "[1] 'ada'" in shown(terminal._prompted())


def test_debugger(terminal: Terminal) -> None:
    terminal.start("%%spawn 2\nx = 5\nif rank: breakpoint()\nx")
    terminal.process.expect(r"\[1\] ipdb> ")
    assert "breakpoint()" in shown(terminal.process.before)
    terminal.process.send("p x * 8 + 2\r")
    terminal.process.expect(r"\[1\] +42")
    terminal.process.expect(r"\[1\] ipdb> ")
    terminal.process.send("!x = 7\r")
    terminal.process.expect(r"\[1\] ipdb> ")
    terminal.process.send("c\r")
    assert "[1] 7" in shown(terminal._prompted())


def test_the_terminal_is_as_before(terminal: Terminal) -> None:
    """No rank may change the terminal's modes, or take its foreground."""
    terminal.run("import subprocess; before = subprocess.run(['stty', '-g'], capture_output=True, text=True).stdout")
    terminal.run("%%spawn 2\n!true\nrank")
    terminal.run("after = subprocess.run(['stty', '-g'], capture_output=True, text=True).stdout")
    assert "same True" in shown(terminal.run("print('same', before == after != '')"))


# ---------------------------------------------------------------- pipes

CELL = "%load_ext nbspawn\nget_ipython().run_cell_magic('spawn', '2', '''print('said by', rank)\\nrank * 7\\n''')\n"


def piped(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "IPython", "--no-banner", *arguments],
        env=environment(folder, TERM="dumb"),
        cwd=str(folder),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_ipython_c(tmp_path: Path) -> None:
    done = piped(tmp_path, "--colors=NoColor", "-c", CELL)
    assert done.returncode == 0, done.stderr
    assert "said by 1" in done.stdout and done.stdout.count("✓ done") == 2
    assert "\x1b" not in done.stdout.replace("\x1b[22;0t\x1b]0;", "").replace("IPython: ", "")


@pytest.mark.extended
def test_ipython_script(tmp_path: Path) -> None:
    script = tmp_path / "job.ipy"
    script.write_text(
        "%load_ext nbspawn\n\ndef main():\n" + "    get_ipython().run_cell_magic('spawn', '2', '1/rank')\nmain()\n"
    )
    done = piped(tmp_path, "--colors=NoColor", str(script))
    assert "ZeroDivisionError" in done.stdout + done.stderr
    assert done.returncode == 1


def test_no_rank_outlives_ipython(tmp_path: Path) -> None:
    cell = "import os\\nprint('pid', os.getpid())\\n!sleep 1000 & echo pid $!"
    done = piped(tmp_path, "-c", CELL.replace("print('said by', rank)\\nrank * 7\\n", cell))
    pids = [int(pid) for pid in re.findall(r"^\[\d\] +pid (\d+)", done.stdout, re.MULTILINE)]
    assert len(pids) == 4, done.stdout + done.stderr
    assert gone(pids)


def test_a_long_sentence_is_erased_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is drawn in place, so its height must be what the terminal makes of it."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "40")
    view = ConsoleView(live=True)
    run = replace(Run.new(2, "fork", "", "/tmp", 0.0), notes=("Ranks wait for each other. " * 5,))
    view.open(run, Profile(run))
    view._draw(run)
    drawn = capsys.readouterr().out
    assert all(len(strip_ansi(line)) < 60 for line in drawn.splitlines())
    assert len(drawn.splitlines()) == 7
    view._draw(run)
    assert capsys.readouterr().out.startswith("\x1b[7F\x1b[J")
