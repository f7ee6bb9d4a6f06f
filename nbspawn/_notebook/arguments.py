"""The options of ``%%spawn`` and ``%%ranks``: their names, their help and their completion."""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from nbspawn._accelerators.kinds import WORDS
from nbspawn._engine import clusters
from nbspawn._notebook import argument_types, verbs

if TYPE_CHECKING:
    from nbspawn._engine.options import LaunchOptions
    from nbspawn._session.options import CommandOptions
    from nbspawn._session.views import View

VIEWS = ("auto", "widget", "html", "text", "quiet")


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would print and exit."""

    def error(self, message: str) -> NoReturn:
        """The error in one line, and where the options are listed."""
        from nbspawn.errors import UsageError  # imports torch, which %load_ext must not wait for

        raise UsageError(f"{message}{self._meant(message)}. {self.prog}? lists the options.")

    def _meant(self, message: str) -> str:
        unknown = re.match(r"unrecognized arguments: (-\S+)", message)
        options = (option for action in self._actions for option in action.option_strings)
        close = difflib.get_close_matches(unknown[1], options, 1) if unknown else []
        return f" (did you mean {close[0]}?)" if close else ""


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
        type=argument_types.ranks,
        nargs="?",
        help="how many ranks: a number, cpu (one per core), gpu (one per GPU), xla or tpu (one per TPU chip, by "
        "torch_xla or torch_tpu), auto (default: one per GPU or TPU chip where there is one, else one per core); with "
        "--on a number",
    )
    where = ", or ".join(f"{kind.usage}, {kind.nodes}" for kind in clusters.KINDS.values())
    add(
        "--on",
        metavar="WHERE",
        default="local",
        help=f"where the ranks run: local (default), or {where}",
    )
    add("--nnodes", metavar="K", type=argument_types.count, help="how many nodes of the cluster to use")
    add(
        "--nproc-per-node",
        metavar="M",
        type=argument_types.count,
        help="ranks per node, as under torchrun: NPROCS is K times M",
    )
    add(
        "-m",
        "--start-method",
        choices=("auto", "fork", "forkserver", "spawn"),
        default="auto",
        help="how ranks are started (default auto: the fork server if all that the cell uses can be pickled, else fork "
        "if that is safe)",
    )
    add(
        "-b",
        "--backend",
        metavar="NAME",
        help="make and destroy the process group: gloo, nccl, xla (torch_xla), tpu_dist (torch_tpu), or auto (the one "
        "that fits)",
    )
    _add_common(add)
    add(
        "--env",
        metavar="K=V",
        type=argument_types.setting,
        nargs="+",
        action="extend",
        default=[],
        help="environment variables of the ranks",
    )
    seen = "the GPUs that the ranks may use, of those that the kernel sees (default: all)"
    add("--devices", metavar="0,2", type=argument_types.numbers, help=seen)
    add(
        "--threads",
        metavar="N",
        type=argument_types.count,
        help="intra-op threads per rank (default: OMP_NUM_THREADS, else the cores divided by the ranks)",
    )
    add(
        "--seed",
        metavar="N",
        type=int,
        help="rank r seeds random, numpy and torch with N + r (default: different random numbers in each run)",
    )
    add(
        "--log-dir",
        metavar="DIR",
        help="write each rank's whole output here, and keep it (default: a private directory)",
    )
    add("-k", "--keep", action="store_true", help="keep the ranks alive, with their variables, for %%%%ranks")
    add(
        "--name",
        metavar="NAME",
        type=argument_types.name,
        help="a name for kept ranks or a run in the background: %%%%ranks @NAME",
    )
    add(
        "--autoreload",
        action="store_true",
        help="kept ranks reload modules that were edited on disk, before each later cell",
    )
    add(
        "--idle-timeout",
        metavar="S",
        type=float,
        help="end kept ranks that have been idle for S seconds",
    )
    add("--debugpy", action="store_true", help="listen for VS Code's debugger in each rank, on a loopback port")
    _add_seen(add)
    return parser


def _add_common(add: Callable[..., Any]) -> None:
    add(
        "-o",
        "--out",
        metavar="NAME",
        type=argument_types.variable,
        help="bind the results, a sequence by rank, to NAME; with --background the handle",
    )
    add(
        "-t",
        "--timeout",
        metavar="S",
        type=float,
        help="stop the ranks after S seconds and show where each one was",
    )
    add(
        "-g",
        "--grace-period",
        metavar="S",
        type=float,
        help="seconds between KeyboardInterrupt and SIGTERM when ranks are stopped (default 3)",
    )


def _add_seen(add: Callable[..., Any]) -> None:
    add("--background", action="store_true", help="return a handle at once; the run continues while later cells run")
    add("--pdb", action="store_true", help="open the debugger in a rank that raises, at the line that raised")
    add(
        "--locals",
        dest="show_locals",
        action="store_true",
        help="show the variables of the frame that raised, in the error",
    )
    add("--view", choices=VIEWS, default="auto", help="how to show it (default auto: html with buttons in notebooks)")
    add("--profile", action="store_true", help="unfold the profile: time by line and by rank")
    add(
        "--timings",
        action="store_true",
        help="show how long payload, start, rendezvous, run, results and teardown took",
    )
    add(
        "--local-ranks-filter",
        metavar="0,1",
        type=argument_types.numbers,
        help="show the output of these ranks only (the logs contain all); numbers as in the table, also with --nnodes",
    )
    add("-h", "--help", action="store_true", help="show this and run nothing")


def _ranks_parser() -> Parser:
    parser = Parser(
        prog="%%ranks",
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run this cell in the ranks that %%spawn --keep has kept alive: in all, or in the selected ones.",
        epilog=verbs.explained(),
    )
    add = parser.add_argument
    add(
        "which",
        metavar="WHICH",
        type=argument_types.which,
        nargs="*",
        help="ranks, such as 0,2 or 1:, and a session's name: @eval",
    )
    _add_common(add)
    add(
        "--push",
        metavar="A,B",
        type=argument_types.names,
        default=[],
        help="send these variables of the notebook to the ranks",
    )
    add(
        "--autoreload",
        action="store_true",
        help="from now on these ranks reload modules that were edited on disk, before each cell",
    )
    add("--auto", action="store_true", help=argparse.SUPPRESS)  # in auto mode the cell has no magic line
    add(
        "--pull",
        metavar="A,B",
        type=argument_types.names,
        default=[],
        help="fetch these variables, each as a sequence by rank",
    )
    _add_seen(add)
    return parser


PARSER = _parser()
RANKS_PARSER = _ranks_parser()


@functools.lru_cache(maxsize=64)
def parse(line: str, parser: Parser = PARSER) -> Any:
    """The options as a namespace, cached by line. Raises UsageError with a one-line message."""
    words = split(line, parser)
    options = {option for action in parser._actions for option in action.option_strings}
    for word in words:
        if len(word) > 2 and word[0] == "-" and f"-{word}" in options:  # argparse reads -backend as -b ackend
            parser.error(f"{word} is no option (did you mean -{word}?)")
    return parser.parse_args(words)


def launch_options(given: Any, call_pdb: bool) -> LaunchOptions:
    """How to start the ranks, from the ``%%spawn`` line; ``call_pdb`` is IPython's ``%pdb on``. Raises UsageError."""
    from nbspawn._engine.options import LaunchOptions, options_of  # imports torch

    changed = {"nprocs": _nprocs(given), "env": dict(given.env), "pdb": given.pdb or call_pdb}
    return options_of(LaunchOptions, {**vars(given), **changed})


def _nprocs(given: Any) -> int | str | None:
    nprocs: int | str | None = given.nprocs
    if given.nproc_per_node:
        nodes = clusters.nodes(given.on, given.nnodes) if clusters.is_one(given.on) else given.nnodes or 1
        if nprocs not in (None, given.nproc_per_node * nodes):
            PARSER.error(
                f"--nnodes {nodes} times --nproc-per-node {given.nproc_per_node} is not NPROCS {nprocs}: "
                "leave one of them out"
            )
        return int(given.nproc_per_node) * nodes
    return nprocs


def command_options(
    given: Any, call_pdb: bool, view: View | None, banner: str, explain: Callable[[BaseException], None]
) -> CommandOptions:
    """How to run the cell, from the ``%%spawn`` or ``%%ranks`` line. Raises UsageError."""
    from nbspawn._engine.options import options_of  # imports torch
    from nbspawn._session.options import CommandOptions

    changed = {"view": view, "pdb": given.pdb or call_pdb, "banner": banner, "explain": explain}
    return options_of(CommandOptions, {**vars(given), **changed})


def split(line: str, parser: Parser) -> list[str]:
    """The words of a line, quoted as for a shell. Raises UsageError for an unclosed quote."""
    try:
        return shlex.split(line)
    except ValueError as error:
        parser.error(f"{error} in {line!r}")


_DIFF = re.compile(
    r"(?P<first>(@\w+\s+)*)diff(?!\w)(?P<then>(\s+@\w+)*)(?P<given>.*?)(?P<last>(\s@\w+)*)\s*", re.DOTALL
)


def of_diff(line: str) -> tuple[list[str], str] | None:
    """The words ``@name`` of a line such as ``diff model --rtol 1e-5 @eval``, and what is to be compared, which may
    contain quotes and spaces, and ``a @ b``. None for any other line."""
    found = _DIFF.fullmatch(line)
    if found is None:
        return None
    return " ".join(found[name] for name in ("first", "then", "last")).split(), found["given"]


def selected(which: list[str], nprocs: int) -> list[int]:
    """The ranks, of ``nprocs``, that ``0,2`` or ``1:`` selects; all if ``which`` names none. Raises UsageError for a
    rank that does not exist, or an empty selection."""
    try:
        parts = [part for word in which if not word.startswith("@") for part in argument_types.which(word).split(",")]
    except argparse.ArgumentTypeError as error:
        RANKS_PARSER.error(str(error))
    if not parts:
        return list(range(nprocs))
    chosen: set[int] = set()
    for part in parts:
        if ":" in part:
            first, _, last = part.partition(":")
            chosen.update(range(nprocs)[slice(int(first) if first else None, int(last) if last else None)])
        elif -nprocs <= int(part) < nprocs:
            chosen.add(range(nprocs)[int(part)])
        else:
            RANKS_PARSER.error(f"there is no rank {part}: the ranks are 0 to {nprocs - 1}")
    if not chosen:
        RANKS_PARSER.error(f"{' '.join(which)} selects none of the {nprocs} ranks")
    return sorted(chosen)


def session_names(which: list[str]) -> list[str]:
    """The names after ``@``, without duplicates. Raises UsageError for an invalid name."""
    names = [word[1:] for word in which if word.startswith("@")]
    try:
        return list(dict.fromkeys(map(argument_types.name, names)))
    except argparse.ArgumentTypeError as error:
        RANKS_PARSER.error(str(error))


def session_name(which: list[str]) -> str:
    """The only name after ``@``; '' if none is given. Raises UsageError for several."""
    names = session_names(which)
    if len(names) > 1:
        given = " and ".join(f"@{name}" for name in names)
        RANKS_PARSER.error(f"expected one session, got {len(names)}: {given}")
    return names[0] if names else ""


def complete(line: str) -> list[str]:
    """Completions for a ``%%spawn``, ``%%ranks`` or ``%ranks`` line that ends at the cursor."""
    words = line.split()
    partial = "" if line.endswith(" ") or len(words) < 2 else words[-1]
    before = words[-1] if not partial else words[-2]
    if words[0] == "%ranks":
        if " diff " in line:
            return [option for option in ("--atol", "--rtol") if partial and option.startswith(partial)]
        words = [verb.name for verb in verbs.VERBS] if before == "%ranks" else []
        words += [
            word
            for verb in verbs.VERBS
            if verb.name == before
            for word in verb.argument.strip("[]").split("|")
            if word.islower()
        ]
        return sorted(word for word in words if word.startswith(partial))
    parser = RANKS_PARSER if words[0] == "%%ranks" else PARSER
    for action in parser._actions:
        if before in action.option_strings:
            if action.choices:
                return [choice for choice in action.choices if choice.startswith(partial)]
            if action.nargs != 0:
                return []
    options = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    words = [*WORDS] if parser is PARSER and partial else []
    return [word for word in (*options, *words) if word.startswith(partial)]
