"""In the fork server: reads the plan of what to import, carries it out, and writes a report."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nbspawn._protocol.preload import PATH, Plan, Report, answer_to
from nbspawn._rank import imports, trial


def load() -> Plan:
    """Read the plan, and remove its path from the environment, which ranks inherit."""
    global _path
    _path = Path(os.environ.pop(PATH))
    given: dict[str, Any] = json.loads(_path.read_text())
    # The inherited environment may differ: native code (readline) sets variables that are not in the kernel's
    # os.environ.
    for name in os.environ.keys() - given["environment"].keys():
        del os.environ[name]
    os.environ.update(given["environment"])
    return Plan(**given)


_path = Path()


def carry_out(plan: Plan) -> Report:
    """Import the modules of the plan."""
    report = Report()
    before = set(sys.modules)
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
    report.modules = frozenset(imports.installed(sys.modules.keys() - before))
    gc.collect()
    report.memory = resident()
    return report


def _import(modules: Sequence[str], memory: int, report: Report) -> None:
    for name in modules:
        trial.exit_if_orphaned()
        if name in sys.modules:
            continue
        if resident() > memory:
            report.skipped += (name,)
            continue
        try:
            importlib.import_module(name)
            report.imported += (name,)
        except Exception as error:
            report.refused[name] = trial.failed(error)


def _left(modules: Iterable[str], report: Report) -> list[str]:
    """The modules still to be imported, without those that are not installed, or are a part of a refused one."""
    left = []
    for name in modules:
        above = {name[:end] for end, letter in enumerate(f"{name}.") if letter == "."}
        if name not in sys.modules and not above & report.refused.keys():
            top = name.partition(".")[0]
            if top in sys.modules or imports.is_installed(top):
                left.append(name)
    return left


def write(report: Report) -> None:
    """Write the report for the kernel."""
    answer_to(_path).write_text(json.dumps({**asdict(report), "modules": sorted(report.modules)}))


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


@contextmanager
def recording() -> Iterator[dict[str, tuple[str | None, str | None]]]:
    """Record which environment variables are read while modules are imported. What the modules derive from them must
    not be copied into a rank with other values. (Not recorded: iterations over all variables, and reads by native code
    but for those of Python's and torch's that are known.)"""
    names = set(_READ_BY_NATIVE_CODE)
    found: dict[str, tuple[str | None, str | None]] = {}
    before = dict(os.environ)
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
        yield found
    finally:
        environment.__class__ = usual
        found.update({name: (before.get(name), os.environ.get(name)) for name in names})
