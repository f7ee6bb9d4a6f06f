"""``nbspawn.interact``, as a front end sees it: clicks come between the cells, and cells run during a run."""

from __future__ import annotations

import re
from pathlib import Path

import IPython
import pytest
from kernels import Kernel, ok, who_said
from methods import PATIENCE
from test_nbclient import execute
from widgets import WIDGET, Part, Screen

SPEED = """import nbspawn, os, time, threading
def train(rank, speed=1):
    print('speed', speed)
    return speed * 10 + rank"""
UNTIL_TOLD = """import nbspawn, os, time
def train(rank, go=''):
    print('<b>only</b>', rank, flush=True)
    while not os.path.exists(go or 'never'):
        time.sleep(0.01)
    print('told', rank)"""
WIDGET_OF = "w = nbspawn.interact(train, {})\nw"


def begin(screen: Screen, code: str = SPEED, options: str = "nprocs=2") -> Part:
    return screen.show(f"{code}\n{WIDGET_OF.format(options)}")


def begin_waiting(screen: Screen, path: Path, options: str = "nprocs=2", code: str = UNTIL_TOLD) -> Part:
    """Both ranks run until the file ``path`` exists."""
    part = begin(screen, code, f"{options}, go={str(path)!r}")
    part.click("Run")
    part.until_text("only</b> 0", "only</b> 1")
    return part


# ---------------------------------------------------------------- results


def test_run_and_run_again_with_another_value(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen, options="nprocs=2, speed=(0, 9)")
    assert kernel.value("(w.running, w.result, w.error, sorted(w.arguments))") == (False, None, None, ["speed"])
    part.click("Run")
    shown = part.until_text("[0] 10\n[1] 11")  # the function's own default, within the range
    assert who_said(shown, "speed 1") == {0, 1} and shown.count("done") >= 2
    assert kernel.value("(list(w.result), w.error, w.running)") == ([10, 11], None, False)
    part.set("speed", value=7)
    part.click("Run")
    shown = part.until_text("[0] 70\n[1] 71")
    assert "speed 7" in shown and "speed 1" not in shown
    part.until(lambda: "train(speed=7)" in part.picture, "the picture is that of the last run")
    assert "<table" in part.picture and "[0] 70" in part.picture and who_said(part.picture, "speed 7") == {0, 1}
    assert part.picture.startswith('<div class="nbspawn-') and "speed 1" not in part.picture


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_plot(kernel: Kernel, screen: Screen, start_method: str) -> None:
    draw = "import nbspawn\ndef train(rank):\n    import matplotlib.pyplot as plt\n    plt.plot([rank])\n    plt.show()"
    part = begin(
        screen, draw, f"nprocs=2, start_method={start_method!r}, options={{'env': {{'MPLBACKEND': 'inline'}}}}"
    )
    part.click("Run")
    part.until(lambda: part.picture.count("data:image/png;base64,iVBOR") == 2, "both plots are in the picture")
    images = [one for state in part.models.values() for one in state.get("outputs", ()) if "image/png" in one["data"]]
    assert len(images) == 2 and kernel.value("w.result.empty") is True


def test_a_function_that_is_redefined(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen, options="nprocs=2, speed=(0, 9)")
    part.set("speed", value=2)
    ok(kernel.execute("def train(rank, speed=1):\n    return speed * 100"))
    part.click("Run")
    part.until_text("[0-1] 200")
    ok(kernel.execute("def train(rank, speed=1, name='x'):\n    return name * speed"))
    part.click("Run")
    part.until_text("[0-1] 'xx'")
    assert kernel.value("sorted(w.arguments)") == ["name", "speed"], (
        "a control for the new parameter; the value is kept"
    )
    part.set("name", value="y")
    part.click("Run")
    part.until_text("[0-1] 'yy'")


def test_a_redefined_function_that_lacks_a_value_is_refused_each_time(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen)
    ok(kernel.execute("def train(rank, speed, depth):\n    return depth"))
    for _ in range(2):
        part.click("Run")
        part.until(lambda: kernel.value("w.error is not None") is True, "it is refused")
        assert kernel.value("(w.running, type(w.error).__name__, w.result)") == (False, "UsageError", None)
        ok(kernel.execute("w.error = None"))
    assert part.text.count("no value for 'depth'") == 1
    ok(kernel.execute("def train(rank, depth=3):\n    return depth"))
    part.click("Run")
    part.until_text("[0-1] 3")


MODELS = """\
import ipywidgets
from ipywidgets.widgets import widget as _module
models = lambda: len(getattr(_module, "_instances", None) or ipywidgets.Widget.widgets)  # as ipywidgets 8, 7 have them
"""


def test_closing_leaves_the_users_own_widgets_only(kernel: Kernel, screen: Screen) -> None:
    ok(kernel.execute(MODELS + "own = ipywidgets.IntSlider(3)\nbefore = models()"))
    part = begin(screen, options="nprocs=2, speed=own")
    part.click("Run")
    part.until_text("[0] 30\n[1] 31")
    ok(kernel.execute("def train(rank, speed=1, name='x'):\n    return name * speed"))
    part.click("Run")
    part.until_text("[0-1] 'xxx'")
    ok(kernel.execute("w.close()"))
    assert kernel.value("(models() - before, own.comm is not None)") == (0, True)


# ---------------------------------------------------------------- errors


def test_the_error_of_a_rank(kernel: Kernel, screen: Screen) -> None:
    fail = "import nbspawn\ndef train(rank):\n    if rank: {}['<b>hieght</b>']"
    part = begin(screen, fail)
    part.click("Run")
    shown = part.until_text("RankRaisedError: rank 1 of 2: KeyError: '<b>hieght</b>'")
    cell = r"Cell In\[\d+\]" if IPython.version_info >= (8,) else r'File ".*"'  # IPython 7 has no names for cells
    assert re.search(cell + r", line 3, in train\n    if rank: {}\['<b>hieght</b>'\]\n", shown)
    part.until(lambda: not kernel.value("w.running"), "the kernel has heard of it, too")
    left = kernel.value("(type(w.error).__name__, w.error.rank, w.result, w.running)")
    assert left == ("RankRaisedError", 1, None, False)
    part.until(lambda: "RankRaisedError" in part.picture, "the picture has it, too")
    assert "&lt;b&gt;hieght" in part.picture and "<b>hieght" not in part.picture


@pytest.mark.parametrize(
    "change, error",
    [
        ("hidden = threading.Lock()", "PayloadError"),
        ("w._options['threads'] = 0", "UsageError"),
        ("w.children[0].children[0].value = 'lots'", "UsageError"),
    ],
)
def test_what_cannot_be_started(kernel: Kernel, screen: Screen, change: str, error: str) -> None:
    code = SPEED + "\nhidden = None\ndef job(rank): return hidden is None"
    part = screen.show(f"{code}\nw = nbspawn.interact(job, nprocs='2', start_method='forkserver')\nw")
    ok(kernel.execute(change))
    part.click("Run")
    part.until_text(error)
    assert kernel.value("(type(w.error).__name__, w.running)") == (error, False) and not kernel.ranks()
    ok(kernel.execute("hidden = None; w._options.clear(); w.children[0].children[0].value = '2'"))
    part.click("Run")
    assert error not in part.until_text("[0-1] True")
    assert kernel.value("w.error is None") is True


# ---------------------------------------------------------------- stopping


STUBBORN = """import nbspawn, os, time
def train(rank, go=''):
    print('<b>only</b>', rank, flush=True)
    while True:
        try: time.sleep(600)
        except KeyboardInterrupt: print('asked', flush=True)"""


def test_stop(kernel: Kernel, screen: Screen, tmp_path: Path) -> None:
    stands = UNTIL_TOLD[: UNTIL_TOLD.index("    while")] + "    time.sleep(600)"
    part = begin_waiting(screen, tmp_path / "go", code=stands)
    part.click("Stop")
    assert "Ranks 0-1 were in train" in part.ended().partition("KeyboardInterrupt: ")[2]
    assert kernel.value("(type(w.error).__name__, w.running)") == ("KeyboardInterrupt", False)
    kernel.assert_no_rank()
    assert part.has("Stop") and not part.enabled("Stop")


def test_the_second_stop_kills(kernel: Kernel, screen: Screen, tmp_path: Path) -> None:
    part = begin_waiting(screen, tmp_path / "go", "nprocs=2, options={'grace_period': 600}", STUBBORN)
    part.click("Stop")
    part.until_text("asked")
    part.click("Kill")
    assert part.ended().count("killed") >= 2


def test_run_pressed_twice_quickly(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen)
    run = part.named("Run")
    screen.press(run)
    screen.press(run)
    part.until_text("[0] 10\n[1] 11")
    assert kernel.value("(str(w.error), list(w.result))") == ("None", [10, 11]) and "UsageError" not in part.text


def test_run_by_program_while_it_runs(kernel: Kernel, screen: Screen, tmp_path: Path) -> None:
    begin_waiting(screen, tmp_path / "go")
    reply = kernel.execute("w.run()")
    assert reply.ename == "UsageError" and "stop() stops them" in reply.traceback
    assert kernel.execute("w.wait(0.01)").ename == "TimeoutError"
    ok(kernel.execute("w.stop()"))
    assert kernel.execute("w.wait()").ename == "KeyboardInterrupt"


# ---------------------------------------------------------------- beside other cells


def test_the_kernel_is_free_and_observers_run_in_its_main_thread(
    kernel: Kernel, screen: Screen, tmp_path: Path
) -> None:
    part = begin_waiting(screen, tmp_path / "go")
    seen = ok(
        kernel.execute(
            "import threading\nseen = []\n"
            "see = lambda change: seen.append((change.name, threading.current_thread() is threading.main_thread()))\n"
            "w.observe(see, ['running', 'result', 'error'])\nprint(w.running)"
        )
    )
    assert seen.text() == "True\n" and [output["type"] for output in seen.saved] == ["stdout"]
    (tmp_path / "go").touch()
    part.until_text("told 0" if "[0] told" in part.text else "told")
    part.ended()
    assert kernel.value("seen") == [("running", True), ("result", True)]


def test_two_at_once_in_one_box(kernel: Kernel, screen: Screen) -> None:
    part = screen.show(
        f"{SPEED}\nimport ipywidgets\n"
        "one, two = (nbspawn.interact(train, 2, speed=ipywidgets.fixed(n)) for n in (1, 2))\n"
        "ipywidgets.HBox([one, two])"
    )
    for name, state in part.models.items():
        if state.get("description") == "Run":
            screen.press(name)
    part.until_text("[0] 10\n[1] 11", "[0] 20\n[1] 21")
    assert kernel.value("[list(one.result), list(two.result)]") == [[10, 11], [20, 21]]


def test_stacks_and_one_ranks_output(kernel: Kernel, screen: Screen, tmp_path: Path) -> None:
    part = begin_waiting(screen, tmp_path / "go")
    part.click("Stacks")
    part.until_text("Where the ranks stand after", "time.sleep(0.01)")
    part.choose(1)
    part.until_text("&lt;b&gt;only&lt;/b&gt; 1\n</pre>")
    assert part.has("Debug rank 1") and not part.has("Debug all")
    (tmp_path / "go").touch()
    assert "told" in part.ended()


# ---------------------------------------------------------------- questions

ASK = """import nbspawn, getpass, time
def train(rank):
    name = input('who?\\nname: ')
    try: return name, getpass.getpass('secret: ') == 'tell nobody'
    except KeyboardInterrupt:
        time.sleep(0.5); print('tidied' + '!', flush=True); raise"""


def test_input_and_a_password(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen, ASK, "nprocs=1")
    part.click("Run")
    assert part.prompt("name: ")["_model_name"] == "TextModel" and "who?" in part.text
    assert kernel.value("6 * 7") == 42, "the kernel is free"
    part.answer("name: ", "Ada")
    assert part.prompt("secret: ")["_model_name"] == "PasswordModel"
    part.answer("secret: ", "tell nobody")
    shown = part.until_text("('Ada', True)")
    assert "name: Ada" in shown and "tell nobody" not in shown and "tell nobody" not in part.picture


def test_stop_while_it_asks_lets_the_ranks_tidy_up(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen, ASK, "nprocs=1")
    part.click("Run")
    part.answer("name: ", "Ada")
    part.prompt("secret: ")
    part.click("Stop")
    assert "tidied!" in part.ended()
    part.click("Run")
    part.prompt("name: ")
    ok(kernel.execute("w.stop()"))
    assert "secret" not in part.ended()
    assert kernel.value("type(w.error).__name__") == "KeyboardInterrupt"


def test_a_question_is_no_obstacle_to_the_end(own_kernel: Kernel) -> None:
    part = begin(Screen(own_kernel), ASK, "nprocs=1")
    part.click("Run")
    part.prompt("name: ")
    ok(own_kernel.execute("nbspawn._session.pool.end_all()"))
    own_kernel.assert_no_rank()
    part.ended()
    assert not part.has_question


def test_the_debugger(kernel: Kernel, screen: Screen, tmp_path: Path) -> None:
    part = begin_waiting(screen, tmp_path / "go")
    part.choose(1)
    part.until(lambda: part.has("Debug rank 1"), "the button says which")
    part.click("Debug rank 1")
    part.answer("ipdb> ", "p rank + 41")
    part.until_text("42")
    part.answer("ipdb> ", "p open(go, 'w').close()")
    part.answer("ipdb> ", "c")
    assert "told" in part.ended() and kernel.value("w.error is None") is True


def test_who_waits_in_a_cell_is_asked_there(kernel: Kernel, screen: Screen) -> None:
    part = begin(screen, ASK, "nprocs=1")
    part.click("Run")
    part.prompt("name: ")
    reply = ok(kernel.submit("list(w.wait(30))", answers=["Ada", "tell nobody"]).wait())
    assert reply.result == "[('Ada', True)]" and [password for _, password in reply.prompts] == [False, True]
    assert kernel.execute("%%capture\nw.run()\nw.wait(30)", stdin=False).ename == "RankRaisedError"
    part.until_text("nobody can answer")


# ---------------------------------------------------------------- what is left


@pytest.mark.extended
def test_nothing_is_left_by_many_runs(kernel: Kernel, screen: Screen) -> None:
    # Not eventfds: ipykernel has one for each thread that has sent something, and closes them every ten seconds.
    count = """import threading, gc, os
def _what(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:  # another thread has closed it
        return "eventfd"
gc.collect()
fds = [what for what in map(_what, os.listdir("/proc/self/fd")) if "eventfd" not in what and "history" not in what]
print(len(get_ipython().kernel.comm_manager.comms), threading.active_count(), len(fds))"""
    part = begin(screen)

    def run() -> str:
        part.click("Run")
        part.until_text("[0] 10\n[1] 11")
        part.until(lambda: kernel.value("w.running") is False, "it has ended")
        return ok(kernel.execute(count)).text()

    run()
    before = run()
    models = len(screen.models)
    for _ in range(10):
        run()
    part.until(lambda: ok(kernel.execute(count)).text() == before, f"it is as before, {before}")
    assert len(screen.models) == models
    kernel.assert_no_rank()


def test_a_flood_is_bounded(kernel: Kernel, screen: Screen) -> None:
    flood = "import nbspawn\ndef train(rank):\n    for n in range(100_000): print(n, '<' * 50)"
    part = begin(screen, flood)
    part.click("Run")
    part.until(lambda: "train()" in part.picture, "it has ended")
    assert "99999 <<<" in part.text and len(part.picture) < 300_000 and screen.sent < 3_000_000
    assert "<<" not in part.picture


def test_closing_the_widget_while_ranks_run(kernel: Kernel, screen: Screen, tmp_path: Path) -> None:
    part = begin_waiting(screen, tmp_path / "go")
    ok(kernel.execute("w.close()"))
    assert part.root not in screen.models
    (tmp_path / "go").touch()
    assert ok(kernel.execute("w.wait(30)\nw.running")).result == "False"


def test_values_with_html(kernel: Kernel, screen: Screen) -> None:
    code = "import nbspawn\ndef train(rank, name):\n    return name"
    part = begin(screen, code, "nprocs=1, name='<img src=x>'")
    part.click("Run")
    part.until_text("[0] '<img src=x>'")
    part.until(lambda: "train(name=" in part.picture, "it is drawn")
    assert "<img" not in part.picture and "&lt;img src=x&gt;" in part.picture


def test_a_click_in_a_subshell_that_goes(kernel: Kernel, screen: Screen, tmp_path: Path) -> None:
    """JupyterLab handles clicks there, and deletes it when the page is left."""
    if "kernel subshells" not in kernel._client.kernel_info(reply=True)["content"].get("supported_features", ()):
        pytest.skip("this ipykernel has no subshells")
    part = begin(screen, UNTIL_TOLD, f"nprocs=2, start_method='fork', go={str(tmp_path / 'go')!r}")

    def control(kind: str, **content: str) -> dict[str, str]:
        client = kernel._client
        request = client.session.msg(kind, content)
        client.control_channel.send(request)
        while True:  # replies to earlier tests' requests may be there still
            reply = client.get_control_msg(timeout=PATIENCE)
            if reply["parent_header"]["msg_id"] == request["header"]["msg_id"]:
                return dict(reply["content"])

    subshell = control("create_subshell_request")["subshell_id"]
    part.click("Run", subshell)
    part.until_text("only")
    ok(kernel.execute("threads = []\nw.observe(lambda _: threads.append(threading.current_thread().name), 'running')"))
    control("delete_subshell_request", subshell_id=subshell)
    (tmp_path / "go").touch()
    assert "told" in part.ended()
    assert kernel.value("threads") == ["MainThread"]


# ---------------------------------------------------------------- other places


@pytest.mark.extended
def test_executed_with_nobody_looking(tmp_path: Path) -> None:
    notebook = execute(
        tmp_path, "%load_ext nbspawn", SPEED, WIDGET_OF.format("nprocs=2, speed=5"), "w.run()", "list(w.wait(30))"
    )
    widget, picture = notebook.cells[2].outputs
    assert WIDGET in widget.data and widget.data["text/plain"] == "<interact: train()>"
    assert "train(speed=5)" in picture.data["text/html"] and "[0] 50" in picture.data["text/html"]
    assert notebook.cells[4].outputs[0].data["text/plain"] == "[50, 51]"


def test_without_ipywidgets(kernel: Kernel) -> None:
    code = (
        "import sys\nold = {n: sys.modules.pop(n) for n in list(sys.modules) if n.split('.')[0] == 'ipywidgets'"
        " or n == 'nbspawn._notebook.interact_widget'}\nsys.modules['ipywidgets'] = None\nimport nbspawn\n"
        "try: nbspawn.interact(lambda rank: None, 2)\nfinally: del sys.modules['ipywidgets']; sys.modules.update(old)"
    )
    reply = kernel.execute(code)
    assert reply.ename == "UsageError" and "%pip install ipywidgets" in reply.traceback


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("'train'", "interact() takes a function"),
        ("train, 0", "nprocs"),
        ("train, 'lots'", "lots"),
        ("train, start_method='thread'", "unknown start method 'thread'"),
        ("train, options={'keep': True}", "no option 'keep'"),
        ("train, depth=3", "train() has no parameter 'depth'"),
    ],
)
def test_what_is_refused(kernel: Kernel, arguments: str, message: str) -> None:
    """And what there is of the widget already ends in silence."""
    tried = f"try: nbspawn.interact({arguments})\nexcept nbspawn.UsageError as error: print(error)"
    reply = ok(kernel.execute(f"{SPEED}\n{tried}\nimport gc\ngc.collect();"))
    assert message in reply.text() and reply.text("stderr") == ""
