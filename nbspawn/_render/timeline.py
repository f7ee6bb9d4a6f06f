"""The timeline of a run: as a picture, as lines of text, and as records for pandas. Pure.

A lane for each rank, time from left to right, the colour tells the line of the cell; what a rank waited for others is
light grey, what it waited for its GPU dark. The picture is an image within the HTML, because front ends remove inline
SVG from notebooks that they do not trust; what the mouse points at is told by an image map, which they remove, too, and
nothing else is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import quote

from nbspawn._protocol.frames import Frame
from nbspawn._render.lanes import Lane, lanes
from nbspawn._render.text import LABEL_WIDTH, MARKS, cell, clip, duration
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import RankStatus
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.timeline import Activity, Bin, Timeline
from nbspawn._state.wording import few_ranges

COLOURS = ("#0b72b5", "#e08a00", "#0b9a72", "#c45fa0", "#4fb0e8", "#c94f0c", "#8a7fd0", "#a8a012")
"""Of lines, told apart by the colour-blind and on white and black: after Okabe and Ito (jfly.uni-koeln.de/color)."""
LETTERS = "abcdefgh"
OTHERS = "#bfae8e"
"""The colour of all other lines."""
WAITING = "#9a9a9a55"
DEVICE = "#4a5568cc"
"""The colour of a wait for the rank's own device."""
_TEXT = "#808080"  # legible on white and on black: an image does not know the theme
_FAILED = "#e0483e"
_HALO = "stroke='#fff' stroke-width='3' paint-order='stroke'"  # legible on every colour

_WIDTH, _LANE, _GAP, _AXIS, _LETTER = 680, 16, 6, 20, 7  # pixels
_TICKS = 6
_DRAWN = 480  # bins of all lanes: a notebook is to stay small
_SPOTS = 96  # of all lanes, that tell what the mouse points at
_TOLD = 3  # activities of a spot, at most
_LEAST = 0.05  # of what took most of it: no others are told
_COLUMNS = 58  # of text
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800)  # seconds between ticks


@dataclass(frozen=True)
class Key:
    """Which lines have a colour and a letter of their own: those that took most time."""

    lines: Sequence[Frame]

    def colour(self, frame: Frame | None) -> str:
        """The colour of the time at a line."""
        return COLOURS[self.lines.index(frame)] if frame in self.lines else OTHERS

    def letter(self, frame: Frame | None) -> str:
        """The letter of the time at a line."""
        return LETTERS[self.lines.index(frame)] if frame in self.lines else "-"


def key(profile: Profile) -> Key:
    """The key of a profile's timeline."""
    busy = {
        frame: sum(line.seconds.values()) - sum(line.waiting.values()) - sum(line.device.values())
        for frame, line in profile.lines.items()
        if frame is not None
    }
    most = sorted((frame for frame in busy if busy[frame] > 0), key=lambda frame: -busy[frame])[: len(COLOURS)]
    return Key(sorted(most, key=lambda frame: (frame.file, frame.line)))


def html(profile: Profile, snapshot: Snapshot, name: str) -> str:
    """The picture; ``name`` is unique in the page."""
    drawing = _Drawing(profile, snapshot)
    spots = "".join(
        f'<area shape="rect" coords="{",".join(map(str, box))}" title="{escape(title)}">'
        for box, title in (*drawing.marks(), *drawing.spots())
    )
    return (
        f'<img alt="" style="display:block;max-width:none" width="{_WIDTH}" height="{drawing.height}" '
        f'usemap="#{name}" src="data:image/svg+xml,{quote(drawing.svg(), safe=_UNQUOTED)}">'
        f'<map name="{name}">{spots}</map>'
    )


_UNQUOTED = " ='/:;,.()+-*!?"
Box = tuple[int, int, int, int]
"""Left, top, right, bottom, in pixels."""


class _Drawing:
    def __init__(self, profile: Profile, snapshot: Snapshot) -> None:
        self._timeline = profile.timeline
        self._snapshot = snapshot
        self._key = key(profile)
        found = _lanes(profile.timeline, snapshot)
        merged = -(-sum(len(lane.bins) for lane in found) // _DRAWN) or 1
        self._lanes = [Lane(lane.ranks, _merged(lane.bins, merged)) for lane in found]
        self._width = profile.timeline.width * merged  # seconds of a bin
        self._end = _end(profile.timeline, snapshot)
        self._labels = _LETTER * max(len(_name(lane)) for lane in self._lanes)
        self.height = len(self._lanes) * (_LANE + _GAP) + _AXIS

    def svg(self) -> str:
        """Single quotes only: it is to be an attribute."""
        scale = (_WIDTH - self._labels) / self._end * self._width
        parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{_WIDTH}' height='{self.height}' fill='{_TEXT}' "
            "font-family='system-ui,sans-serif' font-size='11'>"
        ]
        for number, lane in enumerate(self._lanes):
            top = number * (_LANE + _GAP)
            label = escape(_name(lane))
            parts.append(f"<text x='{self._labels - 8}' y='{top + 12}' text-anchor='end'>{label}</text>")
            parts.append(
                f"<g transform='translate({self._labels} {top}) scale({scale:.4g} 1)' shape-rendering='crispEdges'>"
            )
            parts += (f"<path fill='{colour}' d='{''.join(path)}'/>" for colour, path in self._paths(lane).items())
            parts.append("</g>")
        for (left, top, _, _), title in self.marks():
            mark, colour = title[0], _TEXT if title[0] == "?" else _FAILED
            parts.append(f"<text x='{left}' y='{top + 13}' font-size='13' fill='{colour}' {_HALO}>{mark}</text>")
        bottom = self.height - _AXIS
        for moment in self._ticks():
            x = self._x(moment)
            parts.append(f"<path d='M{x} 0v{bottom + 3}' stroke='{_TEXT}' stroke-opacity='.25'/>")
            anchor = "start" if moment == 0 else "middle" if x < _WIDTH - 20 else "end"
            parts.append(
                f"<text x='{x}' y='{bottom + 14}' text-anchor='{anchor}'>{duration(moment) if moment else 0}</text>"
            )
        return "".join([*parts, "</svg>"])

    def _paths(self, lane: Lane) -> dict[str, list[str]]:
        """The paths by colour: rectangles, a bin wide and a pixel high per unit. In each bin the activities are on top
        of one another, by their share; below is a line where something was printed."""
        boxes: dict[tuple[str, int, int], list[list[int]]] = {}

        def add(colour: str, top: int, bottom: int, index: int) -> None:
            found = boxes.setdefault((colour, top, bottom), [])
            if found and found[-1][1] == index:
                found[-1][1] += 1
            else:
                found.append([index, index + 1])

        for index, one in enumerate(lane.bins):
            total, above = sum(one.seconds.values()), 0.0
            for activity in sorted(one.seconds, key=self._order):
                below = above + one.seconds[activity]
                colour = self._colour(activity)
                if round(_LANE * above / total) < round(_LANE * below / total):
                    add(colour, round(_LANE * above / total), round(_LANE * below / total), index)
                above = below
            if one.printed:
                add(_TEXT, _LANE + 1, _LANE + 3, index)
        paths: dict[str, list[str]] = {}
        for (colour, top, bottom), runs in boxes.items():
            paths.setdefault(colour, []).extend(
                f"M{begin} {top}h{end - begin}v{bottom - top}h{begin - end}" for begin, end in runs
            )
        return paths

    def _colour(self, activity: Activity) -> str:
        if activity.device:
            return DEVICE
        return WAITING if activity.waiting else self._key.colour(activity.frame)

    @staticmethod
    def _order(activity: Activity) -> tuple[bool, bool, str, int]:
        """Waiting is at the bottom; lines are in the order of the code."""
        frame = activity.frame or Frame("", 0, "")
        return activity.waiting, activity.device, frame.file, frame.line

    def marks(self) -> Iterator[tuple[Box, str]]:
        """Where a rank failed, was stopped, or asked the user. The first character is the mark."""
        for number, lane in enumerate(self._lanes):
            top = number * (_LANE + _GAP)
            for index, one in enumerate(lane.bins):
                if one.asked and not (index and lane.bins[index - 1].asked):
                    moment = index * self._width
                    yield self._around(moment, top), f"? {_name(lane)} asked for input after {duration(moment)}"
            for rank in _ended_early(self._snapshot, lane)[:1]:
                passed = rank.since - self._timeline.origin
                what = f"{MARKS[rank.state]} rank {rank.rank}: {rank.state} after {duration(passed)}"
                yield self._around(passed, top), clip(f"{what}: {cell(rank.detail)}", 200)

    def _around(self, moment: float, top: int) -> Box:
        left = min(self._x(moment), _WIDTH - 12)
        return left, top, left + 12, top + _LANE

    def spots(self) -> Iterator[tuple[Box, str]]:
        """What was done when: a few parts of each lane, in words."""
        for number, lane in enumerate(self._lanes):
            top = number * (_LANE + _GAP)
            for begin, end, parts in _parts(lane.bins, self._belongs):
                left, right = (self._x(index * self._width) for index in (begin, end))
                head = f"{_name(lane)}, {self._seconds(begin)} to {self._seconds(end)} s"
                told = sorted(parts.items(), key=lambda part: -part[1])[:_TOLD]
                lines = [
                    f"{seconds / len(lane.ranks):.1f} s {_what(activity, self._snapshot)}"
                    for activity, seconds in told
                    if seconds >= _LEAST * told[0][1]
                ]
                yield (left, top, right, top + _LANE), "\n".join([head, *lines])

    def _belongs(self, length: int, part: Bin, one: Bin) -> bool:
        """Does the same take most of the time, or is the part too short to be pointed at?"""
        return length * _SPOTS < sum(len(lane.bins) for lane in self._lanes) or _most(one) == _most(part)

    def _seconds(self, index: int) -> str:
        return f"{min(index * self._width, self._end):.1f}"

    def _x(self, moment: float) -> int:
        return self._labels + round((_WIDTH - self._labels) * min(1.0, max(0.0, moment) / self._end))

    def _ticks(self) -> list[float]:
        step = next((step for step in _STEPS if self._end / step <= _TICKS), 0)
        step = step or 3600 * max(1, round(self._end / 3600 / _TICKS))
        return [float(moment) for moment in range(0, int(self._end) + 1, step)]


def _parts(
    bins: Sequence[Bin], joins: Callable[[int, Bin, Bin], bool]
) -> Iterator[tuple[int, int, dict[Activity, float]]]:
    """Parts of a lane, as their first bin, the bin after their last, and the seconds by activity. A bin ``joins`` the
    part before it, of which the number of bins and the sum are given."""
    begin, whole = 0, Bin()
    for index, one in enumerate([*bins, Bin()]):
        if index == len(bins) or not joins(index - begin, whole, one):
            if whole.seconds:
                yield begin, index, whole.seconds
            begin, whole = index, Bin()
        whole.merge(one)


def _alike(_: int, part: Bin, one: Bin) -> bool:
    """Was the same one thing done in both?"""
    return len(one.seconds) == 1 and one.seconds.keys() == part.seconds.keys()


def _merged(bins: Sequence[Bin], count: int) -> list[Bin]:
    """Wider bins, of so many each."""
    found = [Bin() for _ in range(0, len(bins), count)]
    for index, one in enumerate(bins):
        found[index // count].merge(one)
    return found


def _most(one: Bin) -> Activity | None:
    return max(one.seconds, key=lambda activity: one.seconds[activity], default=None)


def text(profile: Profile, snapshot: Snapshot) -> list[str]:
    """The timeline in letters: in each column of a lane that of what took most of the time; · is waiting for others, °
    for its GPU."""
    found, names, end = _lanes(profile.timeline, snapshot), key(profile), _end(profile.timeline, snapshot)
    width = max(len(_name(lane)) for lane in found)
    lines = [f"{'':>{width}}  0{duration(end):>{_COLUMNS - 1}}"]
    for lane in found:
        letters = [" "] * _COLUMNS
        for column in range(_COLUMNS):
            index = int((column + 0.5) * end / _COLUMNS / profile.timeline.width)
            most = _most(lane.bins[index]) if index < len(lane.bins) else None
            if most is not None:
                letters[column] = "°" if most.device else "·" if most.waiting else names.letter(most.frame)
        for rank in _ended_early(snapshot, lane)[:1]:
            passed = max(0.0, rank.since - profile.timeline.origin)
            letters[min(_COLUMNS - 1, int(_COLUMNS * passed / end))] = MARKS[rank.state]
        lines.append(f"{_name(lane):>{width}}  {''.join(letters)}".rstrip())
    return lines


def records(timeline: Timeline, snapshot: Snapshot) -> list[dict[str, Any]]:
    """The timeline as ``Results.timeline`` gives it."""
    found = []
    for rank, bins in enumerate(timeline.bins):
        for begin, end, seconds in _parts(bins, _alike):
            for activity, spent in seconds.items():
                frame = activity.frame
                found.append(
                    {
                        "rank": rank,
                        "start": round(begin * timeline.width, 1),
                        "end": round(end * timeline.width, 1),
                        "seconds": spent,
                        "line": frame and frame.line,
                        "file": snapshot.run.names.get(frame.file, frame.file) if frame else "",
                        "source": snapshot.text(frame) if frame else "",
                        "waiting": activity.waiting,
                        "device": activity.device,
                    }
                )
    return found


def _lanes(timeline: Timeline, snapshot: Snapshot) -> list[Lane]:
    failed = [rank.rank for rank in snapshot.run.ranks if rank.state == "failed"]
    return lanes(timeline, sorted(failed, key=lambda rank: snapshot.run.ranks[rank].since))


def _end(timeline: Timeline, snapshot: Snapshot) -> float:
    """How long the run has taken, in seconds."""
    ended = snapshot.now if snapshot.run.ended is None else snapshot.run.ended
    return max(ended - timeline.origin, timeline.width)


def _ended_early(snapshot: Snapshot, lane: Lane) -> list[RankStatus]:
    """The ranks of a lane that failed or were stopped, in the order of time."""
    ranks = [snapshot.run.ranks[rank] for rank in lane.ranks]
    return sorted(
        (rank for rank in ranks if rank.state in ("failed", "killed", "interrupted")), key=lambda rank: rank.since
    )


def _name(lane: Lane) -> str:
    return f"rank{'s' * (len(lane.ranks) > 1)} {few_ranges(lane.ranks, LABEL_WIDTH)}"


def _what(activity: Activity, snapshot: Snapshot) -> str:
    frame = activity.frame
    where = f"line {frame.line}: {clip(cell(snapshot.text(frame)), 60)}" if frame else "other lines"
    waits = "waiting for its GPU " if activity.device else "waiting for other ranks " if activity.waiting else ""
    return f"{waits}at {where}"
