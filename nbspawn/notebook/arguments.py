"""The options of ``%%spawn``: their names, their help, their checks and their completion."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

VIEWS = ("auto", "widget", "html", "text", "quiet")
_WORDS = ("auto", "cpu", "gpu")


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        """One line, and where to read more."""
        from nbspawn.errors import UsageError  # has torch in its train, which %load_ext must not wait for

        raise UsageError(f"{message}. %%spawn? lists the options.")


def _ranks(text: str) -> int | str:
    if text in _WORDS:
        return text
    try:
        return int(text)
    except ValueError:
        words = ", ".join(_WORDS)
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of ranks nor one of {words}") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def _threads(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads (1 or more)")
    return int(text)


def _devices(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of device numbers such as 0,2") from None


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _variable(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be the name of a variable")
    return text


def _parser() -> Parser:
    parser = Parser(
        prog="%%spawn",
        add_help=False,
        allow_abbrev=False,
        description="Run this cell in NPROCS new ranks, show them, and return their values.",
        epilog="In the cell: rank, world_size, local_rank, device, and torchrun's environment variables.",
    )
    add = parser.add_argument
    add(
        "nprocs",
        metavar="NPROCS",
        type=_ranks,
        nargs="?",
        default="auto",
        help="how many ranks: a number, cpu (one a core), gpu (one a GPU), auto (default: gpu where there is one)",
    )
    add(
        "-m",
        "--start-method",
        choices=("auto", "fork", "forkserver", "spawn"),
        default="auto",
        help="how the ranks' processes are made (default auto: the fork server where what the cell uses can travel)",
    )
    add("-b", "--backend", metavar="NAME", help="make and destroy the process group: gloo, nccl")
    add("-o", "--out", metavar="NAME", type=_variable, help="bind the results, a sequence by rank, to NAME")
    add("-t", "--timeout", metavar="S", type=_seconds, help="stop the ranks after S seconds and say where they stood")
    add(
        "-g",
        "--grace-period",
        metavar="S",
        type=_seconds,
        help="seconds between KeyboardInterrupt and SIGTERM when ranks have to be stopped (default 3)",
    )
    add("--env", metavar="K=V", type=_setting, nargs="+", action="extend", default=[], help="environment of the ranks")
    add("--devices", metavar="0,2", type=_devices, help="the GPUs that the ranks may use (default: all)")
    add(
        "--threads",
        metavar="N",
        type=_threads,
        help="threads of torch's operations in each rank (default: OMP_NUM_THREADS, else the cores shared out)",
    )
    add(
        "--log-dir", metavar="DIR", help="where each rank's whole output goes, and stays (default: a private directory)"
    )
    add("--pdb", action="store_true", help="open the debugger in a rank that raises, at the line that raised")
    add("--debugpy", action="store_true", help="have each rank listen for VS Code's debugger, on a loopback port")
    add("--locals", action="store_true", help="show the variables of the frame that raised, in the error")
    add("--view", choices=VIEWS, default="auto", help="how the run is shown (default auto: html in notebooks)")
    add("--lines", action="store_true", help="show where the time went, line by line and rank by rank, after the run")
    add("-h", "--help", action="store_true", help="show this and run nothing")
    return parser


PARSER = _parser()


def parse(line: str) -> Any:
    """The options as a namespace. Raises UsageError, one line that says what to do."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        PARSER.error(f"{error} in {line!r}")
    return PARSER.parse_args(words)


def complete(line: str) -> list[str]:
    """What may come next on a ``%%spawn`` line that ends where the cursor is."""
    words = line.split()
    partial = "" if line.endswith(" ") or len(words) < 2 else words[-1]
    before = words[-1] if not partial else words[-2]
    for action in PARSER._actions:
        if before in action.option_strings:
            if action.choices:
                return [choice for choice in action.choices if choice.startswith(partial)]
            if action.nargs != 0:
                return []
    options = [option for action in PARSER._actions for option in action.option_strings if option.startswith("--")]
    return [word for word in ([*options, *_WORDS] if partial else options) if word.startswith(partial)]
