"""``python -m nbspawn --check gpu``: does what nbspawn promises of GPUs hold on this machine?

Real ranks run cells on all GPUs. This process itself never initialises one: it could not fork ranks any more.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from nbspawn._accelerators import kinds
from nbspawn._api import spawn
from nbspawn._results import Results
from nbspawn._session.views import StreamView
from nbspawn._session_api import Session
from nbspawn._version import __version__
from nbspawn.errors import RankRaisedError, RunTimeoutError, SpawnError

_ALL = 120.0  # seconds for all checks
_WELL = 30.0  # seconds for a command that should end well: the first use of a GPU loads GBs of libraries
_FIRST = 35.0  # seconds for the first collective: if all are in it for 30, nbspawn's error says what that means
_HANG = 8.0  # seconds until a hang is stopped
_END = 10.0  # seconds for processes and memory to be gone
_MARGIN = 256 << 20  # bytes: others may use the GPUs, too

_IMPORTS = "import time, torch, torch.distributed as dist"
_OWN = """gpu = torch.{kind}
before = gpu.is_initialized()
used = torch.ones(1, device="{kind}").device
there = gpu.get_device_properties(used)
free = gpu.mem_get_info()[0] if hasattr(gpu, "mem_get_info") else None
before, str(used), there.name, there.total_memory, free"""
_SUM = """x = torch.full((1 << 22,), rank + 1.0, device=device)
dist.all_reduce(x)
x.min().item(), x.max().item()"""
_RING = """came = torch.empty(1 << 22, device=device)
sent = dist.P2POp(dist.isend, torch.full_like(came, rank), (rank + 1) % world_size)
for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, came, (rank - 1) % world_size)]):
    work.wait()
came.min().item(), came.max().item()"""
_UNTIL_ALL_CALL = """if rank == world_size - 1:
    {instead}
x = torch.ones(4, device=device)
dist.all_reduce(x)
x.tolist()"""
_SLEEP = "time.sleep(600)"
_HUNG = _UNTIL_ALL_CALL.format(instead=_SLEEP)
_RAISED = _UNTIL_ALL_CALL.format(instead="raise ValueError('on purpose')")
_ASSERTED = """x = torch.ones(4, device=device)
torch._assert_async(torch.tensor(rank < world_size - 1, device=device))
x.tolist()"""


class _Wrong(Exception):
    """Something does not work. The text says what, and what to do."""


class _LeftOut(Exception):
    """Something cannot be checked here. The text says why."""


class _Ranks:
    """Kept ranks, one on each GPU, for one check after the other; new ones where they have ended."""

    def __init__(self) -> None:
        self.kind = kinds.own()
        self.count = self.kind.count(os.environ)
        self.env: dict[str, str] = {}
        self.together = True
        """Do collectives work?"""
        self.free: list[Any] = []
        """Bytes of each GPU before the checks; None where torch does not tell."""
        self.pids: set[int] = set()
        """Of all that there were."""
        self._session: Session | None = None

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def execute(self, code: str, timeout: float = _WELL) -> list[Any]:
        if self._session is None or not self._session.alive:
            self.close()
            view = None if "NCCL_DEBUG" in os.environ else StreamView(lambda text: None)
            self._session = Session("gpu", backend="auto", env=self.env, view=view)
            self._session.execute(_IMPORTS)
            self.pids.update(self._session.pids)
        return list(self._session.execute(code, timeout=timeout))

    def fail(self, code: str, error: type[SpawnError], timeout: float = _WELL) -> str:
        """What is said when this fails, as it should."""
        try:
            self.execute(code, timeout)
        except error as found:
            return _said(found)
        raise _Wrong("No error has arrived.")

    def sum(self, timeout: float = _WELL) -> None:
        _compare("the sum", self.execute(_SUM, timeout), [(self.count * (self.count + 1) / 2,) * 2] * self.count)

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """What happens within the block must cost them neither their variables nor their group."""
        self.execute("kept = 40 + rank")
        self.sum()
        yield
        if self._session is None or not self._session.alive:
            raise _Wrong(f"The ranks, and their variables, are lost: {self._session and self._session.ended}.")
        _compare("a variable", self.execute("kept"), [40 + rank for rank in range(self.count)])
        self.sum()


def _compare(what: str, found: list[Any], expected: list[Any]) -> None:
    if found != expected:
        raise _Wrong(f"Wrong numbers: {what} is {found} by rank, and should be {expected}.")


def _said(error: BaseException) -> str:
    """The error's text, without traceback and native frames."""
    lines = str(error).partition("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if not line.startswith("  native:"))


# ---------------------------------------------------------------- the checks: each returns what else is to be said


def _own_gpu(ranks: _Ranks) -> str:
    found = ranks.execute(_OWN.format(kind=ranks.kind.type))
    before, used, names, memory, ranks.free = map(list, zip(*found, strict=True))
    if used != [f"{ranks.kind.type}:{rank}" for rank in range(ranks.count)]:
        raise _Wrong(f"They use {', '.join(used)}.")
    if any(before):
        raise _Wrong("A rank's GPU was initialised before its code used it: by a package that is imported by itself?")
    return "\n".join(
        f"{gpu}: {name}, {size / 2**30:.1f} GiB" for gpu, name, size in zip(used, names, memory, strict=True)
    )


def _collectives(ranks: _Ranks) -> str:
    if ranks.count == 1:
        raise _LeftOut("There is one GPU, and no group has two ranks on one. What follows is checked with one rank.")
    try:
        return _sum_and_ring(ranks)
    except (SpawnError, _Wrong) as failure:
        ranks.together, why = False, _said(failure)
    if ranks.kind.backends[0] != "nccl":
        raise _Wrong(why)
    why += "\nWith NCCL_DEBUG=INFO in its environment, this command shows what NCCL does."
    ranks.close()
    ranks.env["NCCL_P2P_DISABLE"] = "1"
    try:
        _sum_and_ring(ranks)
    except (SpawnError, _Wrong) as failure:
        raise _Wrong(f"{why}\nWith NCCL_P2P_DISABLE=1 it does not work either: {_said(failure)}") from None
    ranks.together = True
    raise _Wrong(
        f"{why}\nWith NCCL_P2P_DISABLE=1 it works: the GPUs cannot reach each other's memory. Start ranks with --env "
        "NCCL_P2P_DISABLE=1, as the checks below do. It is slower."
    )


def _sum_and_ring(ranks: _Ranks) -> str:
    began = time.monotonic()
    ranks.sum(_FIRST)
    summed = time.monotonic()
    before = [(rank - 1) % ranks.count for rank in range(ranks.count)]
    _compare("what the rank before has sent", ranks.execute(_RING), [(rank, rank) for rank in before])
    ring = time.monotonic() - summed
    return f"{ranks.execute('dist.get_backend()')[0]}: the sum took {summed - began:.2f} s, the ring {ring:.2f} s"


def _hang_is_told(ranks: _Ranks) -> str:
    ranks.sum()
    said, last = ranks.fail(_HUNG, RunTimeoutError, _HANG), ranks.count - 1
    if _SLEEP not in said or f"ank {last}" not in said or "line 2" not in said:
        raise _Wrong(f"The error does not say that rank {last} is at line 2, {_SLEEP}:\n{said}")
    return next((line for line in said.splitlines() if line.startswith("Collective")), said)


def _hang_is_survived(ranks: _Ranks) -> str:
    with ranks.surviving():
        ranks.fail(_HUNG, RunTimeoutError, _HANG / 2)
    return ""


def _error_arrives(ranks: _Ranks) -> str:
    with ranks.surviving():
        said = ranks.fail(_RAISED, RankRaisedError)
    if f"rank {ranks.count - 1} of {ranks.count}: ValueError: on purpose (line 2)" not in said:
        raise _Wrong(f"Another error has arrived:\n{said}")
    return ""


def _error_of_the_gpu(ranks: _Ranks) -> str:
    if ranks.kind.title != "CUDA":
        raise _LeftOut("It takes an assertion on the GPU, which torch may lack there.")
    if ranks.together:
        ranks.sum()  # in a group, NCCL's watchdog sees the error, too, and would abort the process
    said = ranks.fail(_ASSERTED, RankRaisedError)
    ranks.close()  # nothing works any more on that GPU
    if "device-side assert" not in said or "(line " not in said:
        raise _Wrong(f"Another error has arrived:\n{said}")
    return said.splitlines()[0]


def _start_methods(ranks: _Ranks) -> str:
    said, failed = [], []
    for method in ("fork", "forkserver", "spawn"):
        try:
            found: Results[int] = spawn(_use, (ranks.kind.type,), ranks.count, start_method=method, timeout=_WELL)
            ranks.pids.update(found)
            said += [f"{method} works"]
        except SpawnError as failure:
            said += [f"{method}: {_said(failure)}"]
            failed += [method]
    if failed and (not ranks.kind.only_spawn or "spawn" in failed):
        raise _Wrong("\n".join(said))
    return "\n".join(said)


def _use(rank: int, kind: str) -> int:
    import torch

    torch.ones(1, device=kind).item()
    return os.getpid()


def _nothing_left(ranks: _Ranks) -> str:
    ranks.close()
    _wait(lambda: [str(pid) for pid in sorted(ranks.pids) if os.path.exists(f"/proc/{pid}")], "Processes are left")
    before = ranks.free
    if not before or None in before:
        raise _LeftOut("The processes are gone; how much memory is free is not known.")

    def taken() -> list[str]:
        ranks.close()
        _own_gpu(ranks)
        lost = [then - now for then, now in zip(before, ranks.free, strict=True)]
        return [f"{ranks.kind.type}:{gpu} {size >> 20} MiB" for gpu, size in enumerate(lost) if size > _MARGIN]

    _wait(taken, "Less memory is free than before, unless another program has it now")
    return ""


def _wait(left: Callable[[], list[str]], what: str) -> None:
    """A driver takes a while."""
    end = time.monotonic() + _END
    while found := left():
        if time.monotonic() > end:
            raise _Wrong(f"{what}: {', '.join(found)}.")
        time.sleep(0.2)


class _Check(NamedTuple):
    name: str
    run: Callable[[_Ranks], str]
    together: bool = False
    """Does it need collectives that work?"""
    seconds: float = 45.0
    """It is stopped then."""


_CHECKS = (
    _Check("each rank has its own GPU, and no context before its code uses it", _own_gpu, seconds=60.0),
    _Check("the ranks compute a sum, and send in a ring", _collectives, seconds=90.0),
    _Check("a hang is told", _hang_is_told, together=True),
    _Check("kept ranks survive a hang", _hang_is_survived, together=True),
    _Check("a rank's error arrives while others wait for it, and kept ranks survive", _error_arrives, together=True),
    _Check("an error of a GPU arrives with its line", _error_of_the_gpu),
    _Check("each start method gives a rank its GPU", _start_methods),
    _Check("nothing is left on the GPUs", _nothing_left),
)


# ---------------------------------------------------------------- one after the other


def gpu() -> int:
    """Make all checks, and print each when it is made. Returns the exit status."""
    ranks, failed, end = _Ranks(), 0, time.monotonic() + _ALL
    print(_machine(ranks), flush=True)
    if not ranks.count:
        return 1
    try:
        for check in _CHECKS:
            began = time.monotonic()
            verdict, text = _made(check, ranks, min(check.seconds, end - began))
            failed += verdict == "FAILED"
            print(f"{verdict:<10}{check.name} ({time.monotonic() - began:.1f} s)")
            print("".join(f"{'':10}{line}\n" for line in text.splitlines()), end="", flush=True)
    except KeyboardInterrupt:
        print("Stopped.")
        return 128 + signal.SIGINT
    finally:
        ranks.close()
    print(f"{failed} of {len(_CHECKS)} checks have failed." if failed else "All is well.")
    return int(failed > 0)


def _machine(ranks: _Ranks) -> str:
    import torch

    versions = (getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu"))
    built = f"torch {torch.__version__} ({' '.join([ranks.kind.title, *filter(None, versions)])} build)"
    if not ranks.count:
        found = f"{kinds.unserved()} devices, which nbspawn does not serve" if kinds.unserved() else "no GPU"
        return f"{built} finds {found} on this machine: there is nothing to check."
    drivers = (Path(f"/sys/module/{name}/version") for name in ("nvidia", "amdgpu", "xe", "i915"))
    driver = "".join(f", driver {path.parent.name} {path.read_text().strip()}" for path in drivers if path.exists())
    gpus = f"{ranks.count} GPUs: {ranks.count} ranks, one on each" if ranks.count > 1 else "1 GPU: 1 rank"
    return f"nbspawn {__version__}, {built}{driver}\n{gpus}, for at most two minutes"


def _made(check: _Check, ranks: _Ranks, seconds: float) -> tuple[str, str]:
    """The verdict, and what else is to be said."""
    try:
        if check.together and not ranks.together:
            raise _LeftOut("It needs collectives.")
        with _within(seconds):
            return "ok", check.run(ranks)
    except _LeftOut as reason:
        return "left out", str(reason)
    except Exception as failure:  # whatever it is: the next check is made
        ranks.close()
        return "FAILED", ("" if isinstance(failure, _Wrong) else f"{type(failure).__name__}: ") + _said(failure)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """What takes longer is stopped as by Ctrl-C, which nbspawn passes to the ranks."""
    late = []

    def stop(*_: object) -> None:
        late.append(True)
        signal.raise_signal(signal.SIGINT)

    if seconds <= 0:
        raise _Wrong("Not made: two minutes are over.")
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except KeyboardInterrupt as stopped:
        if not late:
            raise
        raise _Wrong(f"It did not end, and was stopped after {seconds:.0f} s. {stopped}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
