"""What the options of ``%%spawn`` and ``%%ranks`` accept: text to value, or one sentence about what is wrong."""

from __future__ import annotations

import argparse
import builtins
import keyword
import re

from nbspawn._accelerators.kinds import WORDS

_IPYTHONS = re.compile(r"In|Out|get_ipython|exit|quit|_{1,3}|_i{1,3}|_i?\d+|_(dh|ih|oh|sh|exit_code)")
"""IPython's own variables in the notebook's namespace: without get_ipython no magic works any more."""


def ranks(text: str) -> int | str:
    """A number of ranks, or a keyword for one."""
    if text in WORDS:
        return text
    try:
        return int(text)
    except ValueError:
        words = ", ".join(WORDS)
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of ranks nor one of {words}") from None


def numbers(text: str) -> list[int]:
    """The numbers of devices, or of ranks."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,2")
    return list(map(int, text.split(",")))


def count(text: str) -> int:
    """A number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of 1 or more, got {text!r}")
    return int(text)


def setting(text: str) -> tuple[str, str]:
    """An environment variable and its value."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def variable(text: str) -> str:
    """The name of a variable that may be bound in the notebook."""
    if not text.isidentifier():
        refusal = "cannot be the name of a variable"
    elif keyword.iskeyword(text):
        refusal = "is a Python keyword: choose another name"
    elif _IPYTHONS.fullmatch(text):
        refusal = "is one of IPython's own variables: choose another name"
    elif text.startswith("__") and text.endswith("__"):
        refusal = "is reserved by Python, as every name with two underscores at both ends: choose another"
    elif hasattr(builtins, text):
        refusal = "is a Python builtin, which the notebook needs: choose another name"
    else:
        return text
    raise argparse.ArgumentTypeError(f"{text!r} {refusal}")


def name(text: str) -> str:
    """A name of ranks."""
    if not re.fullmatch(r"\w+", text):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a name: use letters, digits and _")
    return text


def names(text: str) -> list[str]:
    """Several names of variables."""
    return [variable(word) for word in text.split(",")]


def which(text: str) -> str:
    """Ranks, or the name of some, as they were typed."""
    if not re.fullmatch(r"@\w+|{0}(,{0})*".format(r"(-?\d+|(-?\d+)?:(-?\d+)?)"), text):
        raise argparse.ArgumentTypeError(f"{text!r} is neither ranks, such as 0,2 or 1:, nor a name, such as @eval")
    return text
