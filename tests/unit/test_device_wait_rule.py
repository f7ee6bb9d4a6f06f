"""When a thread counts as one that waits for its device: by its frame, and by the recorder's numbers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from nbspawn._accelerators import kinds
from nbspawn._rank.group import flight_recorder
from nbspawn._rank.group.device_wait import DeviceWait

PENDING = {"0": (3, 2)}


def stands_at_one_line() -> Iterator[None]:
    yield


def sleeps() -> Iterator[None]:
    time.sleep((yield))  # type: ignore[arg-type]


class Thread:
    """A frame that is looked at twice a second from the tenth second on."""

    def __init__(self, frame: FrameType, wait: DeviceWait | None = None) -> None:
        self.frame = frame
        self.wait = wait or DeviceWait()
        self.now = 10.0
        self.wait.since(self.frame, self.now, self.now)

    def after(self, seconds: float) -> float | None:
        for _ in range(int(2 * seconds)):
            looked, self.now = self.now, self.now + 0.5
            found = self.wait.since(self.frame, self.now, looked)
        return found


def at(function: Any) -> FrameType:
    generator = function()
    next(generator)
    frame: FrameType = generator.gi_frame
    return frame


@pytest.fixture
def unended(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """What the recorder tells; of a device that is in use."""
    pytest.importorskip("torch")
    told = dict(PENDING)
    monkeypatch.setattr(kinds, "in_use", lambda: kinds.CPU)
    monkeypatch.setattr(flight_recorder, "unended", lambda device: dict(told))
    return told


def test_it_stands_for_two_seconds_and_no_call_ends(unended: dict[str, tuple[int, int]]) -> None:
    thread = Thread(at(stands_at_one_line))
    assert thread.after(1.5) is None
    assert thread.after(0.5) == 10.0, "since it came to this call"
    assert thread.after(60) == 10.0


def test_calls_end(unended: dict[str, tuple[int, int]]) -> None:
    """A loop that is in loss.item() whenever it is looked at."""
    thread = Thread(at(stands_at_one_line))
    for number in range(3, 40):
        unended["0"] = (number + 1, number)
        assert thread.after(0.5) is None
    assert thread.after(2) == thread.now - 2.5, "since the last one has ended"


def test_nothing_is_queued(unended: dict[str, tuple[int, int]]) -> None:
    unended.clear()
    thread = Thread(at(stands_at_one_line))
    assert thread.after(60) is None
    unended.update(PENDING)  # by another thread
    assert thread.after(1.5) is None and thread.after(0.5) == 70.0


def test_it_moves(unended: dict[str, tuple[int, int]]) -> None:
    thread = Thread(at(stands_at_one_line))
    assert thread.after(1.5) is None
    thread.frame = at(stands_at_one_line)
    assert thread.after(1.5) is None and thread.after(0.5) == 11.5


def test_no_device_is_in_use(unended: dict[str, tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "in_use", lambda: None)
    assert Thread(at(stands_at_one_line)).after(60) is None


def test_what_an_earlier_command_has_left(unended: dict[str, tuple[int, int]]) -> None:
    """A group that was aborted keeps its numbers."""
    wait = DeviceWait()
    wait.begin()
    thread = Thread(at(stands_at_one_line), wait)
    assert thread.after(60) is None
    unended["1"] = (1, 0)
    assert thread.after(2.5) is not None


def test_it_sleeps(unended: dict[str, tuple[int, int]]) -> None:
    assert Thread(at(sleeps)).after(60) is None


def test_code_of_a_library_that_does_not_know_torch(unended: dict[str, tuple[int, int]]) -> None:
    """A frame of an encoder."""
    import json.encoder

    encoder: Any = json.encoder.JSONEncoder(indent=1)
    chunks = encoder.iterencode([1, 2])
    next(chunks)
    assert Thread(chunks.gi_frame).after(60) is None
