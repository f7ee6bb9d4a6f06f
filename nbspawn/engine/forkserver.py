"""The private fork server: a process with torch already imported, of which a rank is a copy in milliseconds.

torch's ``start_processes`` takes the start method as a string, so the two contexts of this file are registered with
multiprocessing under names of their own, as loky does. multiprocessing's global fork server is never touched: what it
preloads is the person's to say, once per process.

Both contexts start processes without two side effects of multiprocessing's own: the kernel's ``__main__`` is not run
again in the child (a notebook may have set ``__file__``), and the default start method is not settled for good, so
that the person's own ``set_start_method`` still works after ``%load_ext nbspawn``.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import io
import os
import signal
import sys
import sysconfig
import threading
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import (
    connection,
    context,
    forkserver,
    popen_forkserver,
    popen_spawn_posix,
    reduction,
    resource_tracker,
    spawn,
    util,
)
from typing import Any

from nbspawn.engine import inherited
from nbspawn.engine.directories import OwnedDirectory

FORKSERVER = "nbspawn-forkserver"
SPAWN = "nbspawn-spawn"

_START_SECONDS = 60.0

_BASE = ("nbspawn.rank.preload",)
_SHELL = ("nbspawn.rank.preload_shell",)

# Importing these starts threads or a runtime, and a process with threads is no safe thing to fork.
_NOT_PRELOADED = {"jax", "jaxlib", "tensorflow", "torch_tpu", "ray", "pyspark", "dask", "distributed"}


class PrivateServer:
    """One fork server a kernel, started and replaced in the background."""

    def __init__(self) -> None:
        self._forget()
        inherited.when_forked(self._forget)
        atexit.register(self._remove_directory)

    def _forget(self) -> None:
        self._current: Any = None
        self._preloaded: tuple[str, ...] = ()
        self._warming: threading.Thread | None = None
        self._retired: list[Any] = []
        self._failure = "it has not finished its imports"
        self._directory: OwnedDirectory | None = None
        self._made = 0
        self.not_while_forking = threading.Lock()
        """Held while a thread is in multiprocessing's own locks, which a forked child would inherit locked."""

    @property
    def warm(self) -> bool:
        """Has a server finished its imports?"""
        return self._current is not None

    def has(self, packages: Iterable[str]) -> bool:
        """Is there a server that has imported these packages, or has tried to?"""
        tops = {name.partition(".")[0] for name in self._preloaded}
        return self.warm and tops.issuperset(packages)

    def warm_up(self, packages: Iterable[str] = ()) -> None:
        """Have a server that has imported ``packages`` too, soon; returns at once. The present one, if there is one,
        serves until its successor is ready."""
        theirs = {name for name in self._preloaded if name not in _BASE + _SHELL}.union(packages)
        wanted = _BASE + (_SHELL if "IPython" in sys.modules else ()) + tuple(sorted(theirs))
        if set(wanted) <= set(self._preloaded) or (self._warming is not None and self._warming.is_alive()):
            return
        self._retired = [old for old in self._retired if not _has_ended(old)]
        if self._directory is None:
            self._directory = OwnedDirectory("server")
        self._warming = threading.Thread(target=self._replace, args=(wanted,), name="nbspawn-warm-up", daemon=True)
        self._warming.start()

    def get(self, packages: Sequence[str] = ()) -> forkserver.ForkServer:
        """The server; waits for the first one to be ready (about 1 s), and for one that has these packages. Raises
        OSError if there is none in 60 s."""
        for _ in range(2):  # the one that is warming up may have been begun without the packages
            if self._current is None or not self.has(packages):
                self.warm_up(packages)
                if self._warming is not None:
                    self._warming.join(_START_SECONDS)
        if self._current is None:
            raise OSError(f"{self._failure} (python -m nbspawn tells more)")
        return self._current  # type: ignore[no-any-return]

    def stop(self) -> None:
        """End the server. Ranks that it has forked live on."""
        if self._warming is not None:
            self._warming.join()
        if self._current is not None:
            self._retire(self._current)
        self._current, self._preloaded = None, ()
        self._remove_directory()

    def _replace(self, preload: tuple[str, ...]) -> None:
        fresh = self._start(preload)
        ours = tuple(name for name in preload if name in _BASE + _SHELL)
        if fresh is None and preload != ours:  # a module of the person's does not survive the import outside the kernel
            fresh = self._start(ours)
        if fresh is not None:
            old, self._current, self._preloaded = self._current, fresh, preload
            if old is not None:
                self._retire(old)

    def _start(self, preload: tuple[str, ...]) -> Any:
        fresh: Any = forkserver.ForkServer()  # typeshed knows neither its private parts nor Popen's
        fresh.set_forkserver_preload(list(preload))
        try:
            with self.not_while_forking, _starting(), _in_their_own_groups(), self._listening_here():
                resource_tracker.ensure_running()  # before the mask, which it would lift
                # A press of Stop during the imports would end the server: it ignores SIGINT only afterwards. The
                # mask is inherited; ranks lift it (rank/process.py).
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                try:
                    fresh.ensure_running()
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except OSError as error:
            self._failure = str(error)
            return None
        inherited.keep_from_children(fresh._forkserver_alive_fd)
        try:
            self._wait_until_it_answers(fresh)
            return fresh
        except (OSError, EOFError) as error:
            self._failure = f"it ended during its imports ({error})" if str(error) else "it ended during its imports"
            inherited.close(fresh._forkserver_alive_fd)
            os.waitpid(fresh._forkserver_pid, 0)
            return None

    def _wait_until_it_answers(self, fresh: Any) -> None:
        """It listens from the start but answers only after its imports: an empty process tells when."""
        data = _prepared(context.Process(target=os.getpid), popen=fresh)
        with self.not_while_forking:
            readable, writable = fresh.connect_to_new_process([])
        try:
            with open(writable, "wb") as pipe:
                pipe.write(data)
            for _ in ("pid", "exit code"):
                forkserver.read_signed(readable)
        finally:
            os.close(readable)

    @contextmanager
    def _listening_here(self) -> Iterator[None]:
        """multiprocessing's own directory for sockets is left behind when the kernel is killed; ours is not."""
        assert self._directory is not None
        self._made += 1
        address = os.fspath(self._directory.path / f"server-{self._made}")
        module: Any = forkserver
        module.connection = types.SimpleNamespace(arbitrary_address=lambda family: address)
        try:
            yield
        finally:
            module.connection = connection

    def _retire(self, old: Any) -> None:
        """It ends by itself when the last rank that it forked is done with; see ``_ServerPopen``."""
        inherited.close(old._forkserver_alive_fd)
        self._retired.append(old)

    def _remove_directory(self) -> None:
        if self._directory is not None:
            self._directory.remove()
            self._directory = None


@contextmanager
def _in_their_own_groups() -> Iterator[None]:
    """Start multiprocessing's two helpers, the fork server and the resource tracker, outside of the kernel's group.

    At its shutdown ipykernel sends SIGTERM to all of its group and waits for them to end. The resource tracker ignores
    SIGTERM, so every restart would take 2.5 s longer, at the end of which the kernel is killed. Both helpers end by
    themselves when the kernel has gone.
    """
    modules: tuple[Any, ...] = (forkserver, resource_tracker)

    def start(path: bytes, arguments: list[str], fds: list[int]) -> int:
        *options, code = arguments
        return util.spawnv_passfds(path, [*options, f"import os; os.setpgid(0, 0); {code}"], fds)

    for module in modules:
        module.util = types.SimpleNamespace(**{**vars(util), "spawnv_passfds": start})
    try:
        yield
    finally:
        for module in modules:
            module.util = util


def _has_ended(old: Any) -> bool:
    if os.waitpid(old._forkserver_pid, os.WNOHANG)[0] == 0:
        return False
    if os.path.exists(old._forkserver_address):
        os.unlink(old._forkserver_address)
    return True


def preloadable(modules: Iterable[str]) -> set[str]:
    """Those of the imported ``modules`` that lie in site-packages: installed, so not edited by the person.

    Editable installs lie elsewhere and are left out: a fork server would keep their old code.
    """
    places = tuple({sysconfig.get_path("purelib") + os.sep, sysconfig.get_path("platlib") + os.sep})
    found = set()
    for name in modules:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if isinstance(spec, importlib.machinery.ModuleSpec) and (spec.origin or "").startswith(places):
            if name.partition(".")[0] not in _NOT_PRELOADED:
                found.add(name)
    return found


server = PrivateServer()


@contextmanager
def _starting() -> Iterator[None]:
    """See the module's docstring: hide ``__main__``'s origin, and leave the default start method open."""
    main = sys.modules["__main__"]
    hidden: dict[str, Any] = {
        name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__
    }
    main.__spec__ = None
    default: Any = context._default_context
    settled = default._actual_context
    try:
        yield
    finally:
        default._actual_context = settled
        main.__dict__.update(hidden)


class _ServerPopen(popen_forkserver.Popen):
    """As multiprocessing's, on the process's own server."""

    _fds: list[int]

    def __init__(self, process_obj: Any) -> None:
        self._pid: int | None = None
        self._reading = threading.RLock()
        super().__init__(process_obj)

    @property
    def pid(self) -> int:  # type: ignore[override]
        """The server tells it first of all. Whoever starts several processes does not wait for one after the other.

        The lock matters: what comes next is the exit code, and a 0 that is taken for a pid means, to ``kill``, the
        whole process group of the kernel.
        """
        with self._reading:
            if self._pid is None:
                self._pid = forkserver.read_signed(self.sentinel)
        return self._pid

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """The exit code, which the server tells after the pid; None if there is none yet.

        multiprocessing asks all processes whenever it starts one, while another thread may watch ranks in the
        background: of two that read the exit code, one would take the end of the pipe for that of the server, and the
        code for 255.
        """
        if flag != os.WNOHANG:
            return super().poll(flag) if self.pid else None
        with self._reading:
            if self._pid is None and not connection.wait([self.sentinel], 0):
                return None
            return super().poll(flag) if self.pid else None

    def _launch(self, process_obj: Any) -> None:
        fork_server: Any = server.get()
        data = _prepared(process_obj, popen=self)
        with server.not_while_forking:
            self.sentinel, writable = fork_server.connect_to_new_process(self._fds)
        # The child watches the one end to learn of its parent's death (multiprocessing.parent_process()). The other
        # keeps the server alive until this process's exit code has been read: a server whose last client leaves
        # together with its last child ends without telling how that child did (exit code 255).
        ends = [inherited.keep_from_children(os.dup(fd)) for fd in (writable, fork_server._forkserver_alive_fd)]
        self.finalizer = util.Finalize(self, _close_all, (ends, self.sentinel))
        with open(writable, "wb") as pipe:
            pipe.write(data)


def _prepared(process: Any, popen: Any) -> bytes:
    """What a server's child reads first: where it is (``sys.path``, directory, arguments), then the process. What may
    be pickled only now duplicates its descriptors through ``popen``."""
    data = io.BytesIO()
    context.set_spawning_popen(popen)
    try:
        with _starting():
            reduction.dump(spawn.get_preparation_data(process._name), data)
        reduction.dump(process, data)
    finally:
        context.set_spawning_popen(None)
    return data.getvalue()


def _close_all(ends: list[int], sentinel: int) -> None:
    for fd in ends:
        inherited.close(fd)
    os.close(sentinel)


class _Process(context.Process):
    """In the rank it is multiprocessing's own class: nothing of the engine is imported there, and the processes that
    the rank starts itself (DataLoader workers) use the kernel's default start method."""

    def __reduce__(self) -> Any:
        return object.__new__, (context.Process,), self.__dict__


class ServedProcess(_Process):
    """Its sentinel tells the pid, then the exit code; asking for either costs 60 microseconds."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _ServerPopen(process_obj)


class _ForkServerContext(context.BaseContext):
    _name = FORKSERVER
    Process = ServedProcess


class _SpawnPopen(popen_spawn_posix.Popen):
    def _launch(self, process_obj: Any) -> None:
        with _starting():
            super()._launch(process_obj)  # type: ignore[misc]


class _SpawnedProcess(_Process):
    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _SpawnPopen(process_obj)


class _SpawnContext(context.BaseContext):
    _name = SPAWN
    Process = _SpawnedProcess


context._concrete_contexts[FORKSERVER] = _ForkServerContext()  # type: ignore[attr-defined]
context._concrete_contexts[SPAWN] = _SpawnContext()  # type: ignore[attr-defined]
