"""The private fork server: a process with torch already imported, of which a rank is a copy in milliseconds.

multiprocessing's global fork server is never touched: what it preloads is the user's choice, once per process. How
ranks are started by this one is in start_contexts.py.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from nbspawn._engine.kernel import descriptors, interrupt_flag
from nbspawn._engine.kernel.directories import OwnedDirectory
from nbspawn._engine.kernel.guardian import stopped
from nbspawn._engine.start.importer import Importer, Server
from nbspawn._engine.start.learned import Learned, changed_at, is_for
from nbspawn._process import traced
from nbspawn._protocol.preload import ImportReport, Plan

_log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_LATE = 30  # times what a stage should take: then it hangs, though it was safe when it was tried
_LATEST = 600.0  # seconds
_MEMORY = 1024  # MB above which the importer imports no more; on a small machine a quarter of its memory
_MEMORY_VARIABLE = "NBSPAWN_PRELOAD_MB"

# What nbspawn or torchrun sets in each rank, whatever the server had: it may differ without being out of date.
_OF_RANKS = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "OMP_NUM_", "NBSPAWN_")


class PrivateServer:
    """The fork server of this process, started and replaced in the background.

    The first one has torch, and is there after a second. In a notebook it gives way, stage by stage, to others that
    have what else ranks need (learned.py), and these to more whenever ranks have reported some. All are forked by one
    importer. If that looked at environment variables that have changed since, or at packages that were installed anew,
    another one begins.
    """

    def __init__(self) -> None:
        self._forget()
        descriptors.after_fork_in_child(self._forget)
        atexit.register(self._remove_directory)

    def _forget(self) -> None:
        self._importer: Importer | None = None
        self._current: Server | None = None
        self._installed_at: tuple[int, ...] = ()
        self._planned: frozenset[str] = frozenset()
        self._settled = True
        self._needed: tuple[str, ...] = ()
        self._expected: frozenset[str] = frozenset()
        self._stage: tuple[tuple[str, ...], float] = (), 0.0
        self._warming: threading.Thread | None = None
        self._everything = False
        self._replaced = threading.Condition()
        self._turn = threading.RLock()
        self._starting = threading.local()
        self._ending: list[Importer] = []
        self._failure = "it has not finished its imports"
        self._directory: OwnedDirectory | None = None
        self._made = 0
        self.for_cells = False
        """Will ranks run cells, though this process has no IPython?"""
        self.learned = Learned()
        """What ranks will need."""
        self.report = ImportReport()
        """What the present server has imported, and what it has not."""
        self.not_while_forking = threading.Lock()
        """Held while a thread is in multiprocessing's own locks, which a forked child would inherit locked."""

    @property
    def warm(self) -> bool:
        """Has a server finished its imports?"""
        return self._current is not None

    @property
    def bringing_up(self) -> bool:
        """Is another server being started?"""
        warming = self._warming  # the thread may end meanwhile
        return warming is not None and warming.is_alive()

    def out_of_date(self, environment: Mapping[str, str]) -> str:
        """Why the present server cannot serve ranks with this environment; '' if it can."""
        if self._current is not None and (lost := self._current.lost):
            return lost
        return self._differs(environment)

    def _differs(self, environment: Mapping[str, str]) -> str:
        """Does the environment differ from what the importer has seen?"""
        if changed_at() != self._installed_at:
            return "packages have been installed"
        # An import that sets a variable has set it in the kernel, too, if that has imported the same.
        changed = (name for name, values in self.report.read.items() if environment.get(name) not in values)
        name = next((name for name in changed if not name.startswith(_OF_RANKS)), "")
        return name and f"{name} has changed"

    def warm_up(self, modules: Iterable[str] = ()) -> None:
        """Have a server soon, and then ones that have imported these modules too, and all else that ranks are likely to
        need; returns at once. The present one, if there is one, serves until its successor is ready."""
        self.learned.learn(modules)
        everything = memory_limit() > 0
        if everything or self._current is None or self._current.lost:
            self._begin(everything)

    def get(
        self,
        modules: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        cancelled: Callable[[], object] = bool,
    ) -> Server:
        """The server; waits for one that has these modules and can serve ranks with this environment, about 1 s where
        there is none. Raises OSError if there is none in 60 s, KeyboardInterrupt if ``cancelled`` becomes true."""
        with self._taking_turns(cancelled):
            return self._get(modules, environment or vars(self._starting).get("environment"), cancelled)

    @contextmanager
    def starting(self, environment: Mapping[str, str], cancelled: Callable[[], object]) -> Iterator[None]:
        """Meanwhile this thread starts ranks with this environment: no other thread starts any, or replaces the server
        for ranks with another one. Raises KeyboardInterrupt if ``cancelled`` becomes true before that."""
        with self._taking_turns(cancelled):
            self._starting.environment = environment
            try:
                yield
            finally:
                del self._starting.environment

    @contextmanager
    def _taking_turns(self, cancelled: Callable[[], object]) -> Iterator[None]:
        while not self._turn.acquire(timeout=0.05):
            if cancelled():
                raise KeyboardInterrupt
        try:
            yield
        finally:
            self._turn.release()

    def _get(
        self, modules: Sequence[str], environment: Mapping[str, str] | None, cancelled: Callable[[], object]
    ) -> Server:
        end = time.monotonic() + _START_SECONDS
        begun = False
        self._needed += tuple(name for name in modules if name not in self._needed)
        while True:
            ended = not self.bringing_up  # asked first: it serves, and then it ends
            self.abandon_if_lost()
            with self._replaced:
                current = self._current
                outdated = environment is not None and bool(self._differs(environment))
                if current is not None and not outdated and self._done.issuperset(self._needed):
                    return current
            if self._end_stopped_importer():
                begun = False
            if current is not None and outdated and not begun:
                self._cancel()  # what is being imported is not for these ranks
                ended = True
            if ended:
                if begun:
                    raise OSError(f"{self._failure} (python -m nbspawn shows more)")
                begun = True
                self._begin(everything=False, environment=environment)
            self._wait(end, cancelled)

    @property
    def _done(self) -> frozenset[str]:
        """What the present server has, as far as the importer can have it."""
        return self._planned.difference(self._stage[0])

    def _wait(self, end: float, cancelled: Callable[[], object]) -> None:
        """Wait for a moment, or for the next server."""
        with self._replaced:
            self._replaced.wait(0.05)
        if cancelled():
            raise KeyboardInterrupt
        if time.monotonic() > end:
            raise OSError(f"it has not finished its imports within {_START_SECONDS:g} s")

    def _end_stopped_importer(self) -> bool:
        importer = self._importer
        if importer is None or not self._stage[1] or not stopped(importer.pid):
            return False
        importer.kill()
        return True

    def wait_for(self, modules: Collection[str], nprocs: int, cancelled: Callable[[], object] = bool) -> str:
        """For so many ranks, which will import these ``modules``, wait for a server that has them, if it is there
        sooner than the ranks would be done with that. Returns what it has waited for. Errors as in ``get``."""
        with self._replaced:
            self.learned.load()
            self.learned.use(modules)
            self._expected = frozenset(modules)
        end = time.monotonic() + _START_SECONDS
        waited = ""
        while True:
            with self._replaced:
                coming = self._coming_soon(nprocs)
            if not coming or self._end_stopped_importer():
                return waited
            waited = waited or coming
            self._wait(end, cancelled)

    def _coming_soon(self, nprocs: int) -> str:
        if not self._everything or not self.bringing_up:
            return ""
        stage, began = self._stage
        trusted = frozenset(self.learned.trusted)
        if not trusted.issuperset(stage):
            return ""  # a trial takes as long as the import, or longer
        # By the importer's clock: on a busy machine everything takes longer, also in the ranks.
        importer = self._importer
        late = importer.clock() - began - self.learned.estimate(stage) if began and importer is not None else 0.0
        stages = self.learned.stages(self._done | self.report.modules)
        expected = [one for one in stages if is_for(one, self._expected) and trusted.issuperset(one)]
        later = sum(self.learned.estimate(one) for one in expected if not set(one) & set(stage))
        own = [name for one in expected for name in one if is_for([name], self._expected)]  # others share their stage
        by_themselves = self.learned.estimate(own) * max(1.0, nprocs / (os.cpu_count() or 1))
        if max(0.0, -late) + later > by_themselves or late > by_themselves:  # so late that it may never be there
            return ""
        names = (next(name for name in one if is_for([name], self._expected)) for one in expected)
        return " and ".join(name if name in self._expected else name.partition(".")[0] for name in names)

    def is_present(self, server: Server) -> bool:
        """Has no other taken its place? While ``not_while_forking`` is held, its descriptors are then open."""
        return server is self._current

    def stop(self) -> None:
        """End the server. Ranks that it has forked live on."""
        self._cancel()
        self._let_go_of_importer()
        self._replace(None)
        self._remove_directory()

    def abandon(self) -> None:
        """The present server does not do what it is asked: the next run gets another one."""
        if self._current is not None:
            self._give_up_current("it does not answer")

    def abandon_if_lost(self) -> None:
        """The present server was killed, stopped, or cannot be reached."""
        if self._current is not None and (lost := self._current.lost):
            self._give_up_current(lost)

    def _give_up_current(self, why: str) -> None:
        _log.warning("the fork server is given up: %s", why)
        assert self._current is not None
        self._current.kill()
        self._replace(None)

    def _replace(self, fresh: Server | None) -> None:
        old, self._current = self._current, fresh
        if old is not None:
            with self.not_while_forking:  # a rank is just being started from it
                old.let_go()

    def _cancel(self) -> None:
        """Import nothing more now."""
        self._everything = False
        while (warming := self._warming) is not None and warming.is_alive():
            importer = self._importer
            if importer is not None and self._stage[1]:
                importer.kill()
            warming.join(0.05)

    def _begin(self, everything: bool, environment: Mapping[str, str] | None = None) -> None:
        with self._replaced:
            self._everything = self._everything or everything
            if self.bringing_up:
                return
            self._ending = [old for old in self._ending if not old.has_ended()]
            if self._directory is None or not self._directory.exists():
                self._remove_directory()
                self._directory = OwnedDirectory("server")
            if self._current is not None and everything and self._next_stage() is None:
                return
            self._warming = traced.thread(self._bring_up, "nbspawn-warm-up", [environment])
            self._warming.start()

    def _bring_up(self, environment: Mapping[str, str] | None) -> None:
        """In a thread of its own: start a server for whoever waits, then those that have imported more."""
        try:
            if self._importer is None or self._importer.has_ended() or self._differs(environment or os.environ):
                self._start_importer()
                self._carry_out(self._needed, environment or os.environ)
            elif self._current is None:
                self._carry_out(())
            while (stage := self._one_more_stage()) is not None:
                self._carry_out(stage, settle=not stage)
                self.learned.note(self.report)
                self.learned.save()
        except (OSError, EOFError) as error:
            self._failure = f"it ended during its imports ({error})" if str(error) else "it ended during its imports"
            if self._importer is not None and not self._importer.killed:
                self.learned.doubt(self._stage[0])
                self.learned.save()
            self._let_go_of_importer()
            self._stage = (), 0.0

    def _one_more_stage(self) -> tuple[str, ...] | None:
        """The next stage. If there is none, the thread is done, and whoever wants more from now on starts another
        one."""
        with self._replaced:
            stage = self._next_stage()
            if stage is None:
                self._everything, self._warming = False, None
            return stage

    def _next_stage(self) -> tuple[str, ...] | None:
        """What to import next; an empty one to have the last server tidied up."""
        if needed := tuple(name for name in self._needed if name not in self._planned):
            return needed
        if not self._everything:
            return None
        self.learned.load()
        stages = self.learned.stages(self._planned | self.report.modules)
        expected = [stage for stage in stages if is_for(stage, self._expected)]
        if found := expected or stages:
            return found[0]
        return None if self._settled else ()

    def _start_importer(self) -> None:
        self._let_go_of_importer()
        self._installed_at, self._planned, self._settled = changed_at(), frozenset(), True
        with self.not_while_forking:
            self._importer = Importer()

    def _let_go_of_importer(self) -> None:
        if self._importer is not None:
            self._importer.let_go()
            self._ending.append(self._importer)
            self._importer = None

    def _carry_out(
        self, stage: tuple[str, ...], environment: Mapping[str, str] | None = None, settle: bool = False
    ) -> None:
        """Import this, and have a server that has it. ``environment`` is a new importer's."""
        assert self._importer is not None and self._directory is not None
        self._planned |= frozenset(stage)
        self._stage = stage, self._importer.clock()
        self._made += 1
        plan = Plan(
            os.fspath(self._directory.path / f"server-{self._made}"),
            stage,
            (*self._needed, *self.learned.trusted),
            memory_limit(),
            None if environment is None else dict(environment),
            shell=self.for_cells or "IPython" in sys.modules,
            settle=settle,
        )
        trusted = bool(stage) and frozenset(plan.trusted).issuperset(stage)
        longest = min(_LATEST, _LATE * (self.learned.estimate(stage) + 1.0)) if trusted else None
        report, fresh = self._importer.carry_out(plan, longest)
        with self._replaced:
            self._replace(fresh)
            self.report, self._stage = report, ((), 0.0)
            self._settled = settle or (self._settled and not stage)
            self._replaced.notify_all()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            self._directory.remove()
            self._directory = None


def memory_limit() -> int:
    """Bytes above which a server imports no more; 0 has it import nothing but torch. ``NBSPAWN_PRELOAD_MB`` sets it."""
    with suppress(KeyError, ValueError):
        return max(0, int(os.environ[_MEMORY_VARIABLE])) << 20
    sizes = [_MEMORY << 20, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4]
    with suppress(OSError, ValueError):  # no such file; "max"
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()) // 4)
    return min(sizes)


def write_all(fd: int, data: bytes) -> None:
    """Write to a server's child, and close the pipe. Raises OSError if it does not read, KeyboardInterrupt if somebody
    has pressed Stop meanwhile: a pipe takes 64 KiB at once, and the server may be stuck."""
    end = time.monotonic() + _START_SECONDS
    try:
        os.set_blocking(fd, False)
        rest = memoryview(data)
        while rest.nbytes:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:
                if interrupt_flag.pressed():
                    raise KeyboardInterrupt from None
                if time.monotonic() > end:
                    raise TimeoutError("the fork server does not answer") from None
                select.select([], [fd], [], 0.05)
    finally:
        os.close(fd)


server = PrivateServer()
