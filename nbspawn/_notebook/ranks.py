"""``%ranks``: lists the kept ranks and the background runs, and acts on them."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from IPython.display import display

from nbspawn._accelerators.accelerator import Load
from nbspawn._engine.jobs import FunctionJob
from nbspawn._notebook import arguments
from nbspawn._notebook.auto import AutoMode
from nbspawn._notebook.verbs import VERBS
from nbspawn._protocol.questions import COLLECTIVES, MEMORY, VARIABLES
from nbspawn._rank import jobs
from nbspawn._render import collectives, kept, memory, variables
from nbspawn._render.kept import KeptRank
from nbspawn._render.report import Report
from nbspawn._render.text import duration
from nbspawn._results import Results
from nbspawn._session import comparison, views
from nbspawn._session.options import CommandOptions
from nbspawn._session.pool import Pool
from nbspawn._session.pool import kept as kept_pools
from nbspawn._state.run import Run
from nbspawn._state.whereabouts import line_of
from nbspawn._state.wording import name_ranks
from nbspawn.errors import UsageError

Sessions = dict[str, Pool]


def name_for(sessions: Sessions, given: Any) -> str:
    """The name for the ranks that ``%%spawn`` is about to start. Raises UsageError if it is in use."""
    _forget(sessions)
    name = given.name or ""
    if (given.keep or given.background) and name in sessions and sessions[name].alive:
        if given.keep or given.name:
            raise UsageError(
                f"{f'ranks named {name!r}' if name else 'kept ranks'} are alive already: end them with "
                f"`%ranks stop{_at(name)}`, or give the new ranks another --name"
            )
    if given.background and not given.keep and not name:
        number = 1
        while f"bg{number}" in sessions:
            number += 1
        name = f"bg{number}"
    return name


def find(sessions: Sessions, name: str, auto: AutoMode) -> Pool:
    """The session of that name; for '' also the only session. Raises UsageError, with how to start one."""
    name = _only(sessions, name)
    session = sessions.get(name)
    off = " Auto mode is on: with `%ranks auto off` cells run in the notebook again." if auto.target == name else ""
    start = f"%%spawn 4 --keep{f' --name {name}' if name else ''}"
    if session is None:
        others = ", ".join(f"@{one}" for one in sessions if one)
        raise UsageError(
            f"there are no {_kept_ranks(name)}: `{start}` starts some.{f' There are: {others}.' if others else ''}{off}"
        )
    if session.ended:
        raise UsageError(
            f"the {_kept_ranks(name)} have ended ({session.ended}): `%ranks restart{_at(name)}` starts them again, "
            f"without their variables; `{start}` starts others.{off}"
        )
    return session


def do(line: str, sessions: Sessions, auto: AutoMode) -> Any:
    """Run a line such as ``%ranks``, ``%ranks stop`` or ``%ranks logs 1``. The name of a session may follow
    (``@eval``), for the first two also several. Raises UsageError for a line that is none of VERBS."""
    if (given := arguments.of_diff(line.strip())) is not None:
        return _HANDLERS["diff"](_Request(sessions, auto, *given))
    words = arguments.split(line, arguments.RANKS_PARSER)
    verb, *rest = [word for word in words if not word.startswith("@")] or [""]
    argument = _ARGUMENTS.get(verb, "")
    if verb not in _HANDLERS:
        close = difflib.get_close_matches(verb, _HANDLERS, 1)
        meant = f" (did you mean `%ranks {close[0]}`?)" if close else ""
        expected = ", ".join(one.usage for one in VERBS)
        raise UsageError(f"unknown command {line!r}{meant}: expected one of {expected}; %ranks alone lists the ranks")
    if not bool(argument) - argument.startswith("[") <= len(rest) <= bool(argument):
        got = repr(" ".join(rest)) if rest else "nothing"
        raise UsageError(f"`%ranks {verb}` expects {argument or 'nothing more'}, got {got}")
    return _HANDLERS[verb](_Request(sessions, auto, words, rest[0] if rest else ""))


class _Request:
    """A line of ``%ranks``: the sessions that it names, and the argument of its verb."""

    def __init__(self, sessions: Sessions, auto: AutoMode, words: list[str], argument: str) -> None:
        self.sessions = sessions
        self.auto = auto
        self.argument = argument
        self._words = words

    @property
    def names(self) -> list[str]:
        """The named sessions; all, if none is named. Raises UsageError for a name that does not exist."""
        _forget(self.sessions)
        names = arguments.session_names(self._words)
        for name in names:
            if name not in self.sessions:
                find(self.sessions, name, self.auto)
        return names or list(self.sessions)

    @property
    def named(self) -> bool:
        """Does the line name a session?"""
        return bool(arguments.session_names(self._words))

    @property
    def name(self) -> str:
        """The named session, or the only one. Raises UsageError for several."""
        return _only(self.sessions, arguments.session_name(self._words))

    @property
    def pool(self) -> Pool:
        """The pool of that session. Raises UsageError if its ranks have ended."""
        return find(self.sessions, self.name, self.auto)

    @property
    def ranks(self) -> list[int]:
        """The ranks that the argument selects."""
        return arguments.selected([self.argument], self.pool.nprocs)


def pulled(pool: Pool, ranks: Sequence[int], name: str) -> Results[Any]:
    """A variable of each of these ranks. Raises RankRaisedError (a NameError) if a rank does not have it."""
    return pool.run(FunctionJob(jobs.variable, (name,)), CommandOptions(view=views.StreamView()), ranks)


def _list(request: _Request) -> None:
    tables = [_table(name, request.sessions[name]) for name in request.names]
    if not request.named:
        others = (pool for pool in kept_pools() if pool not in request.sessions.values())
        tables += [kept.text(*idle_table(pool, " of a Session")) for pool in others]
    print("\n\n".join(tables) or _NONE)


def _stop(request: _Request) -> None:
    names = request.names
    if not names:
        print(_NONE)
    for name in names:
        pool = request.sessions.pop(name)
        pool.close()
        print(f"{name_ranks(range(pool.nprocs))}{_at(name)}: ended.")
        if request.auto.target == name:
            _switch(request.auto, None)


def _restart(request: _Request) -> None:
    name = request.name
    pool = request.sessions[name] if name in request.sessions else request.pool
    if not pool.options.keep:
        raise UsageError("ranks that run one cell in the background cannot be restarted: run the cell again")
    pool.restart()
    print(_table(name, pool))


def _interrupt(request: _Request) -> None:
    background = request.pool.background
    if background is None or not background.cancel():
        print("the ranks are idle: there is nothing to interrupt")


def _wait(request: _Request) -> Any:
    background = request.pool.background
    return background.wait() if background is not None else print("the ranks are idle")


def _logs(request: _Request) -> None:
    for rank in request.ranks:
        print(request.pool.log_path(rank))


def _stacks(request: _Request) -> None:
    if request.argument not in ("", "native"):
        raise UsageError(f"`%ranks stacks` expects nothing or native, got {request.argument!r}")
    supervisor = request.pool.supervisor
    if supervisor is None:
        print("the ranks are idle")
    else:
        display(supervisor.report(f"{request.argument} stacks".strip()).data, raw=True)


def _collectives(request: _Request) -> None:
    pool = request.pool
    supervisor = pool.supervisor
    report = supervisor.report("collectives") if supervisor is not None else _idle_collectives(pool)
    display(report.data, raw=True)


def _idle_collectives(pool: Pool) -> Report:
    reports = pool.ask(COLLECTIVES)
    run = Run.new(pool.nprocs, "", "", "", time.monotonic(), names=pool.names).of_kept(())
    return collectives.report(f"Collectives of {pool.nprocs} idle ranks", reports, views.snapshot(run))


def _vars(request: _Request) -> None:
    pool = request.pool
    display(variables_of(pool, _at(request.name)).data, raw=True)


def variables_of(pool: Pool, name: str = "") -> Report:
    """What ``%ranks vars`` shows."""
    return variables.report(f"Variables of {pool.nprocs} ranks{name}", pool.ask(VARIABLES), pool.nprocs)


def _memory(request: _Request) -> None:
    pool = request.pool
    title = f"Memory of {pool.nprocs} ranks{_at(request.name)}"
    display(memory.report(title, pool.ask(MEMORY), pool.nprocs).data, raw=True)


def _debug(request: _Request) -> None:
    ranks = request.ranks
    pool = request.pool
    if not pool.debug(ranks):
        print(f"{name_ranks(ranks)}: idle; the debugger opens at the first line of the next cell")
    elif pool.background is not None:
        for rank in pool.background.run.ranks:
            if rank.state == "paused" and rank.rank in ranks:
                line = line_of(pool.background.run, rank.position.frames)
                print(f"rank {rank.rank}: paused at {line}, in the notebook's own debugger")


def _diff(request: _Request) -> None:
    expression, tolerance = comparison.parse(request.argument)
    pool = request.pool
    print(pool.compare(range(pool.nprocs), expression, tolerance, _at(request.name)))


def _auto(request: _Request) -> None:
    if request.argument == "on":
        name = request.name
        find(request.sessions, name, request.auto)
        _switch(request.auto, name)
    elif request.argument == "off" and not request.named:
        _switch(request.auto, None)
    elif request.argument == "off":
        raise UsageError("`%ranks auto off` takes no name: auto mode is off for all sessions then")
    else:
        raise UsageError(f"`%ranks auto` expects on or off, got {request.argument!r}")


def _release(request: _Request) -> None:
    agents = sys.modules.get("nbspawn._engine.cluster.agents")
    count = agents.release() if agents is not None else 0
    print(f"{count} node{'s' * (count != 1)} given back." if count else "no node of a cluster is held for later runs.")


def _help(request: _Request) -> None:
    print(arguments.RANKS_PARSER.format_help())


# The function of each command has its name: _stop, _vars.
_HANDLERS: dict[str, Callable[[_Request], Any]] = {verb.name: globals()[f"_{verb.name}"] for verb in VERBS}
_HANDLERS[""] = _list
_ARGUMENTS = {verb.name: verb.argument for verb in VERBS}


_NONE = "no ranks are alive: `%%spawn 4 --keep` starts some"


def _switch(auto: AutoMode, target: str | None) -> None:
    if target is not None:
        where = f"the kept ranks{f' @{target}' if target else ''}"
        print(f"auto mode is ON: every plain cell runs in {where}. `%ranks auto off` ends it.")
    elif auto.target is not None:
        print("auto mode is off: cells run in the notebook again.")
    auto.target = target


def ending_notices(sessions: Sessions) -> list[str]:
    """A notice for each session that is alive when the extension is unloaded, and ends with it."""
    notices = []
    for name, session in sessions.items():
        if not session.alive:
            continue
        if session.options.keep:
            again = f"`%%spawn {session.nprocs} --keep{f' --name {name}' if name else ''}` starts others"
            notices.append(f"the {session.nprocs} kept ranks{_at(name)} have ended, with their variables: {again}")
        else:
            notices.append(f"the {session.nprocs} ranks in the background{_at(name)} have ended: run their cell again")
    return [f"nbspawn is unloaded: {notice}" for notice in notices]


def _only(sessions: Sessions, name: str) -> str:
    """The name of the session that is meant: '' is the one without a name, or else the only one."""
    _forget(sessions)
    return next(iter(sessions)) if not name and "" not in sessions and len(sessions) == 1 else name


def _forget(sessions: Sessions) -> None:
    """Drop background runs that have ended. Kept ranks that have ended stay: the reason must still be shown."""
    for name, pool in list(sessions.items()):
        if not pool.alive:
            pool.tidy()
            if not (pool.options.keep and pool.ended):
                del sessions[name]


def _table(name: str, session: Pool) -> str:
    return kept.text(*idle_table(session, _at(name)))


def idle_table(pool: Pool, name: str = "") -> tuple[str, list[KeptRank]]:
    """The heading, and the ranks; none if they have ended. ``name`` follows the number of ranks."""
    head = f"{pool.nprocs} ranks{name}"
    if pool.ended or not pool.how:
        return f"{head} · {f'ended: {pool.ended}' if pool.ended else 'not started yet'}", []
    ranks = [
        # Who is idle does not look at its device: how busy that is now, and how full, is not known.
        KeptRank(rank, state, pid, memory, on_device, Load(load.number) if state == "idle" else load)
        for rank, (state, pid, (memory, on_device, load)) in enumerate(
            zip(pool.states(), pool.pids(), pool.memory(), strict=True)
        )
    ]
    return f"{head} · {pool.how} · for {duration(time.monotonic() - pool.since)}", ranks


def _at(name: str) -> str:
    return f" @{name}" if name else ""


def _kept_ranks(name: str) -> str:
    return f"kept ranks named {name!r}" if name else "kept ranks"
