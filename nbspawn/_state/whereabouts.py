"""What a rank that others wait for is doing, in a few words: pure."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nbspawn._protocol.frames import Frame
from nbspawn._state.run import FINAL, RankStatus, Run, spot
from nbspawn._state.snapshot import Snapshot

SILENCE = 3.0  # seconds without a sign of life that are worth showing; a rank gives two a second

_DETAIL = 100  # characters of an error: the whole one is shown elsewhere

_PLURAL = {"is": "are", "has": "have", "waits": "wait", "sends": "send"}


class Doing(tuple[str, str]):
    """A verb in the singular and what follows it: 'is', 'at line 12: x = 3'."""

    def of(self, count: int) -> str:
        """What so many ranks do, in words."""
        verb, rest = self
        return f"{verb if count == 1 else _PLURAL[verb]} {rest}"


def doing(snapshot: Snapshot, rank: RankStatus) -> Doing:
    """What a rank does that waits for nobody, as far as is known."""
    if rank.state == "done":
        return Doing(("has", "finished"))
    if rank.state == "idle":
        return Doing(("is", "idle"))
    if rank.state in FINAL:
        detail = rank.detail.partition("\n")[0]
        detail = detail if len(detail) <= _DETAIL else f"{detail[:_DETAIL]}…"
        return Doing(("has", f"ended ({detail})" if detail else "ended"))
    if rank.state == "starting":
        return Doing(("is", "starting"))
    frame, line = rank.spot(snapshot.run.cell), line_of(snapshot.run, rank.position.frames)
    text = snapshot.text(frame) if frame is not None else ""
    where = f"{line}: {text}" if text else line
    if quiet := silent(rank, snapshot.now):
        return Doing(("has", f"given no sign of life for {quiet:.0f} s" + (f", last seen at {where}" if where else "")))
    return Doing(("is", f"at {where}" if where else "not in the cell's code"))


def silent(rank: RankStatus, now: float) -> float:
    """Seconds since the rank's last sign of life, if it should have given one; else 0."""
    if rank.alive is None or rank.state in FINAL:
        return 0.0
    return now - rank.alive if now - rank.alive >= SILENCE else 0.0


def line_of(run: Run, frames: Sequence[Frame]) -> str:
    """'line 12' of the running cell, or 'train.py, line 12', of the user's frames (outermost first); '' if there are
    none."""
    frame = spot(frames, run.cell)
    if frame is None:
        return ""
    file = "" if frame.file == run.cell else f"{run.names.get(frame.file) or os.path.basename(frame.file)}, "
    return f"{file}line {frame.line}"
