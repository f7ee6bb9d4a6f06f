"""Runs cells of many kinds in a real kernel, does harm at random moments, and checks what must hold whatever happens.

    python tests/campaign/campaign.py --steps 1000             # says its seed
    python tests/campaign/campaign.py --seed 7 --only 412      # one step of that campaign again
    python tests/campaign/campaign.py --on agents              # ranks on two agents (support/nodes.py)
    python tests/campaign/campaign.py --on ssh                 # on two hosts, without a server (support/fake_ssh.py)

Each step is made from the seed and its number alone: a kind of cell, a start method, one-shot, kept or background
ranks, a fault and its moment. The moment is a time, so that a failure may need some tries to come again.

What is checked after each step:

- no value and no line of another command is shown;
- the log has every line that a rank has printed, in order, and the notebook shows nothing else (with agents: has them
  in order, and all of a cell that ends well);
- Stop ends the cell within the grace period and 3 s;
- no rank, and no child of one, is left, and the kernel holds no more descriptors and threads than before;
- the next cell works, without a kernel restart.

After each kernel: nothing is left in its temp directory.

A kernel without a free descriptor is not among the faults: ipykernel itself then waits 10 s for each thing that it
publishes, and garbles messages. Ours alone is in test_survival.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")
os.environ.setdefault("NBSPAWN_PRELOAD_MB", "0")

import psutil
from debugged import Debugged
from kernels import IMPORTER, Cell, ExecutedKernel, Kernel, Reply, lives
from methods import SUPPORT

_KIND = f"""
import sys
sys.path.insert(0, {str(SUPPORT)!r})
from nbspawn._engine import clusters
clusters.KINDS["agents"] = clusters.Cluster("agents", "agents of this machine", "nodes")
"""
GRACE = 0.5  # seconds, of every cell here
_STOPPED_WITHIN = GRACE + 3.0  # seconds after the last press of Stop
_PATIENCE = 2.5  # seconds, after which a user presses Stop: most cells take less
_HANGS = 90.0  # seconds: no cell here takes nearly as long

PRELUDE = """\
import numpy as np, os, subprocess, sys, time
def say(token, rank, times, pause=0.0):
    for number in range(times):
        print(f"{token} {rank} {number}.")
        time.sleep(pause)
class Stuck:
    def __repr__(self): time.sleep(1000)
def made():
    import torch
    torch.manual_seed(0)
    return torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), static_graph=True)
"""

# Each prints lines "TOKEN RANK NUMBER." and ends with the value (TOKEN, RANK), if it ends well.
CELLS = {
    "short": "say(T, rank, 3)",
    "prints": "say(T, rank, 200, 0.005)",
    "flood": "say(T, rank, 3000)",
    "sleeps": "say(T, rank, 2); time.sleep(1.2)",
    "computes": "say(T, rank, 2)\nend = time.monotonic() + 1\nwhile time.monotonic() < end: sum(range(10000))",
    "reduces": "import torch, torch.distributed as dist\nsay(T, rank, 2)\nfor number in range(300):\n"
    "    dist.all_reduce(torch.ones(4)); time.sleep(0.002)",
    "raises": "say(T, rank, 3, 0.05)\nif rank == 1: raise ValueError(T)\ntime.sleep(1)",
    "dies": "say(T, rank, 3, 0.05)\nif rank == 0: os._exit(3)\ntime.sleep(1)",
    "dead peer": "import torch, torch.distributed as dist\nsay(T, rank, 2)\nif rank == 0: os.kill(os.getpid(), 9)\n"
    "dist.all_reduce(torch.ones(4))",
    "waits for ever": "import torch, torch.distributed as dist\nsay(T, rank, 2)\n"
    "if rank == 0: time.sleep(1000)\ndist.all_reduce(torch.ones(4))",
    "stuck repr": "say(T, rank, 3)\nStuck()",
    "stubborn": "say(T, rank, 2)\nwhile True:\n    try: time.sleep(1000)\n    except KeyboardInterrupt: pass",
    "children": "subprocess.Popen(['sleep', '1000'], start_new_session=rank == 0); say(T, rank, 20, 0.02)",
    "displays": "from IPython.display import HTML, display\nfor number in range(20):\n"
    "    display(HTML(f'<b>{T}</b>')); time.sleep(0.02)",
    "large": "say(T, rank, 2); big = np.full(1_000_000, rank)",
    "closes all": "say(T, rank, 3); os.closerange(3, 1024)",
    "forks": "say(T, rank, 3)\nif child := os.fork(): os.waitpid(child, 0)",
    "odd text": "say(T, rank, 3)\nprint('ab\\b' * 5000)\nprint('\\x1b[31mabc\\x1b[K\\b' * 2000)",
    "odd arguments": "import torch, torch.distributed as dist\nsay(T, rank, 2)\n"
    "group = dist.new_group(list(np.arange(2)))\ndist.all_reduce(torch.ones(4), group=group)\n"
    "if rank == 1: raise ValueError(T)\ntime.sleep(1)",
    "pictures": "from IPython.display import HTML, clear_output, display\nfor number in range(40):\n"
    "    clear_output(wait=True); display(HTML(f'<b>{T} {number}</b>')); time.sleep(0.01)",
    "trains": "import torch, torch.distributed as dist\nsay(T, rank, 2)\n"
    "if 'model' not in globals(): model = made()\nfor number in range(5):\n    model.zero_grad()\n"
    "    model(torch.full((2, 2), rank + 1.0)).sum().backward()\n    time.sleep(0.05)\n"
    "    each = [torch.empty(1, 2) for _ in range(2)]\n    dist.all_gather(each, model.module.weight.grad)\n"
    "    assert torch.equal(*each), 'the ranks are not synchronised'",
}
WITH_GROUP = ("reduces", "dead peer", "waits for ever", "odd arguments", "trains")
ENDLESS = ("waits for ever", "stuck repr", "stubborn")

FAULTS = (
    "none",
    "stop",
    "stop twice",
    "kill a rank",
    "freeze a rank",
    "kill the server",
    "freeze the server",
    "kill the guardian",
    "freeze the guardian",
    "kill the kernel",
    "delete the directory",
    "full disk",
    "read-only disk",
)
FAULTS_OF_AGENTS = tuple(fault for fault in FAULTS if "disk" not in fault) + ("kill an agent", "freeze an agent") * 3
FAULTS_ON = {
    "": FAULTS,
    "agents": FAULTS_OF_AGENTS,
    "ssh": (*FAULTS_OF_AGENTS, *("kill the relay", "freeze the relay", "kill ssh", "freeze ssh") * 2),
}
_KILLS = ("kill a rank", "kill an agent", "kill the relay", "kill ssh")
OPTIONS_ON = {"": "", "agents": "--on agents --nnodes 2 ", "ssh": "--on ssh:one,two "}
_SSH = f"{sys.executable} {SUPPORT}/fake_ssh.py"


class Violation(AssertionError):
    """Something that must hold did not."""


@dataclass(frozen=True)
class Step:
    """``moment`` is when the fault comes, in seconds after the cell was sent."""

    number: int
    kind: str
    method: str
    mode: str
    fault: str
    moment: float

    @classmethod
    def of(cls, seed: int, number: int, on: str = "") -> Step:
        """The same for the same seed and number."""
        chance = random.Random(f"{seed}-{number}")
        kind = chance.choice(list(CELLS))
        fault = chance.choice(FAULTS_ON[on])
        mode = chance.choices(("one-shot", "kept", "background"), (4, 4, 2))[0]
        method = chance.choice(("auto", "forkserver" if on else "fork", "forkserver"))
        return cls(number, kind, method, mode, fault, chance.uniform(0, 1.5))

    @property
    def token(self) -> str:
        return f"t{self.number}t"

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} · {self.method} · {self.mode} · {self.fault} at {self.moment:.2f} s"


class Place:
    """A temp directory for kernels, a small file system of its own where this user may mount one."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="nbc-", dir="/tmp"))
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "campaign", self.path]
        self.mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
        self._read_only = False
        self._filler = self.path / "filler"

    def fill(self) -> None:
        """No room is left."""
        with contextlib.suppress(OSError), open(self._filler, "wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass

    def protect(self) -> None:
        """Nothing can be made or opened for writing. A mount above the other: files that are open keep that from being
        made read-only."""
        subprocess.run(["mount", "--bind", self.path, self.path], check=True)
        self._read_only = True
        subprocess.run(["mount", "-o", "remount,bind,ro", self.path], check=True)

    def mend(self) -> None:
        """As before."""
        if self._read_only:
            subprocess.run(["umount", "-l", self.path], check=True)
            self._read_only = False
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", self.path], check=False)
        shutil.rmtree(self.path, ignore_errors=True)


class Campaign:
    """A kernel, and what it has been through."""

    def __init__(self, seed: int, slack: float, on: str) -> None:
        self.seed = seed
        self._slack = slack
        self._on = OPTIONS_ON[on]
        self.place = Place()
        self._logs = Path(tempfile.mkdtemp(prefix="nbc-logs-"))
        self._kernel: Kernel | None = None
        self._debugged: Debugged | None = None
        self._kept = ""
        self._kernels = 0
        self._restored: list[Callable[[], object]] = []
        self._pressed_at = 0.0
        self.seen: Counter[str] = Counter()

    # ------------------------------------------------------------ the kernel

    @property
    def kernel(self) -> Kernel:
        if self._kernel is None:
            self._folder = Path(tempfile.mkdtemp(prefix="nbc-kernel-"))
            self._kernel = ExecutedKernel(self._folder, TMPDIR=str(self.place.path), NBSPAWN_SSH=_SSH).start()
            self._kept = ""
            self._kernels += 1
            self._debugged = None
            if random.Random(f"{self.seed}-{self._kernels}-debugger").random() < 0.3:
                self._debugged = Debugged(self._kernel).__enter__()
                self._debugged.switch_on()
                self.seen["the front end's debugger"] += 1
            for cell in ("%load_ext nbspawn", PRELUDE):
                self._well(cell)
            if "agents" in self._on:
                self._well(_KIND)
            for method in ("auto",) if self._on else ("fork", "forkserver"):
                self._well(f"%%spawn 2 {self._on}-m {method}\nrank")
            if self._on:
                self._well("%ranks release")
            self._before = self._held()
        return self._kernel

    def _held(self) -> tuple[int, int]:
        process = psutil.Process(self.kernel.pid)
        return process.num_fds(), process.num_threads()

    def _well(self, cell: str) -> Reply:
        reply = self.kernel.execute(cell, timeout=_HANGS)
        if reply.status != "ok":
            raise Violation(f"this cell does not work: {cell!r}\n{reply}")
        return reply

    def close(self) -> None:
        """End the kernel; nothing of it may be left."""
        if self._kernel is None:
            return
        kernel, self._kernel = self._kernel, None
        children = psutil.Process(kernel.pid).children(recursive=True) if kernel.alive else []
        kernel.__exit__()
        self._until(
            lambda: not any(lives(child.pid) for child in children), lambda: "the kernel's processes end with it"
        )
        self._until(lambda: not self._swept(), lambda: f"left in the temp directory: {self._swept()}")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _swept(self) -> list[str]:
        """Sweep as the next kernel does; what of ours is left, with all files in it."""
        text = "from nbspawn._engine.kernel.directories import remove_stale; remove_stale()"
        subprocess.run([sys.executable, "-c", text], env={**os.environ, "TMPDIR": str(self.place.path)}, check=True)
        ours = ("nbspawn", "pymp", "pytorch")
        left = [entry.path for entry in os.scandir(self.place.path) if entry.name.startswith(ours)]
        return left + [
            os.path.join(folder, file) for path in left for folder, _, files in os.walk(path) for file in files
        ]

    def _until(self, happened: Callable[[], object], what: Callable[[], str], seconds: float = 10.0) -> None:
        end = time.monotonic() + seconds * self._slack
        while not happened():
            if time.monotonic() > end:
                raise Violation(f"in vain for {seconds * self._slack:.0f} s: {what()}")
            time.sleep(0.02)

    # ------------------------------------------------------------ a step

    def perform(self, step: Step) -> None:
        """Raises Violation."""
        self.seen.update((step.kind, step.method, step.mode, step.fault))
        kernel = self.kernel
        # The logs lie elsewhere if the fault is to the temp directory: what is lost there is lost.
        logs = self._logs / step.token
        cell = self._submit(step, logs)
        self._pressed_at = 0.0
        harm = threading.Thread(target=self._harm, args=(step,))
        harm.start()
        try:
            reply = self._ended(step, cell)
        finally:
            harm.join()
            for restore in self._restored:
                restore()
            self._restored.clear()
        if step.fault == "kill the kernel":
            self._after_the_kernel(kernel)
            return
        self._check_words(step, reply, logs)
        self._check_rest(step, reply)
        shutil.rmtree(logs, ignore_errors=True)

    def _submit(self, step: Step, logs: Path) -> Cell:
        body = f"T = {step.token!r}\n{CELLS[step.kind]}\n"
        if step.kind == "large":
            body += "(T, rank, big)[:2] if big[0] else (T, rank)\n"
        elif step.kind != "stuck repr":
            body += "(T, rank)\n"
        group = " -b gloo" if step.kind in WITH_GROUP else ""
        if step.mode == "kept":
            if not self._kept:
                # With a group for all: a kept session lives through many steps.
                start = f"%%spawn 2 {self._on}-k -m {step.method} -b gloo -g {GRACE}"
                start += f"{self._log_dir(self._logs / 'kept')}\n{PRELUDE}model = made()"
                self._well(start)
                self._kept = step.method
            return self._submit_debugged(f"%%ranks -g {GRACE}\n{body}")
        options = f"2 {self._on}-m {step.method}{group} -g {GRACE}{self._log_dir(logs)}"
        if step.mode == "background":
            start = f"%%spawn {options} --background -o handle\n{body}"
            self._set_breakpoint(start)
            reply = self.kernel.execute(start, timeout=_HANGS)
            if reply.status != "ok" and step.fault not in _KILLS:
                raise Violation(f"the ranks do not start\n{reply}")
            if reply.status != "ok":
                self._well(start)  # what was killed was about to start them
            return self.kernel.submit("handle.wait()")
        return self._submit_debugged(f"%%spawn {options}\n{body}")

    def _submit_debugged(self, code: str) -> Cell:
        self._set_breakpoint(code)
        return self.kernel.submit(code)

    def _set_breakpoint(self, code: str) -> None:
        """Where the front end's debugger is on: in the first line of what each rank does."""
        if self._debugged is not None:
            self._debugged.breakpoints(code, 3)

    def _log_dir(self, folder: Path) -> str:
        return "" if self._on else f" --log-dir {folder}"

    def _ended(self, step: Step, cell: Cell) -> Reply:
        """Read on until the cell ends; press Stop where nothing else ends it, as a user would."""
        began = time.monotonic()
        kernel = self.kernel
        looks_on = random.Random(f"{self.seed}-{step.number}-paused").random() < 0.3
        while not cell.over and kernel.alive:
            with contextlib.suppress(AssertionError):
                cell.wait(0.2)
            if self._debugged is not None and self._debugged.told("stopped") and not looks_on:
                self.seen["Continue"] += 1
                self._debugged.ask("continue", threadId=1)
            waited = time.monotonic() - began
            if waited > _PATIENCE and not self._pressed_at:
                self._press()
            if self._pressed_at and time.monotonic() - self._pressed_at > _STOPPED_WITHIN * self._slack:
                raise Violation(f"Stop has not ended the cell within {_STOPPED_WITHIN * self._slack:g} s\n{cell.reply}")
        return cell.reply

    def _press(self) -> None:
        """Stop; of a run in the background that ends the wait alone."""
        self.kernel.interrupt()
        self._pressed_at = time.monotonic()

    # ------------------------------------------------------------ faults

    def _harm(self, step: Step) -> None:
        # A debugged kernel takes up to 0.5 s to begin a cell, and ipykernel loses an interrupt that comes before that.
        time.sleep(step.moment + (0.5 if self._debugged is not None else 0.0))
        kernel = self._kernel
        if kernel is None or not kernel.alive:
            return
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            self._do(step, kernel)

    def _do(self, step: Step, kernel: Kernel) -> None:
        chance = random.Random(f"{self.seed}-{step.number}-harm")
        what, _, whom = step.fault.partition(" ")
        number = signal.SIGKILL if what == "kill" else signal.SIGSTOP
        match step.fault:
            case "stop" | "stop twice":
                self._press()
                if step.fault == "stop twice":
                    time.sleep(chance.uniform(0, 0.5))
                    self._press()
            case "kill a rank" | "freeze a rank":
                if ranks := [one for one in kernel.ranks() if "sleep" not in one.name()]:
                    one = chance.choice(ranks)
                    _send(one, number)
                    self._restored.append(lambda: _thaw(one))
            case "kill the kernel":
                kernel.kill()
            case "delete the directory":
                for path in self.place.path.glob("nbspawn-*"):
                    shutil.rmtree(path, ignore_errors=True)
            case "full disk" if self.place.mounted:
                self._restored.append(self.place.mend)
                self.place.fill()
            case "read-only disk" if self.place.mounted:
                self._restored.append(self.place.mend)
                self.place.protect()
            case "kill an agent" | "freeze an agent":
                if agents := self._agents(kernel):
                    one = chance.choice(agents)
                    _send(one, number)
                    self._restored.append(lambda: _thaw(one))
            case "kill the relay" | "freeze the relay" | "kill ssh" | "freeze ssh":
                sign = "near" if "relay" in whom else f"{SUPPORT}/fake_ssh.py"
                children = psutil.Process(kernel.pid).children(recursive=True)
                if found := [child for child in children if sign in child.cmdline()]:
                    one = chance.choice(found)
                    _send(one, number)
                    self._restored.append(lambda: _thaw(one))
            case "kill the server" | "freeze the server" | "kill the guardian" | "freeze the guardian":
                sign = IMPORTER if "server" in whom else "_engine/kernel/guardian.py"
                of = chance.choice(self._agents(kernel) or [psutil.Process(kernel.pid)])
                for child in of.children():
                    if sign in " ".join(child.cmdline()):
                        for process in child.children() or [child]:
                            _send(process, number)

    def _agents(self, kernel: Kernel) -> list[psutil.Process]:
        children = psutil.Process(kernel.pid).children(recursive=True)
        return [child for child in children if "nbspawn._agent" in child.cmdline()]

    # ------------------------------------------------------------ what must hold

    def _check_words(self, step: Step, reply: Reply, logs: Path) -> None:
        shown = reply.text() + reply.result + str(reply.displays and [data for data in reply.shown])
        foreign = set(re.findall(r"t\d+t", shown)) - {step.token}
        if foreign:
            raise Violation(f"shown of other commands: {foreign}\n{reply}")
        folder = self._logs / "kept" if step.mode == "kept" else logs
        for rank in range(2):
            log = folder / f"rank-{rank}.log"
            written = log.read_text(errors="replace") if log.exists() else ""
            numbers = [int(number) for number in re.findall(rf"^{step.token} {rank} (\d+)\.$", written, re.MULTILINE)]
            if self._on:  # the logs are on their nodes
                numbers = [
                    int(n) for line in reply.of(rank) for n in re.findall(rf"^{step.token} {rank} (\d+)\.$", line)
                ]
            if numbers != list(range(len(numbers))):
                raise Violation(f"the log of rank {rank} has holes: {numbers}")
            said = re.search(r"say\(T, rank, (\d+)", CELLS[step.kind])
            complete = reply.status == "ok" and step.mode != "background" and step.kind != "flood"
            if (
                said
                and (complete if self._on else reply.status == "ok" and step.mode != "background")
                and len(numbers) != int(said[1])
            ):
                raise Violation(f"the log of rank {rank} lacks lines: {len(numbers)} of {said[1]}\n{reply}")
            seen = [int(n) for line in reply.of(rank) for n in re.findall(rf"^{step.token} {rank} (\d+)\.$", line)]
            if not set(seen) <= set(numbers):
                raise Violation(f"shown of rank {rank}, and not in its log: {sorted(set(seen) - set(numbers))}")
            if complete and seen != numbers:
                raise Violation(f"shown of rank {rank}: {seen}, and its log has {numbers}\n{reply}")
        if "the ranks are not synchronised" in str(reply):
            raise Violation(f"kept ranks train on unsynchronised\n{reply}")
        if reply.status == "ok" and step.kind == "pictures" and step.mode != "background":
            drawn = (output.get("data", {}).get("text/html", "") for output in reply.outputs)
            last = [text for text in drawn if text.startswith("<b>")]
            if last != [f"<b>{step.token} 39</b>"] * 2:
                raise Violation(f"the last pictures are {last}\n{reply}")
        if reply.status == "ok" and step.kind not in ENDLESS and step.mode != "background":
            wanted = "\n".join(f"[{rank}] ({step.token!r}, {rank})" for rank in range(2))
            if reply.result != wanted:
                raise Violation(f"the values are {reply.result!r}\n{reply}")

    def _check_rest(self, step: Step, reply: Reply) -> None:
        kernel = self.kernel
        if step.mode == "background":
            kernel.execute("handle.interrupt(); handle.interrupt()", timeout=_HANGS)
            self._until(
                lambda: kernel.execute("handle.done()", timeout=_HANGS).result == "True", lambda: "the handle is done"
            )
        after = "done-" + step.token
        if step.mode == "kept":
            states = kernel.execute("%ranks", timeout=_HANGS).text()
            if "ended" in states or "no ranks are alive" in states:
                self._kept = ""
                self._well("%ranks stop")
            else:
                again = kernel.execute(f"%%ranks -g {GRACE}\n({after!r}, rank)", timeout=_HANGS)
                # What was killed was idle: it is told now, or was noticed before. A rank without its descriptors is
                # aborted by gloo's thread.
                may_die = step.fault in _KILLS or step.kind == "closes all"
                told = again.ename == "RankExitedError" or "the kept ranks have ended (" in again.evalue
                if may_die and told:
                    self._kept = ""
                    self._well("%ranks stop")
                elif again.result.count(after) != 2:
                    raise Violation(f"the next cell of the kept ranks has other values: {again}\n{states}")
        reply = self._well(f"%%spawn 2 {self._on}-m {step.method}\n({after!r}, rank)")
        if reply.result.count(after) != 2:
            raise Violation(f"the next run has other values: {reply}")
        if step.mode == "kept" and self._kept and random.Random(f"{self.seed}-{step.number}-end").random() < 0.3:
            self._kept = ""
            self._well("%ranks stop")
        if not self._kept:
            if self._on:
                self._well("%ranks release")
            self._until(lambda: not kernel.ranks(), lambda: f"no rank is left: {kernel.ranks()}")
            self._until(lambda: not self._marked(), lambda: f"no child of a rank is left: {self._marked()}")
            fds, threads = self._before
            self._until(
                lambda: self._held()[0] <= fds + 12,
                lambda: f"descriptors are given back: {self._held()} of {self._before}",
            )
            self._until(
                lambda: self._held()[1] <= threads + 6, lambda: f"threads end: {self._held()} of {self._before}"
            )

    def _marked(self) -> list[int]:
        """Who bears the mark of a run of this kernel."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if str(self.place.path) in process.environ().get("NBSPAWN_RUN", "") and lives(process.pid):
                    found.append(process.pid)
        return found

    def _after_the_kernel(self, kernel: Kernel) -> None:
        self._until(lambda: not kernel.alive, lambda: "the kernel has been killed")
        self._until(lambda: not self._marked(), lambda: f"ranks end with their kernel: {self._marked()}")
        self.close()


def _send(process: psutil.Process, number: signal.Signals) -> None:
    """And wait until it is so: what is about to die still takes what it is given."""
    process.send_signal(number)
    end = time.monotonic() + _HANGS
    while time.monotonic() < end:
        status = process.status()
        # Until its last thread has ended, a process's files are open.
        if status == psutil.STATUS_STOPPED or (status == psutil.STATUS_ZOMBIE and _threads(process.pid) <= 1):
            return
        time.sleep(0.002)


def _threads(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/task"))
    return 0


def _thaw(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.resume()


@contextlib.contextmanager
def campaign(seed: int, slack: float = 1.0, on: str = "") -> Iterator[Campaign]:
    """Nothing of it stays on the machine."""
    made = Campaign(seed, slack, on)
    try:
        yield made
        made.close()
    finally:
        with contextlib.suppress(Exception, Violation):
            made.close()
        made.place.close()
        shutil.rmtree(made._logs, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31))
    parser.add_argument("--only", type=int, nargs="+", help="these steps of the campaign alone")
    parser.add_argument("--slack", type=float, default=1.0, help="times as long as promised, on a busy machine")
    parser.add_argument("--on", choices=FAULTS_ON, default="", help="where ranks run")
    parser.add_argument("--go-on", action="store_true", help="after a violation, with a new kernel")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    violations = 0
    began = time.monotonic()
    with campaign(given.seed, given.slack, given.on) as made:
        for number in given.only or range(given.steps):
            step = Step.of(given.seed, number, given.on)
            started = time.monotonic()
            try:
                made.perform(step)
                print(f"{step} · {time.monotonic() - started:.1f} s", flush=True)
            except AssertionError as violation:  # a cell that hangs, too
                violations += 1
                print(f"VIOLATION in step {step}\n{violation}\n", flush=True)
                if not given.go_on:
                    break
                with contextlib.suppress(Violation):
                    made.close()
        print(
            f"{sum(made.seen[mode] for mode in ('one-shot', 'kept', 'background'))} steps in "
            f"{time.monotonic() - began:.0f} s, seed {given.seed}: {violations} violations; {dict(made.seen)}"
        )
    sys.exit(violations > 0)


if __name__ == "__main__":
    main()
