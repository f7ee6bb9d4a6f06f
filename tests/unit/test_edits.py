"""Edited modules: what the engine decides for all ranks, and what each rank then does with its modules."""

from __future__ import annotations

import importlib
import linecache
import os
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from nbspawn._engine.run import edits as engine
from nbspawn._engine.run.edits import Edits
from nbspawn._process.imports import is_own
from nbspawn._protocol.edits import Reload, Version, versions
from nbspawn._protocol.messages import RunCell
from nbspawn._rank.edit.edits import OwnModules

LONG_AGO = 1_000_000_000


def write(path: Path, text: str, moment: float = LONG_AGO) -> Version:
    """With that modification time; returns the version."""
    path.write_text(text)
    os.utime(path, (moment, moment))
    return versions([str(path)])[str(path)]


def taken(edits: Edits, ranks: int = 2) -> dict[str, Version]:
    """What a command takes, in all ranks."""
    command = RunCell("", "cell", reload=Reload())
    sent = edits.attach(dict.fromkeys(range(ranks), command))
    (reload,) = {id(one.reload): one.reload for one in sent.values()}.values()
    assert reload is not None
    return dict(reload.versions)


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(_: float) -> None:
        raise AssertionError("nothing is to be waited for")

    monkeypatch.setattr(engine.time, "sleep", sleep)


# ---------------------------------------------------------------- the engine


@pytest.mark.usefixtures("no_sleep")
def test_an_edit_is_taken_by_all_and_stays_for_those_that_run_later(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    edits = Edits({str(file): write(file, "one")})
    assert taken(edits) == {}
    assert linecache.getline(str(file), 1) == "one\n"
    later = write(file, "three", LONG_AGO + 5)
    assert taken(edits) == {str(file): later} and taken(edits) == {str(file): later}
    assert linecache.getline(str(file), 1) == "three\n", "where a view shows the line"


@pytest.mark.usefixtures("no_sleep")
def test_clocks_are_never_compared(tmp_path: Path) -> None:
    """An older file that is put in its place (git checkout, cp -p) is an edit, and so is one of the same second."""
    file = tmp_path / "net.py"
    edits = Edits({str(file): write(file, "one")})
    older = write(file, "two", LONG_AGO - 500)
    assert taken(edits) == {str(file): older}
    same_second = write(file, "six", LONG_AGO - 500 + 0.25)
    assert taken(edits) == {str(file): same_second}


@pytest.mark.usefixtures("no_sleep")
def test_without_reload_nothing_is_taken_and_the_commands_are_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    edits = Edits({str(file): write(file, "one")})
    write(file, "two", LONG_AGO + 5)
    commands = {0: RunCell("", "cell"), 1: RunCell("", "cell")}
    assert edits.attach(commands) is commands


@pytest.mark.usefixtures("no_sleep")
def test_a_rank_that_has_loaded_another_version_is_known(tmp_path: Path) -> None:
    """One rank imports the module, it is edited, and another one imports it: the first has the old one."""
    file = tmp_path / "net.py"
    edits = Edits({})
    edits.loaded({str(file): write(file, "one")})
    edits.loaded({str(file): write(file, "three", LONG_AGO + 5)})
    assert taken(edits) == versions([str(file)])


@pytest.mark.usefixtures("no_sleep")
def test_a_file_that_is_gone_is_no_edit(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    edits = Edits({str(file): write(file, "one")})
    file.unlink()
    assert taken(edits) == {}
    assert taken(edits) == {} and write(file, "three") and taken(edits) == versions([str(file)])


def test_an_editor_that_writes_in_two_steps_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that empties the file first: what is seen between must not become an empty module."""
    file = tmp_path / "net.py"
    edits = Edits({str(file): write(file, "one")})
    far = 4_000_000_000.0  # seen from there no edit is of long ago
    write(file, "", far)
    waits: list[float] = []

    def finish(seconds: float) -> None:
        waits.append(seconds)
        write(file, "the whole", far)

    monkeypatch.setattr(engine.time, "sleep", finish)
    assert taken(edits) == {str(file): (far, 9)}
    assert len(waits) == 1
    assert taken(edits) == {str(file): (far, 9)} and len(waits) == 1, "once for each edit"


# ---------------------------------------------------------------- a rank


class Project:
    """Modules in a folder of its own, which a rank has imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rank = OwnModules()

    def write(self, name: str, text: str, moment: float = LONG_AGO) -> None:
        write(self.folder / name, text, moment)

    def follow(self, *files: str, names: frozenset[str] = frozenset(), alone: bool = False) -> Exception | None:
        return self.rank.follow(Reload(names, alone, versions(str(self.folder / file) for file in files)))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(SourceFileLoader, "path_stats", SourceFileLoader.path_stats)
    before = set(sys.modules)
    project = Project(tmp_path)
    project.rank.watch()
    yield project
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def load(name: str) -> Any:
    importlib.invalidate_caches()
    return importlib.import_module(name)


def test_what_is_recorded_is_what_was_read(project: Project) -> None:
    project.write("recorded.py", "x = 1\n")
    load("recorded")
    path = str(project.folder / "recorded.py")
    assert project.rank.take() == {path: (LONG_AGO, 6)} and project.rank.take() == {}
    load("recorded").x = 5
    assert project.follow("recorded.py") is None and load("recorded").x == 5, "it has that version"


def test_an_edit_of_the_same_second_and_size(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own compiled file would pass for it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    project.write("quick.py", "def answer():\n    return 41\n", LONG_AGO + 0.25)
    answer = load("quick").answer
    assert list(project.folder.glob("__pycache__/quick.*"))
    project.write("quick.py", "def answer():\n    return 42\n", LONG_AGO + 0.5)
    assert project.follow("quick.py") is None
    assert answer() == 42 and load("quick").answer() == 42


def test_a_new_name_that_another_edited_module_needs(project: Project) -> None:
    """Whichever is loaded again first."""
    for first, second in (("a", "b"), ("d", "c")):
        project.write(f"{first}_uses.py", f"import {second}_has\n")
        project.write(f"{second}_has.py", "")
        load(f"{first}_uses")
        project.write(f"{first}_uses.py", f"from {second}_has import new\n", LONG_AGO + 1)
        project.write(f"{second}_has.py", "new = 7\n", LONG_AGO + 1)
        assert project.follow(f"{first}_uses.py", f"{second}_has.py") is None
        assert load(f"{first}_uses").new == 7


def test_what_cannot_be_loaded_stays_as_it_was_and_is_tried_until_it_can(project: Project) -> None:
    project.write("broken.py", "kept = 1\ndef f():\n    return kept\n")
    f = load("broken").f
    project.write("broken.py", "kept = 2\n\n\nraise KeyError('here')\n", LONG_AGO + 1)
    for _ in range(2):
        error = project.follow("broken.py")
        assert isinstance(error, KeyError)
        (frame,) = traceback.extract_tb(error.__traceback__)
        assert (frame.filename, frame.lineno) == (str(project.folder / "broken.py"), 4)
        assert f() == 1 and load("broken").f is f
    project.write("broken.py", "kept = \n", LONG_AGO + 2)
    error = project.follow("broken.py")
    assert isinstance(error, SyntaxError) and error.filename == str(project.folder / "broken.py") and f() == 1
    project.write("broken.py", "kept = 3\ndef f():\n    return kept * 2\n", LONG_AGO + 3)
    assert project.follow("broken.py") is None and f() == 6
    project.write("broken.py", "raise KeyError\n", LONG_AGO + 3)  # of another size
    assert isinstance(project.follow("broken.py"), KeyError)


def test_an_interrupt_leaves_the_module_whole(project: Project) -> None:
    project.write("slow.py", "x = 1\n")
    slow = load("slow")
    project.write("slow.py", "y = 2\nraise KeyboardInterrupt\n", LONG_AGO + 1)
    with pytest.raises(KeyboardInterrupt):
        project.follow("slow.py")
    assert slow.x == 1 and slow.__spec__ is not None
    with pytest.raises(KeyboardInterrupt):  # it is still to be loaded
        project.follow("slow.py")


def test_a_file_that_was_written_once_more_is_not_taken(project: Project) -> None:
    """Its peers may have read the version that was meant."""
    project.write("twice.py", "x = 1\n")
    twice = load("twice")
    project.write("twice.py", "x = 22\n", LONG_AGO + 1)
    sent = versions([str(project.folder / "twice.py")])
    project.write("twice.py", "x = 333\n", LONG_AGO + 2)
    error = project.rank.follow(Reload(versions=sent))
    assert isinstance(error, RuntimeError) and "twice.py was written once more" in str(error) and twice.x == 1
    assert project.follow("twice.py") is None and twice.x == 333


def test_a_package_keeps_its_submodules(project: Project) -> None:
    (project.folder / "pack").mkdir()
    project.write("pack/__init__.py", "x = 1\n")
    project.write("pack/part.py", "y = 1\n")
    part = load("pack.part")
    project.write("pack/__init__.py", "x = 2\n", LONG_AGO + 1)
    assert project.follow("pack/__init__.py") is None
    pack = load("pack")
    assert pack.x == 2 and pack.part is part and load("pack.part") is part and pack.__path__


@pytest.mark.parametrize(
    ("names", "alone", "changed"), [((), False, "ab"), (("name_a",), False, "b"), (("name_a",), True, "a")]
)
def test_some_modules_only(project: Project, names: tuple[str, ...], alone: bool, changed: str) -> None:
    for letter in "ab":
        project.write(f"name_{letter}.py", "x = 1\n")
        load(f"name_{letter}")
        project.write(f"name_{letter}.py", "x = 22\n", LONG_AGO + 1)
    assert project.follow("name_a.py", "name_b.py", names=frozenset(names), alone=alone) is None
    assert "".join(letter for letter in "ab" if load(f"name_{letter}").x == 22) == changed


def test_a_rule_that_fails_costs_only_its_own_object(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """A function that needs super() now, a class of another layout: IPython's autoreload gives up there."""
    old = "class {0}({1}):\n    {2}\n    def value(self):\n        return {3}\n"
    base = "class Base:\n    def value(self):\n        return 1\n"
    first = base + old.format("Derived", "Base", "pass", "2") + old.format("Slim", "Base", "pass", "3")
    project.write("rules.py", first + "def last():\n    return 4\n")
    module = load("rules")
    derived, slim, last = module.Derived(), module.Slim(), module.last
    below = type("Below", (module.Derived,), {})()
    second = base + old.format("Derived", "Base", "pass", "super().value() + 20")
    second += old.format("Slim", "int", "pass", "30") + "def last():\n    return 40\n"
    project.write("rules.py", second, LONG_AGO + 1)
    assert project.follow("rules.py") is None
    assert derived.value() == 21 and isinstance(derived, module.Derived)
    assert below.value() == 21 and isinstance(below, module.Derived)
    assert last() == 40 and slim.value() == 30
    assert capsys.readouterr().err.count("Objects of the old Slim stay as they are: ") == 1


def test_whose_files_are_the_users(tmp_path: Path) -> None:
    assert is_own(str(tmp_path / "net.py"))
    others = [str(tmp_path / name) for name in ("net.so", "site-packages/net.py")]
    for path in (os.__file__, pytest.__file__, engine.__file__, *others):
        assert not is_own(path), path
