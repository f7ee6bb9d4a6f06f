"""``%ranks``: what lives, and what can be done to it."""

from __future__ import annotations

import time
from typing import Any, NoReturn

from IPython.display import display

from nbspawn._notebook import arguments
from nbspawn._notebook.auto import AutoMode
from nbspawn._render import stacks
from nbspawn._render.text import duration, size
from nbspawn._session import views
from nbspawn._session_api import Session
from nbspawn._state.run import name_ranks
from nbspawn.errors import UsageError

Sessions = dict[str, Session]


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


def find(sessions: Sessions, name: str, auto: AutoMode) -> Session:
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
    two also with several."""
    words = arguments.split(line, arguments.RANKS_PARSER)
    verb = [word for word in words if not word.startswith("@")]
    if verb == []:
        tables = [_table(name, sessions[name]) for name in _asked(sessions, words, auto)]
        print("\n\n".join(tables) or _NONE)
        return None
    if verb == ["stop"]:
        for name in _asked(sessions, words, auto):
            sessions.pop(name).close()
            if auto.target == name:
                _switch(auto, None)
        return None
    given = arguments.session_name(words)
    name = _only(sessions, given)
    match verb:
        case ["auto", "on"]:
            find(sessions, name, auto)
            _switch(auto, name)
        case ["auto", "off"] if not given:
            _switch(auto, None)
        case ["restart"]:
            if name not in sessions:
                find(sessions, name, auto)
            if not sessions[name].options.keep:
                raise UsageError("these ranks run one cell in the background, and have nothing to start again")
            sessions[name].restart()
            print(_table(name, sessions[name]))
        case ["interrupt"]:
            session = find(sessions, name, auto)
            if session.behind is None or session.behind.done:
                print("the ranks are idle: there is nothing to interrupt")
            else:
                session.behind.interrupt()
        case ["wait"]:
            session = find(sessions, name, auto)
            return session.behind.wait() if session.behind is not None else print("the ranks are idle")
        case ["logs", which]:
            session = find(sessions, name, auto)
            for number in arguments.selected([which], session.nprocs):
                print(session.log_path(number))
        case ["stacks"]:
            _show_stacks(find(sessions, name, auto))
        case ["debug", which]:
            session = find(sessions, name, auto)
            ranks = arguments.selected([which], session.nprocs)
            if not session.debug(ranks):
                print(f"{name_ranks(ranks)}: idle; the debugger opens at the first line of the next cell")
        case _:
            _refuse(line)
    return None


def _asked(sessions: Sessions, words: list[str], auto: AutoMode) -> list[str]:
    """The names of the sessions that are meant, all if none is named. Raises UsageError for one that is not there."""
    _forget(sessions)
    names = arguments.session_names(words)
    for name in names:
        if name not in sessions:
            find(sessions, name, auto)
    return names or list(sessions)


_NONE = "no ranks live: `%%spawn 4 --keep` starts some"


def _switch(auto: AutoMode, target: str | None) -> None:
    if target is not None:
        where = f"the kept ranks{f' @{target}' if target else ''}"
        print(f"auto mode is ON: every plain cell runs in {where}. `%ranks auto off` ends it.")
    elif auto.target is not None:
        print("auto mode is off: cells run in the notebook again.")
    auto.target = target


def _show_stacks(session: Session) -> None:
    looked = session.look()
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


def _refuse(line: str) -> NoReturn:
    words = ", ".join({"logs": "logs R", "debug": "debug R", "auto": "auto on|off"}.get(w, w) for w in arguments.WORDS)
    raise UsageError(f"%ranks {line}: what should that do? It takes {words}; %ranks alone shows what lives.")


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
    for name in [name for name, one in sessions.items() if not (one.alive or (one.options.keep and one.ended))]:
        del sessions[name]


def _table(name: str, session: Session) -> str:
    head = f"{session.nprocs} ranks{_at(name)}"
    if session.ended:
        return f"{head} · ended: {session.ended}"
    lines = [
        f"{head} · {session.how} · for {duration(time.monotonic() - session.since)}",
        f"rank  {'state':<18}  {'pid':<8}  {'memory':>7}  device",
    ]
    states = session.states()
    for rank, (pid, (memory, device)) in enumerate(zip(session.pids, session.memory(), strict=True)):
        on = "cpu" if device < 0 else f"cuda, {size(device)}"
        lines.append(f"{rank:>4}  {states[rank]:<18}  {pid:<8}  {size(memory):>7}  {on}")
    return "\n".join(lines)


def _at(name: str) -> str:
    return f" @{name}" if name else ""


def _told(name: str) -> str:
    return f"kept ranks of the name {name!r}" if name else "kept ranks"
