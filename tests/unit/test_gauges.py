"""What a rank writes of its memory: read by another descriptor, as the kernel does; torch's part is scripted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbspawn._protocol import gauges


class Writer:
    """The gauges of rank 1 of 2, and what the kernel reads of them."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(2 * gauges.SLOT.size))
        self.gauges = gauges.Gauges(path, 1)
        self._fd = os.open(path, os.O_RDONLY)

    def read(self) -> gauges.Reading:
        self.gauges.write(1.0)
        return gauges.read(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path / "gauges")
    yield writer
    writer.close()


def test_the_peak_is_not_missed_between_two_readings_and_begins_with_a_command(writer: Writer) -> None:
    before = writer.read()
    bytearray(200_000_000)
    after = writer.read()
    assert before.memory <= before.peak_memory and after.memory < before.memory + 100e6
    assert after.peak_memory > before.memory + 190e6
    writer.gauges.begin()
    assert writer.read().peak_memory < after.peak_memory - 100e6


def test_the_peak_since_the_start_outlasts_the_commands(writer: Writer) -> None:
    bytearray(200_000_000)
    most = gauges.peak()
    for _ in range(2):
        writer.gauges.begin()
        assert writer.read().peak_memory < most - 100e6
    assert gauges.peak() == most


class Device:
    """torch.cuda, of one device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = self.peak = 0
        cuda = SimpleNamespace(
            is_initialized=lambda: True,
            device_count=lambda: 1,
            memory_stats_as_nested_dict=lambda device: {
                "allocated_bytes": {"all": {"current": self.used, "peak": self.peak}}
            },
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

    def use(self, used: int) -> None:
        self.used, self.peak = used, max(self.peak, used)


def test_the_devices_peak(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own peak is the user's: it goes on from one command to the next, or the user begins it anew."""

    def read() -> tuple[int, int]:
        reading = writer.read()
        return reading.device_memory, reading.peak_device_memory

    monkeypatch.setitem(sys.modules, "torch", None)
    assert read() == (-1, -1)
    device = Device(monkeypatch)
    device.use(50)
    device.use(10)
    assert read() == (10, 50), "between two readings"
    writer.gauges.begin()
    assert read() == (10, 10), "the last command's does not count"
    device.use(20)
    assert read() == (20, 20)
    device.use(10)
    assert read() == (10, 20), "at a reading"
    device.use(60)
    device.use(10)
    assert read() == (10, 60), "torch's has grown"
    writer.gauges.begin()
    device.peak = 10
    device.use(30)
    device.use(10)
    assert read() == (10, 30), "the user has begun anew"
