"""Starts agents on the nodes of a Slurm allocation: one step of srun, with a task on each node."""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from nbspawn._engine.kernel import descriptors
from nbspawn._process import traced
from nbspawn.errors import StartError, UsageError

_OPTIONS = (
    "--ntasks-per-node=1",
    "--distribution=block",
    "--overlap",  # what the notebook's own step holds is not free
    "--mem=0",  # all that the allocation has
    "--cpu-bind=none",
    "--gpu-bind=none",
    "--mpi=none",
    "--kill-on-bad-exit=0",
    "--no-kill",
    "--wait=0",
    "--export=ALL",
    "--label",
    "--unbuffered",
    "--quit-on-interrupt",
    "--job-name=nbspawn",
)
_OF_A_STEP = ("SLURM_", "SRUN_", "SBATCH_", "SALLOC_", "PMI_", "PMIX_", "SLURMD_", "SQUEUE_")
"""The beginnings of variables that are options of Slurm's commands, and would give the agents the CPUs and tasks of the
notebook's own step."""
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "RESIZING")
_ASK_SECONDS = 2.0
_ANSWER_SECONDS = 30.0  # for Slurm's controller
_END_SECONDS = 15.0  # for a step whose agents have been told to end
_WORDS = 50_000  # bytes of what srun and the agents say that are kept


class SlurmNodes:
    """The first nodes of the allocation ``job``. Equal to as many of the same one."""

    needs_modules = False  # the nodes of a cluster share files
    news_seconds = 1.0

    def __init__(self, job: str, nodes: int) -> None:
        self.nodes = nodes
        self.address = ""
        self._job = job
        self._number = ""
        """The job's own, which is not that of its array."""
        self._names: list[str] = []
        self._step: subprocess.Popen[bytes] | None = None
        self._said = bytearray()
        self._ended: dict[int, str] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlurmNodes) and (other._job, other.nodes) == (self._job, self.nodes)

    def __hash__(self) -> int:
        return hash((self._job, self.nodes))

    def name(self, node: int) -> str:
        return self._names[node]

    def prepare(self, waiting: Callable[[str], object]) -> None:
        """Wait until the job runs. Raises StartError for one that does not, or with too few nodes."""
        asked = 0.0
        state, names, reason = "", "", ""
        while state != "RUNNING":
            if time.monotonic() > asked:
                asked = time.monotonic() + _ASK_SECONDS
                self._number, state, _, names, reason = _asked(self._job, waiting)
                if state not in ("RUNNING", *_WAITING):
                    raise StartError(f"Slurm's job {self._job} is {state}, not RUNNING ({reason})")
            waiting(f"Waiting for Slurm's job {self._job}, which is {state} ({reason})")
            if state != "RUNNING":
                time.sleep(_ASK_SECONDS / 20)
        self._names = _said_by(waiting, "scontrol", "show", "hostnames", names).split()[: self.nodes]
        if len(self._names) < self.nodes:
            _nodes.cache_clear()
            raise StartError(f"Slurm's job {self._job} has {len(self._names)} nodes, not {self.nodes}")
        self.address = _towards(self._names, waiting)

    def start(self, node: int, arguments: tuple[str, ...], token: str) -> None:
        """All of them, with the first."""
        if node:
            return
        host, port, _ = arguments
        which = [f"--nodes={self.nodes}", f"--ntasks={self.nodes}", f"--nodelist={','.join(self._names)}"]
        agent = [sys.executable, "-m", "nbspawn._agent", host, port, "slurm"]
        environment = _environment()
        environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PWD": os.getcwd()}
        with traced.not_in_children():
            self._step = subprocess.Popen(
                ["srun", f"--jobid={self._number}", *which, *_OPTIONS, *agent],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Stop interrupts the kernel's process group
                bufsize=0,
            )
        assert self._step.stdin is not None and self._step.stdout is not None
        for pipe in (self._step.stdin, self._step.stdout):
            descriptors.close_after_fork(pipe.fileno())
        os.set_blocking(self._step.stdout.fileno(), False)
        with suppress(OSError):  # it has ended
            self._step.stdin.write(token.encode() + b"\n")  # for each task: srun copies its input

    def failures(self) -> Mapping[int, str]:
        if self._step is None:
            return {}
        assert self._step.stdout is not None
        over = self._step.poll() is not None
        with suppress(BlockingIOError):
            while part := os.read(self._step.stdout.fileno(), 65536):
                self._said += part
        del self._said[:-_WORDS]
        lines = self._said.decode(errors="replace").splitlines()
        told = _told(lines)
        for line in lines:
            if not (task := re.match(r"srun: error: \S+: tasks? (\d+): (.+)", line)):
                continue
            own = [said.partition(": ")[2] for said in lines if re.match(rf"{task[1]}: .*\S", said)]
            own = own[-1:] if task[2].startswith("Exited") else []
            # By Slurm, which is about to say why; or the agent's last words are on their way.
            unexplained = task[2] == "Terminated" or (task[2].startswith("Exited") and not own)
            if told or not unexplained:
                self._ended.setdefault(int(task[1]), told or " ".join([f"its agent has ended: {task[2]}.", *own]))
        if over:
            errors = [line for line in lines if line.startswith(("srun:", "slurmstepd"))]
            why = next(reversed(errors or lines), f"exit code {self._step.returncode}")
            for node in range(self.nodes):
                self._ended.setdefault(node, told or f"Slurm's step has ended: {why}")
        return self._ended

    def close(self) -> None:
        """Its agents end with the step's input; Slurm takes seconds to say so."""
        step, self._step = self._step, None
        if step is None:
            return
        assert step.stdin is not None and step.stdout is not None
        for pipe in (step.stdin, step.stdout):
            descriptors.unmark(pipe.fileno())
            pipe.close()
        threading.Thread(target=_end, args=(step,), name="nbspawn-slurm-step", daemon=True).start()


def _end(step: subprocess.Popen[bytes]) -> None:
    try:
        step.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        step.terminate()
        try:
            step.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # it still waits for nodes that have gone
            step.kill()
            step.wait()


def _told(lines: list[str]) -> str:
    """Why Slurm has ended the step, such as 'CANCELLED AT ... DUE TO TIME LIMIT'; '' if it has not."""
    found = next((line for line in lines if "***" in line), "")
    return f"Slurm says: {found.partition('error: ')[2] or found}" if found else ""


def count(where: str, asked: int | None) -> int:
    """All of the allocation's nodes, if nothing else was asked for. Raises UsageError and StartError."""
    return asked or _nodes(_job(where))


@functools.cache
def _nodes(job: str) -> int:
    return int(_asked(job)[2])


def starter(where: str, nprocs: int, nodes: int, backend: str | None) -> SlurmNodes:
    """So many of the allocation's nodes."""
    return SlurmNodes(_job(where), nodes)


def singly(where: str) -> list[str]:
    """None: users name the whole."""
    return []


def found(where: str) -> tuple[list[tuple[str, str]], int]:
    """The job's state and nodes, and how many they are."""
    job = _job(where)
    _, state, nodes, names, reason = _asked(job)
    return [("job", f"{job}, {state} ({reason})"), ("nodes", names)], int(nodes)


def _job(where: str) -> str:
    """The number of the job that is named, or in whose allocation this process is. Raises UsageError."""
    if shutil.which("srun") is None:
        raise UsageError("--on slurm needs Slurm's srun: there is none here")
    job = where.partition(":")[2] or os.environ.get("SLURM_JOB_ID", "")
    if not job:
        raise UsageError(
            "this notebook does not run in a Slurm allocation. Start Jupyter in one, or hold one with "
            "`salloc --no-shell --nodes=2` and name its number: --on slurm:JOB"
        )
    if not re.fullmatch(r"\d+([_+]\d+)?", job):
        raise UsageError(f"{job!r:.40} is no number of a Slurm job: --on slurm:JOB (squeue --me shows yours)")
    return job


def _asked(job: str, waiting: Callable[[str], object] = bool) -> list[str]:
    """The job's own number, its state, its number of nodes, their names and the reason that Slurm gives."""
    said = _said_by(waiting, "squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%A|%T|%D|%N|%r|%i")
    rows = [[part.strip() for part in line.split("|")] for line in said.splitlines()]
    if not rows:
        raise StartError(f"Slurm has no job {job} any more (squeue --me shows yours)")
    *found, name = next((row for row in rows if row[0] == job), rows[0])  # the number may also be an array's
    if "+" in name:
        raise StartError(
            f"Slurm's job {job} is a heterogeneous one, which --on slurm does not serve: allocate the nodes as one"
        )
    return found


def _said_by(waiting: Callable[[str], object], *command: str) -> str:
    """What one of Slurm's commands says. Raises StartError with its own last line."""
    try:
        asked = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment(),
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(f"Slurm cannot be asked: {error}") from None
    until = time.monotonic() + _ANSWER_SECONDS
    with asked:
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    out, err = asked.communicate(timeout=0.2)
                    break
                waiting("Waiting for Slurm's controller")
                if time.monotonic() > until:
                    raise StartError(
                        f"Slurm's controller does not answer: {command[0]} has waited for {_ANSWER_SECONDS:g} s"
                    )
        finally:
            asked.kill()
    if asked.returncode:
        last = next(reversed(err.strip().splitlines()), f"exit code {asked.returncode}")
        raise StartError(f"Slurm's {command[0]} says: {last}")
    return out


def _environment() -> dict[str, str]:
    """This process's, without what is of the step that it runs in."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_STEP) or name in _KEPT}


def _towards(names: list[str], waiting: Callable[[str], object]) -> str:
    """This machine's address on the way to one of these nodes: its own name may mean 127.0.1.1."""
    found = "127.0.0.1"
    for name in names[:4]:
        known = re.search(r"NodeAddr=(\S+)", _said_by(waiting, "scontrol", "--oneliner", "show", "node", name))
        with suppress(OSError):
            family, *_, there = socket.getaddrinfo(known[1] if known else name, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as asking:
                asking.connect(there)  # sends nothing
                found = str(asking.getsockname()[0])
            if found != there[0]:
                return found  # the way to another machine
    return found
