"""How one rank ended, and failed: the one model that the table, the engine and the errors read. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from nbspawn._protocol.messages import Exited, Leaving, Raised

ECHO = "lost the connection to a rank that had ended"
UNKNOWN = 255  # what multiprocessing reports of a process whose fork server is gone

_LIKELY = {
    "SIGKILL": " (the system does this when memory runs out: look at `dmesg`, or use fewer or smaller ranks)",
    "SIGSEGV": " (a crash in native code)",
    "SIGBUS": " (often a full /dev/shm)",
}


@dataclass(frozen=True)
class Ending:
    """A rank's end other than by returning. ``time`` is CLOCK_MONOTONIC seconds.

    If it raised, ``name`` and ``message`` are the exception's, ``traceback`` and ``rendered`` (coloured lines) show it,
    and ``line`` is the line of the running cell, 1-based. Otherwise ``name`` is '', ``code`` is as in
    ``Process.exitcode`` (None: nobody knows it), and ``text`` is what the rank gave to ``sys.exit``, what a library
    said before it aborted, or why the code is unknown. Of a rank that a signal ended ``traceback`` and ``line`` are
    those of its Python stack, where there is one.
    """

    rank: int
    time: float
    name: str = ""
    message: str = ""
    traceback: str = ""
    rendered: tuple[str, ...] = ()
    line: int | None = None
    by_quit: bool = False
    """Did the user quit the rank's debugger?"""
    lost_peer: bool = False
    """Was it raised in a collective, and says that the other side does not answer?"""
    culprit: str = ""
    """The variable that could not be loaded."""
    code: int | None = None
    text: str = ""
    missing: tuple[str, ...] = ()
    """The names that the cell uses and the rank does not have, if it was a NameError."""

    @staticmethod
    def of(event: Raised | Leaving | Exited) -> Ending:
        """What the event says of the rank's end."""
        match event:
            case Raised():
                return Ending(
                    event.rank,
                    event.time,
                    event.name,
                    event.message,
                    event.traceback,
                    event.rendered,
                    event.line,
                    event.by_quit,
                    event.lost_peer,
                    event.culprit,
                    missing=event.missing,
                )
            case Leaving():
                return Ending(event.rank, event.time, line=event.line, code=event.code, text=event.text)
            case Exited():
                return Ending(event.rank, event.time, line=event.line, code=event.code, text=event.text)

    @property
    def raised(self) -> bool:
        """Did an exception end it?"""
        return bool(self.name)

    def requested(self, interrupted: bool) -> bool:
        """Did the user ask for this end: by the debugger's ``quit``, or, if the rank was ``interrupted``, by Stop?"""
        return self.by_quit or (interrupted and self.name == "KeyboardInterrupt")

    @property
    def detail(self) -> str:
        """The end in the words of the table of ranks: 'KeyError: 'hieght' (line 8)', 'exit code 7: no data',
        'SIGSEGV'."""
        if self.by_quit:
            return with_line("quit in the debugger", self.line)
        if self.raised:
            error = f"{self.name}: {self.message}" if self.message else self.name
            return with_line(error, self.line)
        if self.code == 0:
            return "exit code 0 before it had finished"
        code = exit_code(self.code)
        return with_line(f"{code}: {self.text}" if self.text else code, self.line)

    @property
    def echo(self) -> str:
        """What to say instead once a peer is known to have ended; '' if it has lost none."""
        return with_line(ECHO, self.line) if self.lost_peer else ""

    @property
    def what(self) -> str:
        """The end in the words of an error, in one line: 'KeyError: 'hieght'', 'process 3 terminated with signal
        SIGSEGV (…)'."""
        if self.raised:
            message = headline(self.message)
            return f"{self.name}: {message}" if message else self.name
        if self.code is None:
            return f"process {self.rank} exited, exit code unknown: {self.text}"
        return process_end(self.rank, self.code, self.text)


@dataclass(frozen=True)
class Failure(Ending):
    """The ending of a rank that failed by itself, and what its engine knows of it."""

    pid: int = 0
    log_path: str = ""
    node: int = 0
    """The machine that the rank was on, 0 for the first."""
    host: str = ""
    """Its name, if there are several."""
    node_lost: str = ""
    """Why the connection to it has ended, if that is how the rank failed."""
    time_error: float = 0.0
    """``time`` is right to so many seconds: the clocks of other machines are known through messages only."""
    is_echo: bool = False
    """Has it lost a peer that is known to have ended? Then that is why it failed."""

    @property
    def exitcode(self) -> int | None:
        """As in ``Process.exitcode``; None if the rank raised."""
        return None if self.raised else UNKNOWN if self.code is None else self.code

    @property
    def what(self) -> str:
        """One line: 'KeyError: 'hieght'' or 'process 3 terminated with signal SIGSEGV (…)'."""
        return f"its node {self.host} was lost ({self.node_lost})" if self.node_lost else super().what

    @property
    def summary(self) -> str:
        """``what``, and the cell's line where there is one."""
        return with_line(ECHO if self.is_echo else self.what, self.line)


def with_line(text: str, line: int | None) -> str:
    """'KeyError: 'hieght' (line 8)'; without a line, the text alone."""
    return text if line is None else f"{text} (line {line})"


def exit_code(code: int | None) -> str:
    """'exit code 7', 'SIGSEGV', or, since not every real-time signal has a name, 'signal 50'."""
    if code is None:
        return "ended, exit code unknown"
    if code >= 0:
        return f"exit code {code}"
    return _known_signal(code) or f"signal {-code}"


def signal_name(exitcode: int) -> str:
    """'SIGSEGV' for -11; for a signal without a name, torch's '<Unknown signal 50>'."""
    return _known_signal(exitcode) or f"<Unknown signal {-exitcode}>"


def process_end(rank: int, exitcode: int, text: str = "") -> str:
    """torch's wording for a process that ended without raising, and what is likely behind it; ``text`` is what the
    rank gave to ``sys.exit``, or a library said before it aborted."""
    if exitcode < 0:
        name = signal_name(exitcode)
        return f"process {rank} terminated with signal {name}" + (f": {text}" if text else _LIKELY.get(name, ""))
    if exitcode == 0:
        return f"process {rank} terminated with exit code 0 before it had finished (os._exit, or its main thread died)"
    return f"process {rank} terminated with exit code {exitcode}" + (f": {text}" if text else "")


def headline(message: str) -> str:
    """The first line of an exception's text, with the next one where the sentence goes on there; of an error that torch
    has carried over from another process (a DataLoader's worker) also what it was."""
    lines = message.strip().splitlines() or [""]
    first = lines[0].rstrip()
    if lines[1:] and (lines[0].endswith(" ") or first.endswith((":", ","))):
        first = f"{first} {lines[1].strip()}"
    return f"{first.rstrip('.')}: {lines[-1].strip()}" if "\nOriginal Traceback" in message else first


def _known_signal(exitcode: int) -> str:
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return ""
