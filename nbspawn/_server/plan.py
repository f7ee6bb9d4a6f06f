"""In the importer: imports what a plan names, and notes what came of it."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from nbspawn._process import imports
from nbspawn._protocol.preload import ImportReport, Plan
from nbspawn._server import trial


def adopt(environment: Mapping[str, str]) -> None:
    """Make it this process's. The inherited one may differ: native code (readline) sets variables that are not in the
    kernel's ``os.environ``."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _import(modules: Sequence[str], memory: int, report: ImportReport) -> None:
    for name in modules:
        trial.exit_if_orphaned()
        if name in sys.modules:
            continue
        if resident() > memory:
            report.skipped += (name,)
            continue
        began = time.monotonic()
        try:
            importlib.import_module(name)
            report.imported[name] = time.monotonic() - began
        except Exception as error:
            report.refused[name] = trial.failed(error)


def _left(modules: Iterable[str], report: ImportReport) -> list[str]:
    """The modules still to be imported, without those that are not installed, or are a part of a refused one."""
    left = []
    for name in modules:
        above = {name[:end] for end, letter in enumerate(f"{name}.") if letter == "."}
        if name not in sys.modules and not above & report.refused.keys():
            top = name.partition(".")[0]
            if top in sys.modules or imports.is_installed(top):
                left.append(name)
    return left


def resident() -> int:
    """The resident bytes of this process; 0 where the system does not report them."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


_READ_BY_NATIVE_CODE = (  # once, when the interpreter or torch's libraries start
    *("PYTHONHASHSEED", "TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
)


class Imports:
    """All imports of this process, stage by stage."""

    def __init__(self) -> None:
        self._report = ImportReport()
        self._first: frozenset[str] = frozenset()
        self._names = set(_READ_BY_NATIVE_CODE)
        self._environment: dict[str, str] = {}

    def carry_out(self, plan: Plan) -> ImportReport:
        """Import the modules of the plan; the report is about all stages."""
        report = self._report
        self._first = self._first or frozenset(sys.modules)
        own = list(sys.path)
        # Not from the folder in which the kernel was started: its modules are the user's.
        sys.path[:] = [folder for folder in own if os.path.abspath(folder) != os.getcwd()]
        for trusted, names in itertools.groupby(plan.modules, lambda name: name in plan.trusted):
            left = _left(names, report)
            while left:
                found = None if trusted else trial.first_refused(left)
                safe = left.index(found[0]) if found else len(left)
                _import(left[:safe], plan.memory, report)
                if found:
                    report.refused[found[0]] = found[1]
                left = _left(left[safe + 1 :], report)
        sys.path[:] = own
        report.modules = frozenset(imports.installed(sys.modules))
        report.memory = resident()
        report.read = {name: (self._environment.get(name), os.environ.get(name)) for name in self._names}
        return report

    @property
    def planned(self) -> frozenset[str]:
        """The installed modules that are there in addition to torch."""
        return self._report.modules - self._first

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record which environment variables are read while modules are imported. What the modules derive from them
        must not be copied into a rank with other values. (Not recorded: iterations over all variables, and reads by
        native code but for those of Python's and torch's that are known.)"""
        names = self._names
        self._environment = self._environment or dict(os.environ)
        usual: Any = type(os.environ)

        class Recording(usual):  # type: ignore[misc]
            passed = ""  # the current one in an iteration over all: its value is then read, but not needed

            def __iter__(self) -> Iterator[str]:
                for name in super().__iter__():
                    self.passed = name
                    yield name
                self.passed = ""

            def __getitem__(self, name: Any) -> Any:
                if isinstance(name, str) and name != self.passed:
                    names.add(name)
                return super().__getitem__(name)

        environment: Any = os.environ
        environment.__class__ = Recording
        try:
            yield
        finally:
            environment.__class__ = usual
