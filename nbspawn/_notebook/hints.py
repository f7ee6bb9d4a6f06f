"""What a user can do about a rank's error: one sentence for each of the commonest, by what the error says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from nbspawn._carried import magics
from nbspawn._payload.names import names_bound
from nbspawn._render.lines import strip_ansi
from nbspawn._state.wording import listed
from nbspawn.errors import RankExitedError, RankRaisedError

_MISSING = re.compile(r"(?:NameError|UndefinedVariableError): (?:name|local variable) '(\w+)' is not defined")
_KEY = re.compile(r"KeyError: '(\w+)'")
_RANKS_MAGIC = re.compile(r"\s*%%(spawn|ranks)\b.*\n?")


@dataclass(frozen=True)
class Situation:
    """What is known where an ``error`` has come: the notebook's ``shell``, whether the ranks are ``kept``, their
    ``backend``, and whether their process group was created again after an earlier error (``regrouped``)."""

    error: RankRaisedError | RankExitedError
    shell: Any
    kept: bool
    backend: str | None
    regrouped: bool


def of(situation: Situation) -> list[str]:
    """The hint for this error, if there is one."""
    for pattern, hint in _HINTS:
        if found := pattern.search(situation.error.summary):
            text = hint if isinstance(hint, str) else hint(found, situation)
            if text:
                return [text]
    return _of_globals(situation) or magics.advice(situation.shell, situation.error.summary)


def _of_globals(situation: Situation) -> list[str]:
    """``globals()['name']`` is a name, too."""
    if any("globals()" in strip_ansi(line) for line in situation.error.lines):
        if found := _KEY.search(situation.error.summary):
            return list(filter(None, [_of_name(found, situation)]))
    return []


def _of_name(found: re.Match[str], situation: Situation) -> str:
    """A variable that the ranks do not have, and all others that the cell will miss."""
    names = dict.fromkeys([found[1], *situation.error.missing])
    variables = situation.shell.user_ns
    unsent = [name for name in names if name in variables]
    if found[1] in variables:
        return _unsent(unsent, situation)
    elsewhere = _cells_with(names.keys() - set(unsent), situation.shell)
    if found[1] not in elsewhere:
        return ""
    number = elsewhere[found[1]]
    those = [name for name in names if elsewhere.get(name) == number]
    belong, them = ("belongs", "it") if len(those) == 1 else ("belong", "them")
    return (
        f"{listed(those)} {belong} to the ranks of cell [{number}], and these are others: import or define {them} in "
        "this cell, too, or in the notebook. `%%spawn N --keep` keeps ranks for further cells, which begin with "
        "`%%ranks`."
    )


def _unsent(names: Sequence[str], situation: Situation) -> str:
    one = len(names) == 1
    if situation.kept:
        return (
            f"{listed(names)} {'exists' if one else 'exist'} in the notebook, but not in the ranks: "
            f"%%ranks --push {','.join(names)} sends {'it' if one else 'them'}."
        )
    or_fork = "" if situation.error.host else ", or use -m fork"
    return f"{names[0]} was not sent, because the cell's code does not name it, or in a string only: name it{or_fork}."


def _cells_with(names: Iterable[str], shell: Any) -> dict[str, int]:
    """The number of the last of the earlier cells that ran in ranks and binds each name."""
    cells = shell.history_manager.input_hist_raw[:-1]
    left, found = set(names), dict[str, int]()
    for number in range(len(cells) - 1, 0, -1):
        if not left:
            break
        if (magic := _RANKS_MAGIC.match(cells[number])) is None:
            continue
        for name in left & names_bound(shell.transform_cell(cells[number][magic.end() :])):
            found[name] = number
        left -= found.keys()
    return found


def _no_group(_: re.Match[str], situation: Situation) -> str:
    if situation.backend:
        return (
            f"destroy_process_group() has destroyed the group that -b {situation.backend} made: leave it out, the "
            "ranks' end destroys the group."
        )
    return (
        "These ranks have no process group: `-b auto` (or gloo, nccl) on the %%spawn line makes one, as does "
        "torch.distributed.init_process_group() in the cell."
    )


def _group_twice(_: re.Match[str], situation: Situation) -> str:
    if situation.backend:
        return f"-b {situation.backend} has made the process group already: leave out init_process_group(), or -b."
    return "An earlier cell has made these ranks' process group: leave out init_process_group()." * situation.kept


def _old_group(_: re.Match[str], situation: Situation) -> str:
    return _MAKE_AGAIN * situation.regrouped


def _broken_gpu(_: re.Match[str], situation: Situation) -> str:
    return _RESTART * situation.kept


_MAKE_AGAIN = (
    "The process group was created again after an error. What was built on the old one must be created again, too: "
    "device meshes, FSDP models, subgroups, sharded optimizers."
)
_RESTART = (
    "What this rank does on its GPU fails from now on: %ranks restart starts the ranks again, without their variables."
)
_HINTS: Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str], Situation], str]]] = (
    (_MISSING, _of_name),
    (re.compile("Default process group has not been initialized"), _no_group),
    (re.compile("trying to initialize the default process group twice"), _group_twice),
    (
        re.compile("No backend type associated with device type cpu|Tensors must be CUDA and dense"),
        "NCCL moves tensors that are on a GPU: `tensor.to(device)` puts them on the rank's own; -b gloo moves others.",
    ),
    (
        re.compile("Expected all tensors to be on the same device"),
        "`device` is the rank's own one: move the model and each batch there, with `.to(device)`.",
    ),
    (
        re.compile("CUDA error: invalid device ordinal"),
        "This rank does not see so many GPUs: `device` is its own; `python -m nbspawn` shows which there are.",
    ),
    (
        re.compile("EADDRINUSE|[Aa]ddress already in use"),
        "Something has this port already, perhaps an earlier run. Every run has a free one: leave MASTER_PORT and "
        "init_method out, or have -b make the process group.",
    ),
    (re.compile("is not initialized in the world group map|is not registered, please create group"), _old_group),
    (
        re.compile(r"CUDA error: (device-side assert|an illegal|unspecified launch failure|misaligned address)"),
        _broken_gpu,
    ),
)
