"""How one rank ended, made from its event: the one model that the state's table and the errors read. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nbspawn._protocol.failure import ECHO, with_line
from nbspawn._protocol.messages import Exited, Leaving, Raised
from nbspawn._state import wording


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
        code = wording.exit_code(self.code)
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
            message = wording.headline(self.message)
            return f"{self.name}: {message}" if message else self.name
        if self.code is None:
            return f"process {self.rank} exited, exit code unknown: {self.text}"
        return wording.process_end(self.rank, self.code, self.text)
