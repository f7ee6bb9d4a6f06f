"""A run as a plain text table: for terminals, logs, and as the text/plain side of the saved output.

``rows``, ``heading`` and ``duration`` are shared with ``html``, so that both show the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nbspawn._accelerators.accelerator import Load
from nbspawn._render.lines import strip_ansi
from nbspawn._state import history
from nbspawn._state.run import FINAL, RankStatus, Run, State
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.stall import stall
from nbspawn._state.whereabouts import silent
from nbspawn._state.wording import few_ranges, name_ranks

# More ranks than this share rows; and no table has more rows.
MAX_ROWS = 16
# Columns of rank numbers: the first of a list, and how many they are.
LABEL_WIDTH = 14

# In the order in which they matter when there are too many rows. A mark besides the word: rows are found by shape.
MARKS: dict[State, str] = {
    "failed": "✗",
    "waiting for input": "?",
    "debugging": "◆",
    "paused": "◆",
    "waiting": "◍",
    "running": "●",
    "starting": "○",
    "stopping": "◌",
    "killed": "■",
    "interrupted": "■",
    "done": "✓",
    "idle": "·",
}
_ORDER = list(MARKS)
_COLOURS: dict[State, str] = {
    "failed": "\x1b[31m",
    "waiting for input": "\x1b[33m",
    "debugging": "\x1b[33m",
    "paused": "\x1b[33m",
    "waiting": "\x1b[36m",
    "running": "\x1b[34m",
    "done": "\x1b[32m",
}
NODE_WIDTH = 16
TREND = ""
GPU = "GPU"
"""The heading of the memory's course, which stands right of the memory: none."""
_TREND_FROM = 100  # columns: a narrower table has no room for it
_BOTH_FROM = 140  # the same, beside GPUs
_LEFT = frozenset({"node", "state", "at", TREND})  # columns: the others are aligned on the right
_BLOCKS = "▁▂▃▄▅▆▇█"
_LEAST_RANGE = 0.1  # of the most, that a sparkline shows: noise is not to look like a leak
# Characters of a line's start beyond which a call would be cut off in a narrow window.
_CALL_WITHIN = 16

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# tqdm's, drawn with blocks or, where there are none, with digits and #; and rich's, a heavy line.
_BAR = re.compile(r"(?<=%)\|[ \d#\u2588-\u258f]*\||(?<![^ ])[\u2501\u2578\u257a]{4,} +")


@dataclass(frozen=True)
class Row:
    """A row of the table: a rank, or several that are in the same state. ``seconds`` is the time since the start of the
    run."""

    ranks: tuple[RankStatus, ...]
    state: State
    seconds: float
    text: str
    at: str = ""
    """The line that it is on, with its text, and the library call below it if the text does not name it."""
    state_text: str = ""
    """The state in words: 'running', 'waiting 4.5 s' (for other ranks), 'waiting for its GPU 4.5 s', 'silent 9.0 s' (no
    sign of life)."""
    host: str = ""
    """The name of the machine that this row and those below are on; '' if that is the one of the row above."""
    node: str = ""
    """Of a row with several ranks on several machines: the name of their machine, or '12 nodes'."""

    @property
    def cpu(self) -> str:
        """The processor time, on average over the ranks: '99 %' of one processor."""
        known = [rank.cpu for rank in self.ranks if rank.cpu is not None]
        return f"{sum(known) / len(known):.0%}".replace("%", " %") if known else ""

    @property
    def memory(self) -> str:
        """Resident, the most of any of the ranks: '412 MB'."""
        return size(max((rank.memory or 0 for rank in self.ranks), default=0))

    @property
    def peak(self) -> str:
        """The most memory at once in the whole run."""
        return size(max((rank.peak_memory or 0 for rank in self.ranks), default=0))

    @property
    def trend(self) -> str:
        """The course of the resident memory, of the rank that has most, as wide as it ever is: '▁▂▄▇    '."""
        most = max(self.ranks, key=lambda rank: rank.memory or 0)
        return sparkline(most.memory_history).ljust(history.POINTS) if most.memory else ""

    @property
    def device_memory(self) -> str:
        """What torch has allocated on the device, the most of any of the ranks."""
        return size(max((rank.device_memory for rank in self.ranks), default=0))

    @property
    def device_peak(self) -> str:
        """The most device memory at once in the whole run."""
        return size(max((rank.peak_device_memory for rank in self.ranks), default=0))

    @property
    def gpu(self) -> str:
        """Which GPU a rank has, how busy that is, and how full: '1, 97 %, 3.1/80 GB'. Of several ranks, on
        average, and of the fullest."""
        return load([rank.load for rank in self.ranks])

    @property
    def label(self) -> str:
        """Their numbers: '0-3', '8,10,… (24)'."""
        return few_ranges((rank.rank for rank in self.ranks), LABEL_WIDTH)


def rows(snapshot: Snapshot) -> list[Row]:
    """A row per rank; of more than ``MAX_ROWS`` ranks, what failed first, and what ended alike, or is at the same line,
    in one row.

    A rank's time stops when its state is final. Ranks that run are not compared by what they print: rows would come
    and go at every look.
    """
    run = snapshot.run
    if len(run.ranks) <= MAX_ROWS:
        found = [_row(snapshot, [rank], _summary(rank)) for rank in run.ranks]
        return [replace(row, host=host) for row, host in zip(found, _first_of_each(run), strict=True)]
    alike: dict[tuple[State, str], list[RankStatus]] = {}
    for rank in sorted(run.ranks, key=_importance):
        same = _summary(rank) if rank.state in FINAL else _at(snapshot, rank) or f"{rank.rank}"
        alike.setdefault((rank.state, "" if rank.state == "starting" else same), []).append(rank)
    groups = [(_summary(ranks[0]), ranks) for ranks in alike.values()]
    if len(groups) > MAX_ROWS:
        # Of what does not fit, one row per state.
        room = MAX_ROWS - len(run.counts)
        rest: dict[State, list[RankStatus]] = {}
        for _, ranks in groups[room:]:
            rest.setdefault(ranks[0].state, []).extend(ranks)
        groups = groups[:room] + [(f"({len(ranks)} more)", ranks) for ranks in rest.values()]
    return [replace(_row(snapshot, ranks, text), node=_node(run, ranks)) for text, ranks in groups]


def _node(run: Run, ranks: Sequence[RankStatus]) -> str:
    hosts = {run.host(rank.rank) for rank in ranks}
    return f"{len(hosts)} nodes" if len(hosts) > 1 else hosts.pop()


def _first_of_each(run: Run) -> list[str]:
    """The name of each host where its ranks begin, '' elsewhere."""
    hosts = run.hosts or ("",) * len(run.ranks)
    return [host if index == 0 or host != hosts[index - 1] else "" for index, host in enumerate(hosts)]


def heading(snapshot: Snapshot) -> tuple[str, str, str]:
    """What stands above the table: how many ranks, how they were started and why, and the time so far."""
    run = snapshot.run
    how = f"{run.method}: {run.why.rstrip('.')}" if run.why else run.method
    asked = [rank.rank for rank in run.ranks if rank.state != "idle"]
    some = f"{name_ranks(asked)} of {len(run.ranks)}" if 0 < len(asked) < len(run.ranks) else ""
    return (
        some or _ranks(len(run.ranks)),
        how,
        duration((snapshot.now if run.ended is None else run.ended) - run.started),
    )


def brief(snapshot: Snapshot) -> str:
    """The heading as the whole table."""
    ranks, how, time = heading(snapshot)
    return "\n".join([*filter(None, [snapshot.run.banner]), f"{ranks} · {how} · {time}"])


def table(snapshot: Snapshot, width: int = 100, color: bool = False, drawn: Sequence[Row] | None = None) -> str:
    """The run as lines of at most ``width`` columns (notes excepted: they are sentences). ``drawn`` are its rows, where
    they are known already."""
    run = snapshot.run
    ranks, how, time = heading(snapshot)
    lines = [*filter(None, [run.banner]), f"{ranks} · {clip(how, width - len(ranks) - len(time) - 6)} · {time}"]
    drawn = rows(snapshot) if drawn is None else drawn
    columns = {
        "rank": [row.label for row in drawn],
        **({"node": [clip(row.node, NODE_WIDTH) for row in drawn]} if any(row.node for row in drawn) else {}),
        "state": [f"{MARKS[row.state]} {row.state_text}" for row in drawn],
        **numbers(run, drawn),
    }
    if width < _TREND_FROM:
        columns.pop(TREND, None)
        columns.pop(GPU, None)
    elif GPU in columns and width < _BOTH_FROM:
        columns.pop(TREND, None)
    widths = {name: max(len(name), *map(len, column)) for name, column in columns.items()}
    room = width - sum(widths.values()) - 2 * len(widths)
    order = list(columns)
    if not run.over:
        wanted = max(2, *(sum(map(_columns, row.at)) for row in drawn))
        widths["at"] = min(wanted, max(room // 2, room - 2 - max(len(row.text) for row in drawn), 10))
        columns["at"] = [clip(row.at, widths["at"]) for row in drawn]
        room -= widths["at"] + 2
        order.insert(order.index("state") + 1, "at")
    for index in range(-1, len(drawn)):
        parts = []
        for name in order:
            content = name if index < 0 else columns[name][index]
            blank = " " * (widths[name] - sum(map(_columns, content)))
            parts.append(content + blank if name in _LEFT else blank + content)
        if color:
            paint, state = "\x1b[2m" if index < 0 else _COLOURS.get(drawn[index].state, ""), order.index("state")
            parts[state] = f"{paint}{parts[state]}\x1b[0m" if paint else parts[state]
        parts.append(clip("last line, result or error" if index < 0 else drawn[index].text, max(room, 1)))
        if index >= 0 and drawn[index].host:
            lines.append(clip(drawn[index].host, width))
        lines.append("  ".join(parts).rstrip())
    return "\n".join([*lines, *filter(None, [stall(snapshot), ports(run)]), *run.notes])


def ports(run: Run) -> str:
    """Where a debugger can attach; '' if nowhere, or no more."""
    open_ = [f"rank {rank.rank} at {rank.debug_port}" for rank in run.ranks if rank.debug_port and rank.ended is None]
    return f"debugpy listens on 127.0.0.1: {', '.join(open_)}." if open_ else ""


def numbers(run: Run, drawn: Sequence[Row]) -> dict[str, list[str]]:
    """The columns of numbers that at least one row has: while ranks run, what they use; then, how long each took, and
    the most that it used."""
    if run.over:
        columns = {
            "time": [duration(row.seconds) for row in drawn],
            "peak": [row.peak for row in drawn],
            "device peak": [row.device_peak for row in drawn],
        }
    else:
        columns = {
            "cpu": [row.cpu for row in drawn],
            "memory": [row.memory for row in drawn],
            TREND: [row.trend for row in drawn],
            "device": [row.device_memory for row in drawn],
            GPU: [row.gpu for row in drawn],
        }
        if all(len(set(trend.strip())) <= 1 for trend in columns[TREND]):
            del columns[TREND]  # flat
    return {name: column for name, column in columns.items() if any(column)}


def duration(seconds: float) -> str:
    """``seconds``, in readable units: 31 ms, 12.4 s, 2 min 05 s, 1 h 02 min."""
    seconds = max(0.0, seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def size(count: int) -> str:
    """Bytes in readable units: 412 MB, 1.3 GB; '' for none."""
    if count <= 0:
        return ""
    return f"{count / 1e9:.1f} GB" if count >= 0.9995e9 else f"{count / 1e6:.0f} MB"


def load(devices: Iterable[Load]) -> str:
    """'1, 97 %, 3.1/80 GB': the number of a device, or of several, how busy they are, and how full the fullest
    is; '' of none."""
    known = [one for one in devices if one.number >= 0]
    if not known:
        return ""
    parts = [few_ranges(sorted({one.number for one in known}), LABEL_WIDTH)]
    if busy := [one.busy for one in known if one.busy >= 0]:
        parts.append(f"{sum(busy) / len(busy):.0f} %")
    fullest = max(known, key=lambda one: one.used)
    if fullest.used >= 0:
        parts.append(f"{fullest.used / 1e9:.1f}/{fullest.total / 1e9:.0f} GB")
    return ", ".join(parts)


def sparkline(points: Sequence[int]) -> str:
    """A block for each point, the lowest for the least: '▁▂▄▇'; '' of fewer than three."""
    if len(points) < 3:
        return ""
    least, most = min(points), max(points)
    step = max(most - least, most * _LEAST_RANGE, 1) / (len(_BLOCKS) - 1)
    return "".join(_BLOCKS[round((point - least) / step)] for point in points)


def cell(text: str) -> str:
    """Text that may stand in a table: on one line, without escape sequences and control characters."""
    return _CONTROL.sub(" ", strip_ansi(text)).strip()


def clip(text: str, width: int) -> str:
    """The text, cut with … where it is wider than ``width`` columns of a fixed-width font."""
    if text.isascii() and len(text) <= width:
        return text
    used, end = 0, -1
    for index, character in enumerate(text):
        used += _columns(character)
        if end < 0 and used > width - 1:
            end = index
        if used > width:
            return text[:end].rstrip() + "…"
    return text


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) == "Cf":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _summary(rank: RankStatus) -> str:
    """What matters most of a rank: why it failed, what it returned, or what it wrote last."""
    if rank.state == "done" and not rank.detail:
        return _last_line(rank) if rank.result in ("", "None") else cell(rank.result)
    return cell(rank.detail) or _last_line(rank)


def _last_line(rank: RankStatus) -> str:
    """What it wrote last; of a progress bar the numbers: in a narrow window the bar would hide them."""
    return _BAR.sub("", cell(rank.line))


def _importance(rank: RankStatus) -> tuple[int, float, int]:
    return _ORDER.index(rank.state), rank.since if rank.state == "failed" else 0.0, rank.rank


def _row(snapshot: Snapshot, ranks: list[RankStatus], text: str) -> Row:
    now = snapshot.now
    until = max(rank.since if rank.state in FINAL else now for rank in ranks)
    row = Row(tuple(ranks), ranks[0].state, until - snapshot.run.started, text, state_text=ranks[0].state)
    places = {_at(snapshot, rank) for rank in ranks}
    return replace(row, at=places.pop(), state_text=_state_text(ranks[0], now)) if len(places) == 1 else row


def _state_text(rank: RankStatus, now: float) -> str:
    if quiet := silent(rank, now):
        return f"silent {duration(quiet)}"
    if rank.state != "waiting":
        return rank.state
    return f"waiting {'for its GPU ' * rank.position.device}{duration(now - rank.called)}"


def _at(snapshot: Snapshot, rank: RankStatus) -> str:
    if rank.state in FINAL:
        return ""
    run = snapshot.run
    spot, call = rank.spot(run.cell), rank.position.call
    if spot is None:
        return call
    line = cell(snapshot.text(spot))
    named = line.find(call)
    if named > _CALL_WITHIN:
        line = "… " + line[line.rfind(" ", 0, named) + 1 :]
    number = str(spot.line).rjust(len(str(len(run.source))))
    return f"{number}  {line}".rstrip() + ("" if named >= 0 else f" · {call}")
