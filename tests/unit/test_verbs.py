"""The verbs of ``%ranks`` are one table: what it does, what the README says, what is completed."""

from __future__ import annotations

from pathlib import Path

from nbspawn._notebook import arguments, ranks
from nbspawn._notebook.verbs import VERBS


def test_each_verb_does_something() -> None:
    assert set(ranks._HANDLERS) - {""} == {verb.name for verb in VERBS}


def test_the_readme_lists_them() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for verb in VERBS:
        shown = {"R": " 1", "EXPR": " model", "on|off": " on`, `off"}.get(verb.argument, "")
        typed = verb.name + shown
        assert f"| `%ranks {typed}` | {verb.meaning}" in readme


def test_help_and_completion_know_them() -> None:
    text = " ".join(arguments.RANKS_PARSER.format_help().split())
    assert all(verb.usage in text for verb in VERBS)
    assert arguments.complete("%ranks ") == sorted(verb.name for verb in VERBS)
    assert arguments.complete("%ranks auto ") == ["off", "on"] and arguments.complete("%ranks debug ") == []
    assert (
        arguments.complete("%ranks diff model --") == ["--atol", "--rtol"] and arguments.complete("%ranks diff ") == []
    )
