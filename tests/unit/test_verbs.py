"""The verbs of ``%ranks`` are one table: what it does, what help says, what is completed."""

from __future__ import annotations

from nbspawn._notebook import arguments, ranks
from nbspawn._notebook.verbs import VERBS


def test_each_verb_does_something() -> None:
    assert set(ranks._HANDLERS) - {""} == {verb.name for verb in VERBS}


def test_help_and_completion_know_them() -> None:
    text = " ".join(arguments.RANKS_PARSER.format_help().split())
    assert all(verb.usage in text for verb in VERBS)
    assert arguments.complete("%ranks ") == sorted(verb.name for verb in VERBS)
    assert arguments.complete("%ranks auto ") == ["off", "on"] and arguments.complete("%ranks debug ") == []
    assert (
        arguments.complete("%ranks diff model --") == ["--atol", "--rtol"] and arguments.complete("%ranks diff ") == []
    )
