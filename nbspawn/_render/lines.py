"""One rank's log, from bytes to lines, as a terminal would have shown them.

A log holds what the rank wrote, progress bars included: tqdm draws with ``\\r`` and, where bars are nested, writes
``\\n\\r<inner bar>\\x1b[A``. ``LineBuffer`` is therefore a small screen without a height: rows, a cursor, and the
rule by which rows leave it.

- Rows leave at the end of a feed and only above the cursor, so that a bar that is redrawn a thousand times is one row.
- A feed may end in the middle of such a redraw, with the cursor still on the inner bar. So rows that are *animated*
  (rewritten after a ``\\r``, or gone back to with ``\\x1b[A``) wait until the cursor is further below them than it
  has ever come back from, or until an ordinary line was completed below them.
- A program that draws several rows at once (rich's progress and tables) hides the cursor meanwhile. Until it shows it
  again, the rows from the one that it began anew last wait, since it will go back to them again, and no others.
- What has not been gone back to from one ``settle`` to the next leaves: a bar that has ended need not wait for the next
  line below it.
- Animated rows that end up blank (a bar with ``leave=False``) are not lines.
"""

from __future__ import annotations

import codecs
import re
from functools import lru_cache
from itertools import groupby

# Characters in a line; a longer one is broken, so that a rank that never writes a newline needs no memory here.
_LINE_LIMIT = 64 * 1024
# Columns of the widest terminal: nothing moves the cursor beyond them.
_WIDEST = 1000
# Rows that the cursor can go back over.
_DEPTH_LIMIT = 64

_SEQUENCE = (  # what follows an ESC
    r"\[(?P<params>[0-?]{0,64})[ -/]*(?P<final>[@-~])"  # CSI: colours, cursor
    r"|\][^\x07\x1b\n]{0,4096}(?:\x07|\x1b\\)"  # OSC: titles, links
    r"|[ -/]*[0-~]?"  # everything else
)
# All but tab and newline. One class comes first: a search for that is three times as fast as one for alternatives.
_CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f](?:(?<=\x1b)(?:{_SEQUENCE}))?")
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]{0,64}[ -/]*|\][^\x07\x1b\n]{0,4096}\x1b?|[ -/]*)\Z")
_ANY_ESCAPE = re.compile(rf"\x1b(?:{_SEQUENCE})")


def strip_ansi(text: str) -> str:
    """The text without colours and other escape sequences."""
    return _ANY_ESCAPE.sub("", text) if "\x1b" in text else text


class LineBuffer:
    """Turns the bytes of one rank's log into lines, in pieces of any size: ``\\r``, ``\\b``, colours and all.

    Colours stay in the lines; a line that leaves one open is closed, and the next begins with it.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begin()

    def _begin(self) -> None:
        self._unfinished = ""  # an escape sequence whose end has not come yet
        # A completed row without colour is a plain string until the cursor comes back to it: a flood of lines makes
        # no objects but its lines.
        self._rows: list[_Row | str] = [_Row()]
        self._row = 0
        self._column = 0
        self._style = ""
        self._returned = False  # a \r came, and nothing was written since
        self._highest = 0  # the highest row that the cursor has been in since the last ``settle``
        self._depth = 1  # how many rows the cursor is known to come back over
        self._top: int | None = None  # while the cursor is hidden: the row that was begun anew last

    def feed(self, data: bytes) -> tuple[list[str], str]:
        """The lines that these bytes completed, and the line that the rank is writing now (both without newline)."""
        self._interpret(self._decoder.decode(data))
        if self._top is not None:
            return self._take(max(min(self._top, self._row), self._row - _DEPTH_LIMIT)), self._current()
        ready = max(0, self._row - self._depth)
        for index in range(self._row - 1, ready - 1, -1):
            row = self._rows[index]
            if isinstance(row, str) or not row.animated:
                ready = index + 1
                break
        return self._take(ready), self._current()

    @property
    def holds(self) -> bool:
        """Do rows wait that ``settle`` may let go?"""
        return self._row > 0 and self._top is None

    def settle(self) -> list[str]:
        """Called from time to time, when all that was written so far has been fed: the rows that the cursor has stayed
        below since the last call."""
        lines = self._take(min(self._highest, self._row)) if self.holds else []
        self._highest = self._row
        return lines

    def pause(self) -> list[str]:
        """The lines that are still buffered, as something else than text comes next; not a bar, which goes on."""
        row = self._rows[self._row]
        return [] if self._top is not None or (isinstance(row, _Row) and row.animated) else self.finish()

    def finish(self) -> list[str]:
        """The lines that are still buffered, the unfinished one included: the log, or a cell's part, has ended.

        What follows begins as an empty cell does, without a colour that was left open.
        """
        self._interpret(self._decoder.decode(b"", final=True))
        while len(self._rows) > self._row and not _text(self._rows[-1]).strip():
            self._rows.pop()
        lines = self._take(len(self._rows))
        self._begin()
        return lines

    def _take(self, count: int) -> list[str]:
        lines = [
            row if isinstance(row, str) else row.text()
            for row in self._rows[:count]
            if isinstance(row, str) or not row.animated or row.text()
        ]
        del self._rows[:count]
        self._row -= count
        self._highest = max(0, self._highest - count)
        if self._top is not None:
            self._top = max(0, self._top - count)
        return lines

    def _current(self) -> str:
        """The cursor's row, or, where that is blank, the nearest one that waits above or else below it."""
        for row in (*self._rows[self._row :: -1], *self._rows[self._row + 1 :]):
            text = _text(row)
            if text.strip():
                return text
        return ""

    def _interpret(self, text: str) -> None:
        if self._unfinished:
            text, self._unfinished = self._unfinished + text, ""
        if "\x1b" in text[-4200:] and (tail := _UNFINISHED.search(text, max(0, len(text) - 4200))):
            text, self._unfinished = text[: tail.start()], tail[0]
        position = 0
        for control in _CONTROL.finditer(text):
            if control.start() > position:
                self._write(text[position : control.start()])
            position = control.end()
            self._control(control)
        if position < len(text):
            self._write(text[position:])

    def _control(self, control: re.Match[str]) -> None:
        final = control["final"]
        if final is None:
            if control[0] == "\r":
                self._column, self._returned = 0, True
            elif control[0] == "\b":
                self._column = max(0, self._column - 1)
        elif control["params"] == "?25":
            self._top = self._row if final == "l" else None
        elif control["params"] >= "<":
            pass  # private sequences: the same letters mean something else
        elif final == "m":
            self._style = _restyle(self._style, control["params"])
        elif final == "K":
            self._cursor_row().erase(self._column, control["params"])
        elif final == "J" and control["params"] in ("", "0"):
            self._cursor_row().erase(self._column, "")
            del self._rows[self._row + 1 :]
        elif final == "G":
            self._column = min(_number(control["params"]) - 1, max(self._cursor_row().length, _WIDEST) - 1)
            if not self._cursor_row().ink:
                self._rows[self._row] = _Row()  # a bar has made way for an ordinary line: see _rank/program/stdio.py
        elif final == "A":
            self._up(_number(control["params"]))
        elif final == "B":
            self._row = min(self._row + _number(control["params"]), len(self._rows) - 1)

    def _up(self, count: int) -> None:
        count = min(count, _DEPTH_LIMIT)
        self._row = max(0, self._row - count)
        self._highest = min(self._highest, self._row)
        # Where rows have left already, the cursor is higher than it should be; the rows that follow are those that
        # will be gone back over, so they are marked even if they are not yet written.
        while len(self._rows) <= self._row + count:
            self._rows.append(_Row())
        for index in range(self._row, self._row + count):
            self._own(index).animated = True
        self._depth = min(max(self._depth, len(self._rows) - 1 - self._row), _DEPTH_LIMIT)

    def _write(self, text: str) -> None:
        """Put text without control characters, newlines excepted, at the cursor."""
        first, *rest = text.split("\n")
        self._put(first)
        if not rest:
            return
        if not self._style and self._row == len(self._rows) - 1 and max(map(len, rest)) <= _LINE_LIMIT:
            self._newline()
            self._rows[self._row :] = [*rest[:-1], _Row()]
            self._row = len(self._rows) - 1
            self._put(rest[-1])
            return
        for line in rest:
            self._newline()
            self._put(line)

    def _put(self, text: str) -> None:
        while text:
            if self._column == _LINE_LIMIT:
                self._newline()
            row = self._cursor_row()
            if self._returned:
                row.animated, self._returned = True, False
                if self._top is not None:
                    self._top = self._row
            elif self._column == 0 and row.length and not row.ink:
                # A cleared bar that an ordinary print comes upon: the row is that print's now.
                row = self._rows[self._row] = _Row()
            self._column = min(self._column, max(row.length, _WIDEST))  # an erased row may have been longer
            room = _LINE_LIMIT - self._column
            row.put(self._column, text[:room], self._style)
            self._column += min(len(text), room)
            text = text[room:]

    def _newline(self) -> None:
        row = self._rows[self._row]
        if isinstance(row, _Row) and not row.animated and not any(row.styles):
            self._rows[self._row] = row.text()
        self._row += 1
        self._column, self._returned = 0, False
        if self._row == len(self._rows):
            self._rows.append(_Row())

    def _cursor_row(self) -> _Row:
        return self._own(self._row)

    def _own(self, index: int) -> _Row:
        """The row at ``index`` in a form that can be written to."""
        row = self._rows[index]
        if isinstance(row, str):
            row = self._rows[index] = _Row(row)
        return row


class _Row:
    """A row that can be overwritten, cell by cell: a character, and its style, which is an SGR sequence or "".

    Whatever the sequences, each costs what it writes, or what was written: progress bars and spinners come back to a
    row thousands of times.
    """

    __slots__ = ("_blank", "animated", "chars", "ink", "styles")

    def __init__(self, text: str = "") -> None:
        self.chars = list(text)
        self.styles = [""] * len(text)
        self.ink = _ink(text)
        """How many characters are there to be seen."""
        self.animated = False
        self._blank = 0  # columns that were erased from the start on, and not written to since

    @property
    def length(self) -> int:
        return len(self.chars)

    def put(self, column: int, text: str, style: str) -> None:
        if column > self.length:
            self.styles += [""] * (column - self.length)
            self.chars += " " * (column - self.length)
        end = column + len(text)
        self.ink += _ink(text) - _ink("".join(self.chars[column:end]))
        self.chars[column:end] = text
        self.styles[column:end] = [style] * len(text)
        self._blank = min(self._blank, column)

    def erase(self, column: int, what: str) -> None:
        """``\\x1b[K``: to the end; ``\\x1b[1K``: to the start; ``\\x1b[2K``: all of the row."""
        if what == "1":
            if (end := min(column, self.length)) > self._blank:
                self.put(self._blank, " " * (end - self._blank), "")
                self._blank = end
            return
        start = 0 if what == "2" else column
        self.ink -= _ink("".join(self.chars[start:]))
        del self.chars[start:], self.styles[start:]
        self._blank = min(self._blank, start)

    def text(self) -> str:
        plain = "".join(self.chars)
        if self.animated:  # what a bar left of a longer predecessor is blanked out with spaces, which nobody meant
            plain = plain.rstrip(" ")
        if not any(self.styles):
            return plain
        parts: list[str] = []
        before, start = "", 0
        for style, cells in groupby(self.styles[: len(plain)]):
            if style != before:
                parts.append("\x1b[0m" + style if before else style)
                before = style
            end = start + sum(1 for _ in cells)
            parts.append(plain[start:end])
            start = end
        if before:
            parts.append("\x1b[0m")
        return "".join(parts)


def _ink(text: str) -> int:
    return sum(map(len, text.split()))


def _text(row: _Row | str) -> str:
    return row if isinstance(row, str) else row.text()


def _number(params: str) -> int:
    return max(1, int(params)) if params.isdecimal() else 1


# What each SGR code sets, and which of those a code ends (22 ends bold and faint, and so on).
_SETS = {
    **{code: str(code) for code in (*range(1, 10), 21)},
    **{code: "colour" for code in (*range(30, 39), *range(90, 98))},
    **{code: "background" for code in (*range(40, 49), *range(100, 108))},
}
_ENDS = {
    22: ("1", "2"),
    23: ("3",),
    24: ("4", "21"),
    25: ("5", "6"),
    27: ("7",),
    28: ("8",),
    29: ("9",),
    39: ("colour",),
    49: ("background",),
}


@lru_cache(maxsize=256)
def _restyle(style: str, params: str) -> str:
    """The style after one more SGR sequence: without what it undoes, so that it can't grow for ever."""
    attributes: dict[str, str] = {}
    codes = (f"{style[2:-1]};{params}" if style else params).replace(":", ";").split(";")
    while codes:
        text = codes.pop(0)
        code = int(text) if text.isdecimal() else 0 if not text else -1
        if code in (38, 48):  # ;5;index or ;2;red;green;blue
            length = 2 if codes[:1] == ["5"] else 4
            text, codes = ";".join([text, *codes[:length]]), codes[length:]
        if code == 0:
            attributes.clear()
        elif code in _SETS:
            attributes[_SETS[code]] = text
        for ended in _ENDS.get(code, ()):
            attributes.pop(ended, None)
    return f"\x1b[{';'.join(attributes.values())}m" if attributes else ""
