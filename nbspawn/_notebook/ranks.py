"""``%ranks``: what lives, and what can be done to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from IPython.display import display

from nbspawn._engine.jobs import FunctionJob
from nbspawn._notebook import arguments
from nbspawn._notebook.auto import AutoMode
from nbspawn._notebook.verbs import VERBS
from nbspawn._rank import namespace
from nbspawn._render import stacks
from nbspawn._render.text import duration, size
from nbspawn._results import Results
from nbspawn._session import views
from nbspawn._session.options import CommandOptions
from nbspawn._session.pool import Pool
from nbspawn._state.run import name_ranks
from nbspawn.errors import UsageError

Sessions = dict[str, Pool]


def name_for(sessions: Sessions, given: Any) -> str:
    """The name for the ranks that ``%%spawn`` is about to start. Raises UsageError if there are some of that name."""
    _forget(sessions)
    name = given.name or ""
    if (given.keep or given.background) and name in sessions and sessions[name].alive:
        if given.keep or given.name:
            raise UsageError(
                f"{f'ranks of the name {name!r}' if name else 'kept ranks'} live already: `%ranks stop{_at(name)}` "
                "ends them, or start others under a --name of their own"
            )
    if given.background and not given.keep and not name:
        number = 1
        while f"bg{number}" in sessions:
            number += 1
        name = f"bg{number}"
    return name


def find(sessions: Sessions, name: str, auto: AutoMode) -> Pool:
    """The session of that name; without a name also the only one. Raises UsageError that says how to start one."""
    name = _only(sessions, name)
    session = sessions.get(name)
    off = " Auto mode is on: `%ranks auto off` has cells run in the notebook again." if auto.target == name else ""
    start = f"%%spawn 4 --keep{f' --name {name}' if name else ''}"
    if session is None:
        others = ", ".join(f"@{one}" for one in sessions if one)
        raise UsageError(
            f"there are no {_told(name)}: `{start}` starts some.{f' There are: {others}.' if others else ''}{off}"
        )
    if session.ended:
        raise UsageError(
            f"the {_told(name)} have ended ({session.ended}): `%ranks restart{_at(name)}` starts them again, without "
            f"their variables; `{start}` starts others.{off}"
        )
    return session


def do(line: str, sessions: Sessions, auto: AutoMode) -> Any:
    """``%ranks``, ``%ranks stop``, ``%ranks logs 1``; each with the name of a session behind it (``@eval``), the first
    two also with several. Raises UsageError for a line that is none of VERBS."""
    words = arguments.split(line, arguments.RANKS_PARSER)
    verb, *rest = [word for word in words if not word.startswith("@")] or [""]
    if verb not in _DO or len(rest) != bool(verb and _ARGUMENTS[verb]):
        expected = ", ".join(one.usage for one in VERBS)
        raise UsageError(f"unknown command {line!r}: expected one of {expected}; %ranks alone lists the ranks")
    return _DO[verb](_Asked(sessions, auto, words, rest[0] if rest else ""))


class _Asked:
    """What a line of ``%ranks`` asks for: the sessions that it names, and the argument of its verb."""

    def __init__(self, sessions: Sessions, auto: AutoMode, words: list[str], argument: str) -> None:
        self.sessions = sessions
        self.auto = auto
        self.argument = argument
        self._words = words

    @property
    def names(self) -> list[str]:
        """All that are named, or all that there are. Raises UsageError for one that is not there."""
        _forget(self.sessions)
        names = arguments.session_names(self._words)
        for name in names:
            if name not in self.sessions:
                find(self.sessions, name, self.auto)
        return names or list(self.sessions)

    @property
    def name(self) -> str:
        """The one that is named, or the only one. Raises UsageError for several."""
        return _only(self.sessions, arguments.session_name(self._words))

    @property
    def pool(self) -> Pool:
        """The ranks of that name, which live."""
        return find(self.sessions, self.name, self.auto)

    @property
    def ranks(self) -> list[int]:
        """The ranks that the argument names."""
        return arguments.selected([self.argument], self.pool.nprocs)


def pulled(pool: Pool, ranks: Sequence[int], name: str) -> Results[Any]:
    """A variable of each of these ranks. Raises RankRaisedError (a NameError) where there is none."""
    return pool.run(FunctionJob(namespace.variable, (name,)), CommandOptions(view=views.StreamView()), ranks)


def _list(asked: _Asked) -> None:
    tables = [_table(name, asked.sessions[name]) for name in asked.names]
    print("\n\n".join(tables) or _NONE)


def _stop(asked: _Asked) -> None:
    for name in asked.names:
        asked.sessions.pop(name).close()
        if asked.auto.target == name:
            _switch(asked.auto, None)


def _restart(asked: _Asked) -> None:
    name = asked.name
    pool = asked.sessions[name] if name in asked.sessions else asked.pool
    if not pool.options.keep:
        raise UsageError("these ranks run one cell in the background, and have nothing to start again")
    pool.restart()
    print(_table(name, pool))


def _interrupt(asked: _Asked) -> None:
    background = asked.pool.background
    if background is None or not background.cancel():
        print("the ranks are idle: there is nothing to interrupt")


def _wait(asked: _Asked) -> Any:
    background = asked.pool.background
    return background.wait() if background is not None else print("the ranks are idle")


def _logs(asked: _Asked) -> None:
    for rank in asked.ranks:
        print(asked.pool.log_path(rank))


def _stacks(asked: _Asked) -> None:
    looked = asked.pool.look()
    if looked is None:
        print("the ranks are idle")
        return
    found, run = looked
    now = time.monotonic()
    title = f"Where the ranks stand after {duration(now - run.started)}"
    data = {
        "text/plain": "\n".join([title, *stacks.text(found, run, now, views.source)]),
        "text/html": stacks.html(title, found, run, now, views.source, open_=True),
    }
    display(data, raw=True)


def _debug(asked: _Asked) -> None:
    ranks = asked.ranks
    if not asked.pool.debug(ranks):
        print(f"{name_ranks(ranks)}: idle; the debugger opens at the first line of the next cell")


def _auto(asked: _Asked) -> None:
    if asked.argument == "on":
        name = asked.name
        find(asked.sessions, name, asked.auto)
        _switch(asked.auto, name)
    elif asked.argument == "off":
        _switch(asked.auto, None)
    else:
        raise UsageError(f"auto mode is on or off, got {asked.argument!r}")


_DO: dict[str, Callable[[_Asked], Any]] = {
    "": _list,
    "stop": _stop,
    "restart": _restart,
    "interrupt": _interrupt,
    "wait": _wait,
    "stacks": _stacks,
    "debug": _debug,
    "logs": _logs,
    "auto": _auto,
}
_ARGUMENTS = {verb.name: verb.argument for verb in VERBS}


_NONE = "no ranks live: `%%spawn 4 --keep` starts some"


def _switch(auto: AutoMode, target: str | None) -> None:
    if target is not None:
        where = f"the kept ranks{f' @{target}' if target else ''}"
        print(f"auto mode is ON: every plain cell runs in {where}. `%ranks auto off` ends it.")
    elif auto.target is not None:
        print("auto mode is off: cells run in the notebook again.")
    auto.target = target


def end_of(sessions: Sessions) -> list[str]:
    """What to say of those that live when the extension is unloaded, and they end with it."""
    told = []
    for name, session in sessions.items():
        if not session.alive:
            continue
        if session.options.keep:
            again = f"`%%spawn {session.nprocs} --keep{f' --name {name}' if name else ''}` starts others"
            told.append(f"the {session.nprocs} kept ranks{_at(name)} have ended, and their variables are gone: {again}")
        else:
            told.append(f"the {session.nprocs} ranks in the background{_at(name)} have ended: run their cell again")
    return [f"nbspawn is unloaded: {one}" for one in told]


def _only(sessions: Sessions, name: str) -> str:
    """Who has no name given means the session without one, or the only one."""
    _forget(sessions)
    return next(iter(sessions)) if not name and "" not in sessions and len(sessions) == 1 else name


def _forget(sessions: Sessions) -> None:
    """What ran in the background and has ended has said all; of kept ranks the end has still to be told."""
    for name, pool in list(sessions.items()):
        pool.tidy()
        if not (pool.alive or (pool.options.keep and pool.ended)):
            del sessions[name]


def _table(name: str, session: Pool) -> str:
    head = f"{session.nprocs} ranks{_at(name)}"
    if session.ended:
        return f"{head} · ended: {session.ended}"
    lines = [
        f"{head} · {session.how} · for {duration(time.monotonic() - session.since)}",
        f"rank  {'state':<18}  {'pid':<8}  {'memory':>7}  device",
    ]
    states = session.states()
    for rank, (pid, (memory, device)) in enumerate(zip(session.pids(), session.memory(), strict=True)):
        on = "cpu" if device < 0 else f"cuda, {size(device)}"
        lines.append(f"{rank:>4}  {states[rank]:<18}  {pid:<8}  {size(memory):>7}  {on}")
    return "\n".join(lines)


def _at(name: str) -> str:
    return f" @{name}" if name else ""


def _told(name: str) -> str:
    return f"kept ranks of the name {name!r}" if name else "kept ranks"
