"""The rank's whole life, from the top down: become a rank, say so, run what the kernel sends, leave."""

from __future__ import annotations

import gc
import os
import sys
import time
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import NoReturn

from nbspawn._carried import process_state, program_arguments, settings
from nbspawn._process import imports, pools, traced
from nbspawn._protocol.launch import Launch
from nbspawn._protocol.messages import (
    UNGROUPED,
    Imported,
    Leaving,
    Loaded,
    Raised,
    Regroup,
    Returned,
    RunCell,
    RunFunction,
    Started,
)
from nbspawn._rank.debug import attached, debugger, graphical, listener, prompts
from nbspawn._rank.edit import edits
from nbspawn._rank.group import device, environment, regrouped, seeds, stuck
from nbspawn._rank.notebook import libraries, namespace
from nbspawn._rank.program import children, exiting, process, stdio
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo
from nbspawn._rank.report import logged, outcome, questions, recorder, sampler, stacks, terminating, variables

Feature = Callable[[RankInfo, Channel], AbstractContextManager[None]]

# Entered in this order once the rank has said that it started; left in the other order, and only in good order: a
# rank that failed leaves at once, because teardown (NCCL's above all) can hang and would hide the error.
FEATURES: tuple[Feature, ...] = (
    prompts.answered_by_kernel,
    debugger.prompting,
    listener.listening,
    stuck.unblocking,
    questions.answering,
    sampler.sampling,
    terminating.telling,
    logged.logging,
    device.ready,
    environment.process_group,
    graphical.following,
)


preloaded = imports.Preloaded()
"""Set by the importer (_server/preload.py)."""

_own_modules = edits.OwnModules()
"""The user's own, of a kept rank."""

_TELLING = 4
"""So many ranks tell what they have imported: the others have hardly imported anything else."""


def main(rank: int, launch: Launch) -> None:
    """torch.multiprocessing's ``fn(i, *args)``: everything that a rank does happens below this call."""
    # Of all that was inherited: the first full collection would write to each of its objects, which takes 0.3 s and
    # copies 40 MB into this process (https://docs.python.org/3/library/gc.html#gc.freeze).
    gc.freeze()
    interrupts = process.Interrupts(launch.files.interrupts, rank)
    info = RankInfo(rank, launch, interrupts, launch.command)
    if launch.keep:
        _own_modules.watch()
    process.own_session()
    process.register(launch.files.ranks)
    process.prefer_as_oom_victim()
    stdio.redirect(launch.files.log(rank))
    process.die_with_kernel(launch.files.lifeline)
    environment.set_environment(info)
    process.not_interactive()
    if launch.method != "spawn":
        exiting.begin()
    if launch.method == "fork":
        traced.leave()
        process.close_kernel_sockets(launch.foreign)
        process.forked_from_notebook = True
        settings.adjust(launch.settings)
        libraries.not_interactive()
        libraries.have_own_locks()
        libraries.have_own_workers()
        _forget_event_loop()
    else:
        sys.modules["__main__"] = types.ModuleType("__main__")
        sys.path[:] = launch.sys_path
        preloaded.forget_shadowed()
        if launch.process is not None:
            process_state.put(launch.process)
        settings.put(launch.settings)
    libraries.forget_process_state()
    children.begin(launch.default_method)
    seeds.seed_generators(info)
    pools.resize(launch.threads)
    environment.meet_at_own_store(info)
    environment.lengthen_timeouts(info)
    environment.keep_destroyed_groups(info)
    stacks.report_crashes(launch.files.crash(rank))
    stacks.write_on_signal(launch.files.stack(rank))
    debugger.not_yet()
    channel = Channel(launch.files.socket, launch.command.command_number)
    interrupts.install(channel)
    channel.send(Started(rank, os.getpid(), time.monotonic()))
    with ExitStack() as features:
        try:
            with interrupts.enabled():
                for feature in FEATURES:
                    features.enter_context(feature(info, channel))
        except BaseException as error:
            _leave(channel, outcome.failed(rank, error, skip=__file__))
        ended = _perform(info, channel)
        while launch.keep and not isinstance(ended, Leaving):
            for end in info.on_end:
                end()
            channel.end()
            channel.send(ended)
            if not _next(info, channel):
                break
            ended = _perform(info, channel)
        if launch.keep and not isinstance(ended, Leaving):
            exiting.run()
        else:
            if isinstance(ended, Returned):
                ended = _end(info, ended)
            if not isinstance(ended, Returned):
                _leave(channel, ended)
            channel.send(ended)
    stdio.leave()
    channel.close()
    exiting.leave(0)


def _next(info: RankInfo, channel: Channel) -> bool:
    """Wait for a kept rank's next cell or function; False when there is none any more."""
    while True:
        try:
            command = channel.receive()
        except EOFError:
            return False
        if isinstance(command, Regroup):
            try:
                regrouped.regroup(info, command)
            except Exception as error:
                info.ungrouped = error  # the rank's variables are still good
        elif isinstance(command, (RunCell, RunFunction)):
            info.begin(command)
            channel.begin(command.command_number)
            info.interrupts.begin(command.interrupts)
            for begin in info.on_begin:
                begin()
            if command.debug:
                debugger.break_soon()
            return True
        else:
            return False


def _perform(info: RankInfo, channel: Channel) -> outcome.Outcome:
    """Run the command, and say when it began, and what it has imported."""
    ready = time.monotonic()
    ended = _run(info, channel)
    if not channel.own:
        _end_forked(ended)
    logged.send()
    if info.rank < _TELLING and (modules := info.imported.take()):
        channel.send(Imported(info.rank, modules))
    if info.launch.keep and (files := _own_modules.take()):
        channel.send(Loaded(info.rank, files))
    if not isinstance(ended, Returned):
        return ended
    return replace(ended, ready=ready, collectives=None if info.launch.keep else recorder.at_end())


def _run(info: RankInfo, channel: Channel) -> outcome.Outcome:
    command = info.command
    if (lost := info.ungrouped) is not None:
        info.ungrouped = None
        error = RuntimeError(f"{UNGROUPED}: {type(lost).__name__}: {lost}")
        return outcome.failed(info.rank, error.with_traceback(lost.__traceback__), skip=__file__)
    program_arguments.put(command.argv)
    if (unloaded := _follow_edits(info)) is not None:
        return unloaded
    if isinstance(command, RunCell):
        from nbspawn._rank import shell

        return shell.run(command, lambda: namespace.receive(command.payload), info, channel)
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        from nbspawn._rank import shell

        shell.attach(info, channel)
    try:
        with info.interrupts.enabled():
            job = namespace.receive(command.payload)
            with attached.tracing():
                value = job["fn"](info.ordinal, *job["args"], **job["kwargs"])
            device.settle()
            return outcome.returned(info.rank, value)
    except BaseException as error:
        shown = variables.of_error(error, info.names) if command.show_locals else ()
        ended = outcome.failed(info.rank, error, skip=os.path.dirname(__file__), variables=shown)
        debugger.post_mortem(info, ended, error)
        return ended


def _follow_edits(info: RankInfo) -> outcome.Outcome | None:
    """Load edited modules again, before the command's variables are loaded, which may need what is new in them. How
    the command has ended with that, if it has."""
    if info.command.reload is None:
        return None
    try:
        with info.interrupts.enabled():
            error = _own_modules.follow(info.command.reload)
    except BaseException as ended_by:
        return outcome.failed(info.rank, ended_by, skip=__file__)
    if error is None:
        return None
    ended = outcome.failed(info.rank, error, variables=(edits.NOT_RUN,))
    if error.__traceback__ is not None:
        debugger.post_mortem(info, ended, error)
    return ended


def _end(info: RankInfo, ended: Returned) -> outcome.Outcome:
    """End as a program does. A thread or an ``atexit`` handler that does not return is like a cell that does not: the
    kernel interrupts this rank, or kills it."""
    try:
        with info.interrupts.enabled():
            exiting.run()
        return replace(ended, offset=stdio.log_offset())  # a bar that is given up draws itself for the last time
    except BaseException as error:
        return outcome.failed(info.rank, error, skip=__file__)


def _leave(channel: Channel, ended: outcome.Outcome) -> NoReturn:
    """Report, have open files written, and be gone: no ``atexit``, no ``finally`` of a library, no thread that could
    wait for a peer."""
    stdio.flush()
    channel.send(ended)
    for action in channel.on_failure:
        action()
    exiting.write_soon()
    channel.close()
    exiting.leave(_exit_code(ended))


def _end_forked(ended: outcome.Outcome) -> NoReturn:
    """A process that the user's code has forked comes to the cell's end, and ends as at the end of a script. What
    became of the cell there is not the rank's answer."""
    if isinstance(ended, Raised):
        print(ended.traceback, end="", file=sys.stderr)
    elif isinstance(ended, Returned):
        exiting.run()
    exiting.leave(_exit_code(ended))


def _exit_code(ended: outcome.Outcome) -> int:
    return 1 if isinstance(ended, Raised) else getattr(ended, "code", 0)


def _forget_event_loop() -> None:
    """A forked rank has the kernel's event loop, marked as running, and shares its epoll with the kernel. A fresh
    policy has none yet, as in a new process."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None:
        asyncio._set_running_loop(None)
        private = "_" if sys.version_info >= (3, 14) else ""  # where policies are deprecated
        policy = getattr(asyncio.events, f"{private}get_event_loop_policy")()
        getattr(asyncio.events, f"{private}set_event_loop_policy")(type(policy)())
