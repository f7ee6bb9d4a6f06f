"""An engine without processes: what happens is scripted, and time passes only while it is polled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from nbspawn._protocol.frames import Frame, Stack
from nbspawn._protocol.gauges import Reading
from nbspawn._protocol.messages import Command, Event, Exited, Raised, Returned, RunCell, RunFunction, Stopping
from nbspawn._protocol.questions import Question, T
from nbspawn._results import Results
from nbspawn.errors import Failure

SIGNALS = {"interrupt": -2, "SIGTERM": -15, "SIGKILL": -9}


class FakeEngine:
    """``script`` is what happens and when (seconds): events, or calls, such as a press of Stop. Ranks that are stopped
    end at the signal that they ``obey``."""

    cell = "cell"
    notes = ()
    log_dir = "/no/such/logs"
    logs_exist = False
    logs_stay_until = "the kernel ends"

    def __init__(self, nprocs: int, *script: tuple[float, Event | Callable[[], object]], obey: str = "interrupt"):
        self.nprocs = nprocs
        self.now = 0.0
        self.failures: list[Failure] = []
        self.did: list[tuple[float, object]] = []
        """What was asked of the engine, and when: ``stop_at``'s arguments, the name of another method, a command."""
        self.answers: dict[int, object] = {}
        """What the ranks answer if they are asked for their collectives."""
        self.answer_takes = 0.0
        """Seconds."""
        self._script = list(script)
        self._plan: list[tuple[float, Event]] = []
        self._obey = obey
        self._ended: dict[int, Event] = {}

    all_alive = property(lambda self: not self._ended)
    all_exited = finished = property(lambda self: len(self._ended) == self.nprocs)
    stopping = property(lambda self: any(isinstance(what, tuple) for _, what in self.did))

    def clock(self) -> float:
        return self.now

    def poll(self, timeout: float) -> list[Event]:
        agenda = sorted([*self._script, *self._plan], key=lambda item: item[0])
        self.now = max(self.now, min([self.now + timeout, *(at for at, _ in agenda)]))
        due = [item for item in agenda if item[0] <= self.now]
        self._script = [item for item in self._script if item not in due]
        self._plan = [item for item in self._plan if item not in due]
        events = []
        for _, what in due:
            if callable(what):
                what()
            else:
                self._note(what)
                events.append(what)
        return events

    def _note(self, event: Event) -> None:
        wanted = isinstance(event, Raised) and (event.by_quit or event.name == "KeyboardInterrupt")
        if isinstance(event, Raised) and not wanted:
            self.failures.append(Failure(event.rank, event.time, event.name))
        if isinstance(event, (Returned, Raised, Exited)):
            self._ended.setdefault(event.rank, event)

    def stop_at(self, interrupt: float | None = None, term: float | None = None, kill: float | None = None) -> None:
        self.did.append((self.now, (interrupt, term, kill)))
        self._plan = []
        for rank in set(range(self.nprocs)) - self._ended.keys():
            for how, delay in zip(SIGNALS, (interrupt, term, kill), strict=True):
                if delay is not None:
                    self._plan.append((self.now + delay, Stopping(rank, self.now + delay, how)))
                    if how in (self._obey, "SIGKILL"):
                        self._plan.append((self.now + delay, Exited(rank, self.now + delay, SIGNALS[how])))
                        break

    def look(self, deep: bool, native: Collection[int] = ()) -> dict[int, Stack]:
        self.did.append((self.now, f"look, {deep=}"))
        self.now += self.answer_takes
        return {rank: Stack((Frame("train.py", 7, "train"),)) for rank in range(self.nprocs) if rank not in self._ended}

    def ask(self, question: Question[T]) -> dict[int, T | None]:
        self.now += self.answer_takes
        return {rank: answer for rank, answer in self.answers.items() if rank not in self._ended}

    def break_into(self, rank: int) -> None:
        self.did.append((self.now, f"break into {rank}"))

    def send(self, rank: int, command: Command) -> None:
        self.did.append((self.now, f"to {rank}: {command.text or command.kind}"))  # type: ignore[union-attr]

    def wake(self) -> None:
        self.did.append((self.now, "wake"))

    def results(self) -> Results[object]:
        return Results([self._ended[rank].value for rank in range(self.nprocs)])  # type: ignore[union-attr]

    def stacks(self, names: Mapping[str, str], ending: str = "") -> list[str]:
        return [f"Ranks stood at line 7{ending and f' and were {ending}'}."]

    def losses(self) -> list[str]:
        return []

    # What no supervisor asks for.

    def host(self, rank: int) -> str:
        return ""

    def log_path(self, rank: int) -> str:
        return f"{self.log_dir}/rank-{rank}.log"

    def fetch_log(self, rank: int, end_only: bool = False) -> str:
        return self.log_path(rank)

    def pids(self) -> list[int]:
        return [100 + rank for rank in range(self.nprocs)]

    def usage(self) -> list[Reading]:
        return [Reading(0.0, 0.0, 0, 0, -1, -1)] * self.nprocs

    def run(self, commands: Mapping[int, RunCell | RunFunction]) -> None:
        raise NotImplementedError

    def regroup(self) -> bool:
        return False

    def serve(self) -> None: ...

    def dismiss(self, seconds: float) -> None: ...

    def dispose(self, keep_logs: bool = False) -> None:
        self.did.append((self.now, "dispose"))
