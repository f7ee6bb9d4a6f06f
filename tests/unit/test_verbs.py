"""The verbs of ``%ranks`` are one table: what it does, what help says, what is completed."""

from __future__ import annotations

import pytest

from nbspawn._notebook import arguments, ranks
from nbspawn._notebook.verbs import VERBS
from nbspawn.errors import UsageError


def test_each_verb_does_something() -> None:
    assert set(ranks._HANDLERS) - {""} == {verb.name for verb in VERBS}


@pytest.mark.parametrize(
    "line, said",
    [
        (
            "4 --bakend gloo",
            "unrecognized arguments: --bakend gloo (did you mean --backend?). %%spawn? lists the options.",
        ),
        ("4 --xyz", "unrecognized arguments: --xyz. %%spawn? lists the options."),
    ],
)
def test_an_option_that_is_none(line: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        arguments.parse(line)
    assert str(error.value) == said


def test_help_and_completion_know_them() -> None:
    text = " ".join(arguments.RANKS_PARSER.format_help().split())
    assert all(verb.usage in text for verb in VERBS)
    assert arguments.complete("%ranks ") == sorted(verb.name for verb in VERBS)
    assert arguments.complete("%ranks auto ") == ["off", "on"] and arguments.complete("%ranks debug ") == []
    assert (
        arguments.complete("%ranks diff model --") == ["--atol", "--rtol"] and arguments.complete("%ranks diff ") == []
    )
