"""``--background``: the cell returns, its display lives on in its place, later cells run, nothing strays into them."""

from __future__ import annotations

import io
import os
import re
import threading
from collections.abc import Iterator

import pytest
from kernels import Cell, Kernel, Reply, ok, wait_until

from nbspawn._protocol.messages import InputReply
from nbspawn._session.attachment import Attachment

LOOP = "import time, os\nwhile not os.path.exists({flag!r}): time.sleep(0.01)\n"


@pytest.fixture
def flag(kernel: Kernel, request: pytest.FixtureRequest) -> Iterator[str]:
    """A file whose coming ends the ranks' loop; no rank is left."""
    path = kernel.folder / f"flag-{request.node.name}"
    yield str(path)
    kernel.execute("%ranks stop")


def start(kernel: Kernel, body: str, options: str = "") -> Cell:
    """A cell in the background, its handle in ``h``."""
    cell = kernel.submit(f"%%spawn 2 --background -o h {options}\n{body}")
    ok(cell.wait())
    return cell


def places(reply: Reply) -> list[str]:
    """What stands below the table."""
    return [output["data"].get("text/plain", "") for output in reply.outputs[1:] if output["data"]]


def test_later_cells_run_and_stay_clean(kernel: Kernel, flag: str, method: str) -> None:
    cell = start(kernel, LOOP.format(flag=flag) + "print('end of', rank)\nrank * 10", f"-m {method}")
    seen = ok(kernel.execute("import time\ntime.sleep(0.5)\nprint('mine')\n1 + 1"))
    assert [output["type"] for output in seen.saved] == ["stdout", "execute_result"] and seen.text() == "mine\n"
    cell.see(lambda: cell.reply.outputs and cell.reply.table["text/plain"].count("● running") == 2, "the table lives")
    listed = ok(kernel.execute("%ranks")).text()
    assert "2 ranks @bg1" in listed and listed.count("running") == 2
    assert not kernel.value("h.done()") and kernel.value("h.running()")
    assert kernel.execute("h.result(timeout=0.01)").ename == "TimeoutError"
    ok(kernel.execute(f"open({flag!r}, 'w').close()"))
    reply = ok(kernel.execute("list(h.wait())"))
    assert reply.result == "[0, 10]" and reply.text() == "", "what they print is shown once"
    cell.see(lambda: cell.reply.table["text/plain"].count("done") == 2, "the last table stays")
    assert "end of 1" in "".join(places(cell.reply))
    assert "no ranks are alive" in ok(kernel.execute("%ranks")).text()


def test_what_is_printed_while_somebody_begins_to_answer_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def flush(self) -> None:
            """A rank prints at the worst moment: the first lines are on their way to the front end."""
            if "late" not in self.getvalue():
                thread = threading.Thread(target=attachment.write, args=("late\n",))
                thread.start()
                thread.join()

    attachment = Attachment(elsewhere=True)
    attachment.write("early\n")
    replies: list[InputReply | None] = []
    asking = threading.Thread(target=lambda: replies.append(attachment.ask("name? ", False)))

    def over() -> bool:
        if not asking.ident:
            asking.start()
        return bool(replies)

    monkeypatch.setattr("sys.stdout", screen := Screen())
    monkeypatch.setattr("nbspawn._session.views.Foreground.ask", lambda *_: InputReply("text", "Ada"))
    attachment.attach(over)
    asking.join()
    assert screen.getvalue() == "early\nlate\n" and replies == [InputReply("text", "Ada")]


def test_a_display_is_put_in_its_place(kernel: Kernel, flag: str) -> None:
    cell = start(kernel, "from IPython.display import HTML, display\nfor n in range(20): display(HTML(f'<b>{n}</b>'))")
    ok(kernel.execute("%%capture\nh.wait()"))
    cell.see(lambda: "done" in cell.reply.table["text/plain"], "it has ended")
    shown = [output["data"]["text/html"] for output in cell.reply.outputs[1:] if "text/html" in output["data"]]
    assert len(shown) == 12 and "<b>19</b>" in shown and "<b>0</b>" not in shown, "the newest twelve"


def test_an_error_shows_at_once_and_is_raised_by_wait(kernel: Kernel, flag: str) -> None:
    cell = start(kernel, "import time\nif rank == 1: 1 / 0\ntime.sleep(600)")
    cell.see(lambda: any("ZeroDivisionError" in place for place in places(cell.reply)), "the error is shown", 20)
    assert "rank 1 of 2: ZeroDivisionError: division by zero (line 3)" in places(cell.reply)[-1]
    for _ in range(2):
        reply = kernel.execute("h.wait()")
        assert reply.ename == "RankRaisedError" and "----> 3 if rank == 1: 1 / 0" in reply.traceback
    assert "failed" in ok(kernel.execute("print(h.status())")).text()


@pytest.mark.parametrize("how", ["h.interrupt()", "%ranks interrupt", "%ranks stop"])
def test_interrupt(kernel: Kernel, flag: str, how: str) -> None:
    start(kernel, LOOP.format(flag=flag))
    wait_until(lambda: kernel.value("h.run.counts").get("running") == 2, "they run")
    ok(kernel.execute(how))
    assert kernel.execute("h.wait()").ename == "KeyboardInterrupt"
    kernel.assert_no_rank()


def test_a_stop_is_told_in_the_same_words_everywhere(kernel: Kernel, flag: str) -> None:
    cell = start(kernel, LOOP.format(flag=flag))
    cell.see(lambda: cell.reply.table["text/plain"].count("while not os.path") == 2, "they are in the loop")
    ok(kernel.execute("h.cancel()"))
    reply = kernel.execute("h.wait()")
    cell.see(lambda: "KeyboardInterrupt" in places(cell.reply)[-1], "the error is shown")
    assert places(cell.reply)[-1] == reply.traceback
    assert re.match(
        r"KeyboardInterrupt: the ranks were stopped\.\nRanks? [01](-1)? w(as|ere) at line ", reply.traceback
    )


def test_ranks_that_begin_are_listed_at_once(kernel: Kernel, flag: str) -> None:
    """Two threads of the kernel wait for their pids."""
    for _ in range(8):
        start(kernel, LOOP.format(flag=flag))
        assert "2 ranks @bg" in ok(kernel.execute("%ranks", timeout=20)).text()
        ok(kernel.execute("%ranks stop"))


def test_an_interrupt_ends_the_wait_and_not_the_run(kernel: Kernel, flag: str) -> None:
    start(kernel, LOOP.format(flag=flag))
    reply = kernel.execute("h.wait(0.3)")
    assert reply.ename == "TimeoutError" and "still run" in reply.traceback
    cell = kernel.submit("print('waits')\nh.wait()").until("waits")
    kernel.interrupt()
    reply = cell.wait()
    assert reply.ename == "KeyboardInterrupt" and "They run on in the background" in reply.traceback
    assert len(kernel.ranks()) == 2


def test_questions_wait_for_somebody_who_attends(kernel: Kernel, flag: str) -> None:
    cell = start(kernel, "name = input('who? ')\nname * (rank + 1)")
    cell.see(lambda: cell.reply.table["text/plain"].count("waiting for input") == 2, "both ask")
    assert cell.reply.prompts == []
    reply = ok(kernel.submit("%ranks wait", answers=["a", "b"]).wait())
    assert sorted(prompt for prompt, _ in reply.prompts) == ["[0] who? ", "[1] who? "]
    assert reply.result in ("[0] 'a'\n[1] 'bb'", "[0] 'b'\n[1] 'aa'")


def test_break_into_a_rank_and_look_at_stacks(kernel: Kernel, flag: str) -> None:
    loop = f"go_on = True\nimport time\nopen(f'{flag}-{{rank}}', 'w').close()\nwhile go_on: time.sleep(0.01)\nrank"
    start(kernel, loop, "--name job")
    wait_until(lambda: all(os.path.exists(f"{flag}-{rank}") for rank in range(2)), "both are at their loop")
    stacks = ok(kernel.execute("%ranks stacks"))
    assert "time.sleep(0.01)" in stacks.outputs[0]["data"]["text/plain"] and "text/html" in stacks.outputs[0]["data"]
    reply = ok(kernel.submit("%ranks debug 1 @job", answers=["p rank", "!go_on = False", "c"]).wait())
    assert len(reply.prompts) == 3 and "1" in reply.of(1)
    reply = ok(kernel.submit("%ranks debug 0", answers=["!go_on = False", "c"]).wait())
    assert ok(kernel.execute("h.wait()")).result == "[0] 0\n[1] 1"


def test_kept_ranks_in_the_background(kernel: Kernel, flag: str) -> None:
    ok(kernel.execute("%%spawn 2 --keep\nstate = rank"))
    ok(kernel.execute(f"%%ranks --background -o h\n{LOOP.format(flag=flag)}state += 1\nstate"))
    reply = kernel.execute("%%ranks\nstate")
    assert reply.ename == "UsageError" and "the ranks work on Cell In[" in reply.traceback
    assert ok(kernel.execute("%ranks")).text().count("running") == 2
    ok(kernel.execute(f"open({flag!r}, 'w').close()"))
    assert ok(kernel.execute("h.wait()")).result == "[0] 1\n[1] 2"
    assert ok(kernel.execute("%%ranks\nstate")).result == "[0] 1\n[1] 2"


def test_several_at_once(kernel: Kernel, flag: str) -> None:
    first = start(kernel, LOOP.format(flag=flag) + "rank")
    ok(kernel.execute("first = h"))
    second = start(kernel, LOOP.format(flag=flag) + "rank + 5", "-m fork")
    assert "@bg1" in (listed := ok(kernel.execute("%ranks")).text()) and "@bg2" in listed
    reply = kernel.execute("%ranks interrupt")
    assert reply.ename == "UsageError" and "@bg1, @bg2" in reply.traceback
    assert ok(kernel.execute("%%spawn 2\nrank")).result == "[0] 0\n[1] 1"
    ok(kernel.execute(f"open({flag!r}, 'w').close()"))
    assert kernel.value("[list(first.wait()), list(h.wait())]") == [[0, 1], [5, 6]]
    for cell in (first, second):
        cell.see(lambda cell=cell: cell.reply.table["text/plain"].count("done") == 2, "it has ended")


def test_much_output_stays_bounded(kernel: Kernel, flag: str) -> None:
    cell = start(kernel, "for n in range(20000): print(n, 'x' * 50)")
    ok(kernel.execute("%%capture\nh.wait()"))
    cell.see(lambda: "19999 x" in "".join(places(cell.reply)), "the last line is shown")
    shown = places(cell.reply)[0]
    assert shown.startswith("… earlier lines are in ") and len(shown) < 20_000
