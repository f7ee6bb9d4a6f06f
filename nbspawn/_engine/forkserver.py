"""The private fork server: a process with torch already imported, of which a rank is a copy in milliseconds.

multiprocessing's global fork server is never touched: what it preloads is the user's choice, once per process. How
ranks are started by this one is in contexts.py.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import context, forkserver, resource_tracker
from pathlib import Path
from typing import Any

from nbspawn._engine import inherited, interrupt_flag
from nbspawn._engine.directories import OwnedDirectory
from nbspawn._engine.guardian import started_at, stopped
from nbspawn._engine.learned import TRAINING, Learned, changed_at
from nbspawn._engine.multiprocessing_adapter import beginning_with, listening_at, prepared, starting
from nbspawn._protocol.preload import PATH, Plan, Report
from nbspawn._rank import traced

_log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_MEMORY = 1024  # MB above which a server imports no more; on a small machine a quarter of its memory
_MEMORY_VARIABLE = "NBSPAWN_PRELOAD_MB"

# What nbspawn or torchrun sets in each rank, whatever the server had: it may differ without being out of date.
_OF_RANKS = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "OMP_NUM_", "NBSPAWN_")


class PrivateServer:
    """The fork server of this process, started and replaced in the background.

    The first one has torch, and is there after a second. In a notebook it gives way to another one that has imported
    what else ranks need (learned.py), and that to the next whenever ranks have reported more. One whose imports
    looked at environment variables that have changed since, or at packages that were installed anew, serves no more.
    """

    def __init__(self) -> None:
        self._forget()
        inherited.after_fork_in_child(self._forget)
        atexit.register(self._remove_directory)

    def _forget(self) -> None:
        self._current: Any = None
        self._planned: frozenset[str] = frozenset()
        self._installed_at: tuple[int, ...] = ()
        self._needed: tuple[str, ...] = ()
        self._warming: threading.Thread | None = None
        self._everything = False
        self._starting = 0
        self._replaced = threading.Condition()
        self._retired: list[Any] = []
        self._failure = "it has not finished its imports"
        self._directory: OwnedDirectory | None = None
        self._made = 0
        self.for_cells = False
        """Will ranks run cells, though this process has no IPython?"""
        self.learned = Learned()
        """What ranks will need."""
        self.report = Report()
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
        if lost := _lost(self._current):
            return lost
        if changed_at() != self._installed_at:
            return "packages have been installed"
        # An import that sets a variable has set it in the kernel, too, if that has imported the same.
        changed = (name for name, values in self.report.read.items() if environment.get(name) not in values)
        name = next((name for name in changed if not name.startswith(_OF_RANKS)), "")
        return name and f"{name} has changed"

    def warm_up(self, modules: Iterable[str] = ()) -> None:
        """Have a server soon, and then one that has imported these modules too, and all else that ranks are likely to
        need; returns at once. The present one, if there is one, serves until its successor is ready."""
        self.learned.learn(modules)
        everything = memory_limit() > 0
        if everything or self._current is None or _lost(self._current):
            self._begin(everything)

    def get(
        self,
        modules: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        give_up: Callable[[], object] = bool,
    ) -> forkserver.ForkServer:
        """The server; waits for one that has these modules and can serve ranks with this environment, about 1 s where
        there is none. Raises OSError if there is none in 60 s, KeyboardInterrupt if ``give_up`` becomes true."""
        end = time.monotonic() + _START_SECONDS
        begun = False
        self._needed += tuple(name for name in modules if name not in self._needed)
        while True:
            ended = not self.bringing_up  # asked first: it serves, and then it ends
            if self._serves(environment):
                break
            self.abandon_if_lost()
            if (starting := self._starting) and stopped(starting):
                _kill(starting)
                begun = False
            if self._current is not None and not begun:
                self._cancel()  # what is being imported is not for these ranks
                ended = True
            if ended:
                if begun:
                    raise OSError(f"{self._failure} (python -m nbspawn shows more)")
                begun = True
                self._begin(everything=False, environment=environment)
            with self._replaced:
                self._replaced.wait(0.05)
            if give_up():
                raise KeyboardInterrupt
            if time.monotonic() > end:
                raise OSError(f"it has not finished its imports within {_START_SECONDS:g} s")
        return self._current  # type: ignore[no-any-return]

    def is_present(self, server: forkserver.ForkServer) -> bool:
        """Has no other taken its place? While ``not_while_forking`` is held, its descriptors are then open."""
        return server is self._current

    def stop(self) -> None:
        """End the server. Ranks that it has forked live on."""
        self._cancel()
        old, self._current, self._planned = self._current, None, frozenset()
        if old is not None:
            self._retire(old)
        self._remove_directory()

    def abandon(self) -> None:
        """The present server does not do what it is asked: the next run gets another one."""
        if self._current is not None:
            self._give_up_current("it does not answer")

    def abandon_if_lost(self) -> None:
        """The present server was killed, stopped, or cannot be reached."""
        if self._current is not None and (lost := _lost(self._current)):
            self._give_up_current(lost)

    def _give_up_current(self, why: str) -> None:
        _log.warning("the fork server is given up: %s", why)
        old, self._current, self._planned = self._current, None, frozenset()
        if started_at(old._forkserver_pid):
            os.kill(old._forkserver_pid, signal.SIGKILL)
        self._retire(old)

    def _cancel(self) -> None:
        """Start no successor now."""
        self._everything = False
        if starting := self._starting:  # the thread that starts it may set that to 0 meanwhile
            _kill(starting)
        warming = self._warming
        if warming is not None:
            warming.join()

    def _serves(self, environment: Mapping[str, str] | None) -> bool:
        if self._current is None or not self._planned.issuperset(self._needed) or _lost(self._current):
            return False
        return environment is None or not self.out_of_date(environment)

    def _begin(self, everything: bool, environment: Mapping[str, str] | None = None) -> None:
        with self._replaced:
            self._everything = self._everything or everything
            if self.bringing_up:
                return
            if self._current is not None and everything and not self._missing():
                return
            self._retired = [old for old in self._retired if not _has_ended(old)]
            if self._directory is None or not self._directory.exists():
                self._remove_directory()
                self._directory = OwnedDirectory("server")
            self._warming = traced.thread(self._bring_up, "nbspawn-warm-up", (everything, environment))
            self._warming.start()

    def _bring_up(self, everything: bool, environment: Mapping[str, str] | None) -> None:
        """In a thread of its own: the first server, for whoever waits; then the one that has more."""
        if self._current is None or not everything:
            if not self._replace(self._needed, environment):
                return
        while self._more_is_wanted():
            if not self._replace((*self._needed, *self.learned.wanted)):
                return
            self.learned.tried.update(dict.fromkeys(self.report.imported))
            self.learned.refused.update(self.report.refused)
            self.learned.save()

    def _more_is_wanted(self) -> bool:
        """If not, the thread is done, and whoever wants more from now on starts another one."""
        with self._replaced:
            if self._everything:
                self.learned.load()
                if self._missing():
                    return True
            self._everything, self._warming = False, None
            return False

    def _missing(self) -> set[str]:
        return {*self._needed, *self.learned.wanted} - self._planned - self.report.modules

    def _replace(self, modules: tuple[str, ...], environment: Mapping[str, str] | None = None) -> bool:
        shell = self.for_cells or "IPython" in sys.modules
        trusted = (*self._needed, *TRAINING, *self.learned.tried)
        installed_at = changed_at()
        theirs = dict(os.environ if environment is None else environment)
        fresh = self._start(Plan(modules, trusted, memory_limit(), theirs, shell))
        if fresh is None:
            return False
        old, self._current = self._current, fresh
        self._planned, self._installed_at = frozenset(modules), installed_at
        if old is not None:
            self._retire(old)
        with self._replaced:
            self._replaced.notify_all()
        return True

    def _start(self, plan: Plan) -> Any:
        assert self._directory is not None
        self._made += 1
        written = self._directory.path / f"plan-{self._made}"
        fresh: Any = forkserver.ForkServer()  # typeshed knows neither its private parts nor Popen's
        fresh.set_forkserver_preload(["nbspawn._rank.preload"])
        # multiprocessing's own directory for sockets is left behind when the kernel is killed; ours is not.
        address = os.fspath(self._directory.path / f"server-{self._made}")
        try:
            plan.write(written)
            with self.not_while_forking, starting(), listening_at(address), traced.not_in_children():
                with beginning_with("os.setpgid(0, 0)"):
                    resource_tracker.ensure_running()  # before the mask, which it would lift
                # A press of Stop during the imports would end the server: it ignores SIGINT only afterwards. The
                # mask is inherited; ranks lift it (_rank/process.py).
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    with beginning_with(f"os.setpgid(0, 0); os.environ[{PATH!r}] = {os.fspath(written)!r}"):
                        fresh.ensure_running()
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except OSError as error:
            self._failure = str(error)
            return None
        inherited.close_after_fork(fresh._forkserver_alive_fd)
        self._starting = fresh._forkserver_pid
        try:
            self._wait_until_it_answers(fresh)
            self.report = Report.of(written)
            return fresh
        except (OSError, EOFError) as error:
            self._failure = f"it ended during its imports ({error})" if str(error) else "it ended during its imports"
            inherited.close(fresh._forkserver_alive_fd)
            with suppress(ChildProcessError):
                os.waitpid(fresh._forkserver_pid, 0)
            return None
        finally:
            self._starting = 0

    def _wait_until_it_answers(self, fresh: Any) -> None:
        """It listens from the start but answers only after its imports: it is sent an empty process, and waited for."""
        data = prepared(context.Process(target=os.getpid), popen=fresh)
        with self.not_while_forking:
            readable, writable = fresh.connect_to_new_process([])
        try:
            write_all(writable, data)
            for _ in ("pid", "exit code"):
                forkserver.read_signed(readable)
        finally:
            os.close(readable)

    def _retire(self, old: Any) -> None:
        """It ends by itself when the last rank that it forked is done with; see contexts.py."""
        with self.not_while_forking:  # a rank is just being started from it
            inherited.close(old._forkserver_alive_fd)
        self._retired.append(old)

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


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _lost(server: Any) -> str:
    """What has happened to this server that it cannot serve; '' if nothing is known of that."""
    if not started_at(server._forkserver_pid):
        return "it has been killed"
    if stopped(server._forkserver_pid):
        return "it has been stopped"
    return "" if os.path.exists(server._forkserver_address) else "its directory has been deleted"


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


def _has_ended(old: Any) -> bool:
    with suppress(ChildProcessError):  # whoever waits for any child of this process may have been faster
        if os.waitpid(old._forkserver_pid, os.WNOHANG)[0] == 0:
            return False
    if os.path.exists(old._forkserver_address):
        os.unlink(old._forkserver_address)
    return True


server = PrivateServer()
