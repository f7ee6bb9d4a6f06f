"""Carries an agent's connections over the standard input and output of a command, such as ssh: no port, no forwarding,
which servers may forbid; and they end with the command.

``near`` runs in a process beside the kernel, for all hosts of a run: were it in the kernel, a cell that computes would
look like a link that is cut. ``far`` runs on a host, where this file is sent as text. So it imports the standard
library alone, and works with any Python that agents can have.

What goes over the pipe are frames: of which connection, and how many of its bytes follow. No connection waits for
another one, since each has a window. Both ends say now and then that they live.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import platform
import random
import select
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from typing import Any

MAGIC = b"\0nbspawn relay\n"
"""What ``far`` says first: a login may print something before."""
_SIZE = struct.Struct("!I")
_HEAD = struct.Struct("!cBI")
"""What, of which connection, and a number of bytes: that follow (DATA), or that its socket has taken (TAKEN)."""
_DATA, _TAKEN, _ALIVE = b"D", b"T", b"A"
_WINDOW = 4 << 20  # bytes of a connection that may be on their way
_PIECE = 1 << 18
_AHEAD = 1 << 19  # bytes that wait for the pipe
_CHOICE_SECONDS = 0.2
_SAY_SECONDS = 2.0
_NEAR_SECONDS = 10.0  # of silence, after which the kernel is told that the host is lost
_END_SECONDS = 1.0  # for what ends to end by itself
_FAR_SECONDS = 90.0  # the same for the host: a laptop may sleep for a minute


class Ended(Exception):
    """A relay is over, and why; '' if one of its sockets has ended."""


class _Connection:
    """One end of it: a socket, whose bytes go to the pipe."""

    def __init__(self, number: int, end: socket.socket) -> None:
        end.setblocking(False)
        self.number = number
        self.end = end
        self.on_their_way = 0
        """Bytes that were sent, and that the other side's socket has not taken."""
        self.waiting = bytearray()
        """What the socket has not taken yet."""
        self.taken = 0
        """Bytes that it has taken, and the other side has not been told."""
        self.window = _WINDOW // 4
        self.arrived = 0
        """Bytes that the other side's socket has taken since the window was chosen."""
        self.events = 0

    def choose_window(self, seconds: float) -> None:
        """As much as arrives in a second, at the speed of these last ones. So on a slow line little is ahead of what
        comes next, such as Stop; and as long as the line is not full, each choice allows for more."""
        self.window = int(min(_WINDOW, max(_WINDOW / 16, self.arrived / seconds)))
        self.arrived = 0


class Relay:
    """Between the sockets ``ends`` and a pipe: ``source`` and ``sink`` are its descriptors. It ends with any of them,
    when the other side has been silent for so many ``seconds``, or when the descriptor ``watched`` is ready."""

    def __init__(self, source: int, sink: int, ends: list[socket.socket], seconds: float, watched: int) -> None:
        self._source, self._sink, self._seconds = source, sink, seconds
        self._selector = selectors.DefaultSelector()
        self._connections = [_Connection(number, end) for number, end in enumerate(ends)]
        self._unsent: collections.deque[memoryview] = collections.deque()
        self._unsent_bytes = 0
        self._sink_is_watched = False
        self._head = bytearray()
        self._of, self._left = 0, 0
        """Of which connection the next bytes are, and how many."""
        for fd in (source, sink):
            os.set_blocking(fd, False)
            try:
                fcntl.fcntl(fd, getattr(fcntl, "F_SETPIPE_SZ", 1031), 1 << 20)
            except OSError:
                continue  # it is no pipe, or not Linux's
        self._selector.register(source, selectors.EVENT_READ, self._read)
        self._selector.register(watched, selectors.EVENT_READ, _told)

    def run(self, came: bytes = b"") -> None:
        """Relay, beginning with what was read from the pipe already. Raises Ended."""
        try:
            self._feed(came)
            self._relay()
        finally:
            self._deliver_the_rest()
            self._selector.close()

    def _relay(self) -> None:
        heard = said = looked = chosen = time.monotonic()
        while True:
            self._watch()
            ready = self._selector.select(_SAY_SECONDS / 4)
            now = time.monotonic()
            if now - looked > 2 * _SAY_SECONDS:  # this process was stopped, or the machine slept
                heard = now
            looked = now
            for key, mask in ready:
                if key.data == self._read:
                    heard = now
                if isinstance(key.data, _Connection):
                    self._socket_is_ready(key.data, mask)
                else:
                    key.data()
            if now - chosen > _CHOICE_SECONDS:
                for connection in self._connections:
                    connection.choose_window(now - chosen)
                chosen = now
            if now - said > _SAY_SECONDS:
                said = now
                self._put(_ALIVE, 0, 0)
            if now - heard > self._seconds:
                raise Ended(f"nothing was heard from the other side for {self._seconds:g} s")
            if self._unsent:
                self._write()

    def _deliver_the_rest(self) -> None:
        """The last words of an agent, or to it; as far as somebody takes them."""
        end = time.monotonic() + _END_SECONDS
        left: list[Any] = [None]
        while left and time.monotonic() < end:
            with contextlib.suppress(Ended):
                self._write()
            left = [self._sink] if self._unsent else []
            for connection in self._connections:
                with contextlib.suppress(Ended):
                    self._flush(connection)
                left += [connection.end] if connection.waiting else []
            select.select([], left, [], 0.1)

    # ------------------------------------------------------------ the pipe

    def _read(self) -> None:
        try:
            data = os.read(self._source, 1 << 20)
        except BlockingIOError:
            return
        if not data:
            raise Ended("the connection has ended")
        self._feed(data)

    def _feed(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._left:
                part, view = view[: self._left], view[self._left :]
                self._left -= len(part)
                self._connections[self._of].waiting += part
                self._flush(self._connections[self._of])
                continue
            missing = _HEAD.size - len(self._head)
            self._head += view[:missing]
            view = view[missing:]
            if len(self._head) < _HEAD.size:
                return
            what, number, size = _HEAD.unpack(self._head)
            self._head.clear()
            if what == _DATA:
                self._of, self._left = number, size
            elif what == _TAKEN:
                self._connections[number].on_their_way -= size
                self._connections[number].arrived += size

    def _put(self, what: bytes, number: int, size: int, data: bytes = b"") -> None:
        for part in (_HEAD.pack(what, number, size), data):
            if part:
                self._unsent.append(memoryview(part))
                self._unsent_bytes += len(part)

    def _write(self) -> None:
        try:
            while self._unsent:
                written = os.writev(self._sink, [self._unsent[place] for place in range(min(16, len(self._unsent)))])
                self._unsent_bytes -= written
                while written:
                    first = self._unsent.popleft()
                    if len(first) > written:
                        self._unsent.appendleft(first[written:])
                    written -= min(written, len(first))
        except BlockingIOError:
            return
        except OSError as error:
            self._unsent.clear()
            raise Ended(f"the connection has ended ({error.strerror})") from None

    # ------------------------------------------------------------ sockets

    def _watch(self) -> None:
        """Watch what there is room for."""
        if bool(self._unsent) != self._sink_is_watched:
            self._sink_is_watched = bool(self._unsent)
            if self._sink_is_watched:
                self._selector.register(self._sink, selectors.EVENT_WRITE, self._write)
            else:
                self._selector.unregister(self._sink)
        for connection in self._connections:
            events = selectors.EVENT_WRITE if connection.waiting else 0
            if self._unsent_bytes < _AHEAD and connection.on_their_way < connection.window:
                events |= selectors.EVENT_READ
            if events != connection.events:
                if not connection.events:
                    self._selector.register(connection.end, events, connection)
                elif events:
                    self._selector.modify(connection.end, events, connection)
                else:
                    self._selector.unregister(connection.end)
                connection.events = events

    def _socket_is_ready(self, connection: _Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if mask & selectors.EVENT_READ:
            try:
                data = connection.end.recv(_PIECE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                raise Ended
            connection.on_their_way += len(data)
            self._put(_DATA, connection.number, len(data), data)

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.waiting:
                with memoryview(connection.waiting) as view:
                    count = connection.end.send(view[: 4 * _PIECE])
                del connection.waiting[:count]
                connection.taken += count
        except BlockingIOError:
            pass
        except OSError:
            connection.waiting.clear()
            raise Ended from None
        if connection.taken >= _WINDOW // 64:
            self._put(_TAKEN, connection.number, connection.taken)
            connection.taken = 0


def _told() -> None:
    raise Ended


# -------------------------------------------------------------------------------- on a host


def far() -> None:
    """Start the agent, and relay. The standard input gives the task (JSON, after its size), the archive of nbspawn, and
    then frames; the standard output takes frames. What the agent prints goes to the standard error."""
    task = _read_task()
    archive = _read_exactly(0, task["archive"])
    source, sink = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    mine = ".".join(platform.python_version_tuple()[:2])
    if mine != task["python"]:
        sys.exit(f"nbspawn: {sys.executable} is Python {mine}, and the kernel's is {task['python']}")
    with contextlib.ExitStack() as made:
        try:
            folder = tempfile.mkdtemp(prefix="nbspawn-code-")
            made.callback(_remove, folder)
            made.callback(os.close, _sign(folder))
            _unpack(archive, folder)
        except OSError as error:
            sys.exit(f"nbspawn: nbspawn cannot be written to {tempfile.gettempdir()}: {error.strerror}")
        _run_agent(task, folder, source, sink)


def _run_agent(task: dict[str, Any], folder: str, source: int, sink: int) -> None:
    """Start the agent, and relay until one of both ends."""
    pairs = [socket.socketpair() for _ in range(task["connections"])]
    fds = [its.fileno() for _, its in pairs]
    alive, over = os.pipe()
    agent = subprocess.Popen(
        [sys.executable, "-m", "nbspawn._agent", "connected", ",".join(map(str, fds)), str(task["node"])],
        stdin=subprocess.PIPE,
        env=_environment(task, folder),
        cwd=folder,
        pass_fds=fds,
    )
    for _, its in pairs:
        its.close()
    threading.Thread(target=_wait, args=(agent, over), daemon=True).start()
    try:
        os.write(sink, MAGIC)
        Relay(source, sink, [ours for ours, _ in pairs], _FAR_SECONDS, alive).run()
    except Ended as why:
        said = str(why)
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = agent.wait(0 if said else _END_SECONDS)
            said = "the agent has ended with " + (f"exit code {code}" if code >= 0 else f"signal {-code}")
        if said:
            print(f"nbspawn: {said}", file=sys.stderr, flush=True)
    finally:
        _end(agent)


def _unpack(archive: bytes, folder: str) -> None:
    """Write nbspawn's files: JSON, compressed, of their texts by path."""
    for path, text in json.loads(zlib.decompress(archive)).items():
        file = os.path.join(folder, *path.split("/"))
        os.makedirs(os.path.dirname(file), exist_ok=True)
        with open(file, "w", encoding="utf-8") as written:
            written.write(text)


def _wait(agent: subprocess.Popen[bytes], over: int) -> None:
    agent.wait()
    os.close(over)


def _sign(folder: str) -> int:
    """Sign and lock the directory as _engine/kernel/directories.py does: whoever finds it without its owner removes
    it."""
    fd = os.open(os.path.join(folder, "owner"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, f"made by nbspawn, inode {os.stat(folder).st_ino}\n".encode())
    return fd


def _remove(folder: str) -> None:
    """Remove it with everything in it. A child of an agent that was killed may still be importing: that writes compiled
    files into it."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        time.sleep(0.1)


def _environment(task: dict[str, Any], folder: str) -> dict[str, str]:
    """The login's, with nbspawn's folder, and the interpreter's own programs first."""
    env = dict(os.environ)
    known = env.get("SSH_CONNECTION", "").split()
    if task["several"] and len(known) == 4:
        env["NBSPAWN_NODE_ADDRESS"] = known[2]
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, env.get("PYTHONPATH", "")]))
    return env


def _end(agent: subprocess.Popen[bytes]) -> None:
    """It ends its ranks when its standard input ends."""
    assert agent.stdin is not None
    agent.stdin.close()
    try:
        agent.wait(10)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


def packed(task: Any) -> bytes:
    """A task as ``near`` and ``far`` read it."""
    body = json.dumps(task).encode()
    return _SIZE.pack(len(body)) + body


def _read_task() -> Any:
    (size,) = _SIZE.unpack(_read_exactly(0, _SIZE.size))
    return json.loads(_read_exactly(0, size))


def _read_exactly(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, size - len(data))
        if not part:
            raise SystemExit("nbspawn: the kernel's side has ended")
        data += part
    return bytes(data)


# -------------------------------------------------------------------------------- beside the kernel

_BUSY = (b"kex_exchange_identification", b"Connection reset by", b"Connection closed by", b"MaxStartups")
"""What ssh says of a server that refuses some of many connections at once. A refused key is not tried again."""
_TRIES = 5
_WORDS = 20_000  # bytes of what ssh and the agent say that are kept


def near() -> None:
    """Run the hosts' commands, and relay, until the standard input ends. It gives the hosts (JSON, after its size), and
    the archive. The standard output has a line of JSON about each host that is over."""
    hosts = _read_task()
    archive = _read_exactly(0, hosts[0]["task"]["archive"])
    with open(__file__, "rb") as file:
        text = file.read() + b"\nfar()\n"
    told, over = os.pipe()
    threads = []
    for node, host in enumerate(hosts):
        ends = [socket.socket(fileno=fd) for fd in host["fds"]]
        threads.append(threading.Thread(target=_run_host, args=(node, host, text, archive, ends, told)))
        threads[-1].start()
    while os.read(0, 4096):
        pass
    os.close(over)
    for thread in threads:
        thread.join()


def _run_host(
    node: int, host: dict[str, Any], text: bytes, archive: bytes, ends: list[socket.socket], told: int
) -> None:
    """Run the host's command, and relay. Then its sockets are closed."""
    begin = b"%08d" % len(text) + text + packed(host["task"]) + archive
    words, before, why, code, connected = bytearray(), b"", "", 0, False
    try:
        for attempt in range(_TRIES):
            words.clear()
            command = subprocess.Popen(
                host["command"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )
            assert command.stdin is not None and command.stdout is not None
            beside = [
                threading.Thread(target=_listen, args=(command.stderr, words)),
                threading.Thread(target=_send, args=(command.stdin.fileno(), begin)),
            ]
            for thread in beside:
                thread.start()
            came, before = _until_magic(command.stdout.fileno(), told)
            if came is not None:
                connected = True
                try:
                    Relay(command.stdout.fileno(), command.stdin.fileno(), ends, _NEAR_SECONDS, told).run(came)
                except Ended as ended:
                    why = str(ended)
                command.stdin.close()  # all of what _send had was read
            code = _ended(command)
            for thread in beside:
                thread.join()
            command.stdin.close()
            command.stdout.close()
            if came is not None or code != 255 or not any(word in words for word in _BUSY):
                break
            if select.select([told], [], [], (attempt + 1) * random.uniform(0.3, 1.3))[0]:
                break
    except OSError as error:
        why = f"{host['command'][0]}: {error.strerror}"
    said = (before[-_WORDS:] + words).decode(errors="replace")
    line = {"node": node, "connected": connected, "code": code, "why": why, "said": said}
    with contextlib.suppress(OSError):  # the kernel has gone
        os.write(1, json.dumps(line).encode() + b"\n")
    for end in ends:
        end.close()


def _listen(stderr: Any, words: bytearray) -> None:
    while part := stderr.read(4096):
        words += part
        del words[:-_WORDS]


def _send(stdin: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(stdin, view) :]
    except OSError:  # the command has ended, and says why
        return


def _until_magic(stdout: int, told: int) -> tuple[bytes | None, bytes]:
    """What comes after the mark (None if it does not come), and, without it, what came."""
    seen = bytearray()
    while told not in select.select([stdout, told], [], [])[0]:
        part = os.read(stdout, 1 << 16)
        seen += part
        _, mark, after = seen.partition(MAGIC)
        if mark:
            return bytes(after), b""
        if not part:
            break
    return None, bytes(seen)


def _ended(command: subprocess.Popen[bytes]) -> int:
    """End the command, if it has not ended by itself; returns its exit code."""
    try:
        return command.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        command.terminate()
        return command.wait()


if __name__ == "__main__" and sys.argv[1:] == ["near"]:
    near()
