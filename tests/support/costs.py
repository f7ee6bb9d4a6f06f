"""Where the time of the tests goes: minutes and processor time of each folder.

Processor time is of the test process and of all that descends from it. The same tests have taken 1.7 times as much on
another machine, and a quarter more on the same one under load.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

FOLDERS = "hosts", "programs", "campaign", "browser", "kernel", "engine", "gpu", "packaging", "unit"
"""In the order of the run: what takes long comes first, so that all workers end at about the same time."""


def used() -> float:
    """Processor seconds of this process and its descendants until now."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    for process in psutil.Process().children(recursive=True):
        try:
            total += sum(process.cpu_times()[:4])  # its own, and of its children that have ended
        except psutil.NoSuchProcess:
            continue
    return total


def folder(path: str) -> str:
    """The folder of ``tests/`` that a test's path begins with."""
    return path.split("tests/", 1)[-1].split("/")[0]


class Costs:
    """A plugin of pytest. Each worker of pytest-xdist counts its processor time and tells it when it ends."""

    def __init__(self) -> None:
        self._minutes: dict[str, float] = defaultdict(float)
        self._processor: dict[str, float] = defaultdict(float)
        self._counted = used()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
        try:
            return (yield)
        finally:
            if nextitem is None or folder(nextitem.nodeid) != folder(item.nodeid):
                before, self._counted = self._counted, used()
                self._processor[folder(item.nodeid)] += self._counted - before

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._minutes[folder(report.nodeid)] += report.duration / 60

    def pytest_testnodedown(self, node: Any) -> None:
        """Of pytest-xdist, in the process that has started the workers."""
        for name, seconds in getattr(node, "workeroutput", {}).get("processor", {}).items():
            self._processor[name] += seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["processor"] = dict(self._processor)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section("where the time went")
        write("folder        minutes  processor s")
        for name, minutes in sorted(self._minutes.items()):
            write(f"{name:12} {minutes:8.1f} {self._processor[name]:12.0f}")
