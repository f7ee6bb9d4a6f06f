"""Runs a cell in the rank's IPython shell and sends what it displays to the kernel.

With _rank/edit/autoreload.py the only module of ranks that imports IPython. The shell is a ``RankShell``: under fork it
was the kernel's own, whose sockets, history and comms must never be used again; else a light one that the fork server
made beforehand.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import linecache
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

from IPython import get_ipython, version_info
from IPython.core.debugger import Pdb
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbspawn._carried import magics
from nbspawn._payload.names import names_used
from nbspawn._process.imports import is_library
from nbspawn._protocol.messages import ClearOutput, DisplayData, Raised, RunCell
from nbspawn._rank.debug import attached, debugger, pdb_methods
from nbspawn._rank.group import device
from nbspawn._rank.notebook import front_ends, namespace
from nbspawn._rank.program import process, stdio
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo
from nbspawn._rank.program.json_data import json_ready
from nbspawn._rank.report import outcome
from nbspawn._rank.report import variables as variables_shown

_NO_COLORS = "NoColor" if version_info < (9,) else "nocolor"
_MOST_MISSING = 20  # names that an error tells
_WIDGET = "application/vnd.jupyter.widget-view+json"


class RankShell(InteractiveShell):
    """A shell without a front end of its own: no kernel, no history file, no GUI loop."""

    def init_virtualenv(self) -> None:
        """The kernel has settled ``sys.path``, and has given its warnings."""

    def enable_gui(self, gui: str | None = None) -> None:
        """Nothing to enable: figures are displayed as images (``%matplotlib inline`` calls this)."""

    async def run_ast_nodes(self, *args: Any, **kwargs: Any) -> bool:
        """Run a cell's statements."""
        with attached.tracing():
            return bool(await super().run_ast_nodes(*args, **kwargs))


def instance() -> InteractiveShell:
    """The process's shell; made if there is none."""
    shell = get_ipython()
    if shell is None:
        config = Config()
        config.HistoryManager.enabled = False
        config.HistoryManager.hist_file = ":memory:"
        # With this process's own module: a kept rank, or the script that it was forked from, has variables already.
        shell = RankShell.instance(config=config, user_module=sys.modules["__main__"])
        process.not_interactive()
        shell.display_formatter.active_types = shell.display_formatter.format_types
    return shell


@functools.cache
def displays() -> tuple[RankDisplayPublisher, RankDisplayHook]:
    """What takes the place of the shell's own in a rank. Made before ranks are forked: it takes each of them 1 ms."""
    shell = instance()
    outputs = {name: shell.user_ns.get(name) for name in ("_", "__", "___")}
    made = RankDisplayPublisher(), RankDisplayHook(shell=shell, parent=None)
    shell.user_ns.update(outputs)  # a new DisplayHook has emptied them
    return made


_attached_in = -1
"""The process whose shell is attached: a kept rank runs many cells in one, and a rank may fork ranks of its own."""

_ran_in = -1
"""The process that has run a cell."""


def attach(info: RankInfo, channel: Channel) -> InteractiveShell:
    """Send the shell's displays and prompts to the kernel, and cut what an inherited one still holds of it: once."""
    global _attached_in
    shell = instance()
    if _attached_in == os.getpid():
        return shell
    _attached_in = os.getpid()
    shell.display_pub, shell.displayhook = displays()
    shell.display_pub.info, shell.display_pub.channel = info, channel
    shell.display_trap.hook = shell.displayhook
    sys.displayhook = shell.displayhook
    # system_raw runs `!cmd` in this rank's process group and straight into its log; the default's pseudo-terminal
    # would put it in a session of its own, where it would outlive the rank.
    shell.system = shell.system_raw
    shell.history_manager.enabled = False
    # IPython 9 keeps all that a cell prints, in memory, for a history that no rank has, and each line takes 1 µs more.
    shell._tee = lambda channel: contextlib.nullcontext()
    shell.call_pdb = False  # `%pdb on` is the launch's `pdb` (_rank/debug/debugger.py)
    shell.ask_exit = sys.exit  # `exit` and `quit`: a kernel's would end the notebook's kernel, the light shell has none
    if not isinstance(shell, RankShell):
        _become_rank_shell(shell)
    front_ends.draw_text(shell.config)
    front_ends.find_files_beside_the_notebook(lambda: getattr(info.command, "filename", ""))
    pdb_methods.adapt(Pdb)
    _name_cells(shell, info)
    return shell


def run(
    command: RunCell,
    variables: Callable[[], Mapping[str, Any]],
    info: RankInfo,
    channel: Channel,
) -> outcome.Outcome:
    """Run the cell; its last expression is the value. Tracebacks and ``inspect.getsource`` see the notebook's cells."""
    return CellRunner(attach(info, channel), command, info).run(variables)


class CellRunner:
    """A cell on its way through the shell, and how it ended."""

    def __init__(self, shell: InteractiveShell, command: RunCell, info: RankInfo) -> None:
        global _ran_in
        self._first, _ran_in = _ran_in != os.getpid(), os.getpid()
        self._shell, self._command, self._info = shell, command, info
        self._rendered: list[str] = []
        """The traceback, as the shell has formatted it."""
        self._raised_at: float | None = None
        self._not_to_be_shown: BaseException | None = None
        """An error that a library would have shown, and gone on."""

    def run(self, variables: Callable[[], Mapping[str, Any]]) -> outcome.Outcome:
        """Run the cell with these variables, which are loaded where an interrupt can end that."""
        command, rank = self._command, self._info.rank
        self._prepare_shell()
        self._catch_tracebacks()
        try:
            with self._info.interrupts.enabled():
                self._receive(variables())
                if self._first:
                    self._shell.user_ns.update(self._rank_variables())
                ran = self._shell.run_cell(command.source, store_history=False)
        except (
            BaseException
        ) as early:  # a variable that does not load here, an interrupt outside of the cell's own code
            return outcome.failed(rank, early, cell=command.filename, skip=__file__)
        error = ran.error_before_exec or ran.error_in_exec
        if error is not None:
            return self._failed(error)
        try:
            with self._info.interrupts.enabled():  # packing it and its repr are the user's code, too
                device.settle()
                return outcome.returned(rank, ran.result)
        except BaseException as late:
            return outcome.failed(rank, late, cell=command.filename, skip=__file__)

    def _receive(self, sent: Mapping[str, Any]) -> None:
        namespace.put({name: value for name, value in sent.items() if not name.startswith("%")})
        magics.put(self._shell, {name: value for name, value in sent.items() if name.startswith("%")})

    def _prepare_shell(self) -> None:
        shell, command = self._shell, self._command
        if self._first and self._info.launch.method != "fork":
            shell.user_module = sys.modules["__main__"]
            shell.user_ns = vars(shell.user_module)
            shell.init_user_ns()
            visited = shell.history_manager.dir_hist  # `_dh`, by whose first one libraries find the notebook's files
            visited[:] = map(type(visited[0]), command.directories) if command.directories else visited
        _learn_sources(shell, command)
        for alias in command.aliases.items():
            shell.alias_manager.soft_define_alias(*alias)
        colors = command.colors or _NO_COLORS
        if self._first or shell.colors != colors:
            shell.colors = colors
            if version_info < (9,):  # where only %colors passes them on
                for traceback in (shell.InteractiveTB, shell.SyntaxTB):
                    traceback.set_colors(colors)
        shell.compile.flags |= command.flags
        shell.execution_count = command.number
        shell.displayhook.silent = command.silent

    def _rank_variables(self) -> dict[str, Any]:
        info = self._info
        return {
            "rank": info.ordinal,
            "local_rank": info.rank,
            "world_size": info.launch.world_size,
            "device": device.choose(info),
            "__name__": "__main__",
        }

    def _catch_tracebacks(self) -> None:
        """The cell's own is kept, and those that the user's code shows itself are shown."""
        shell = self._shell
        vars(shell).pop("showtraceback", None)  # of the cell before
        format_and_keep = shell.showtraceback

        def showtraceback(exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
            error, raised = (exc_tuple or sys.exc_info())[1], self._not_to_be_shown
            if error is not None and _is_running(shell.user_global_ns):
                asking = sys._getframe(1).f_code
                goes_on = is_library(asking.co_filename) and asking.co_name not in _RETURN_ERRORS
                if isinstance(error, KeyboardInterrupt) or goes_on:
                    self._not_to_be_shown = error
                    raise error  # %run, %time and a widget's Output show it and go on: peers would wait for this rank
            elif raised is not None and error is raised:
                frames = _without_detours(raised.__traceback__)
                exc_tuple = type(raised), raised.with_traceback(frames), frames
            # Formatting takes longer than a peer needs to fail in its turn, and the first in time is the one to blame.
            self._raised_at = time.monotonic()
            with self._info.interrupts.postponed():
                try:
                    format_and_keep(exc_tuple, *args, **kwargs)
                except Exception:  # of a class that raises at any attribute
                    self._rendered = []

        shell._showtraceback = self._keep
        shell.showtraceback = showtraceback

    def _keep(self, kind: type, error: BaseException, lines: list[str] | str) -> None:
        if _is_running(self._shell.user_global_ns):
            InteractiveShell._showtraceback(self._shell, kind, error, lines)
            return
        self._rendered = [lines] if isinstance(lines, str) else lines
        # After sys.exit() IPython would add advice for cells; in a rank it is an ordinary way to leave.
        warnings.filterwarnings("ignore", message="To exit: use")

    def _failed(self, error: BaseException) -> outcome.Outcome:
        info, command = self._info, self._command
        shown = variables_shown.of_error(error, info.names) if command.show_locals else ()
        rendered = tuple(self._rendered)
        ended = outcome.failed(info.rank, error, rendered, command.filename, _RUNNER, self._raised_at, shown)
        if isinstance(error, NameError) and isinstance(ended, Raised):
            ended = replace(ended, missing=self._missing())
        debugger.post_mortem(info, ended, error)
        return ended

    def _missing(self) -> tuple[str, ...]:
        """The names that the cell's code uses, and that are nowhere."""
        command = self._command
        with suppress(Exception):  # whatever the user's transformers raise
            used = names_used(command.source, command.filename, self._shell.transform_cell, command.flags)
            there = {*self._shell.user_ns, *vars(builtins)}
            return tuple(sorted((used.required | used.optional) - there))[:_MOST_MISSING]
        return ()


def _is_running(namespace: dict[str, Any]) -> bool:
    """Is the cell's own code being run, below ``CellRunner.run``, in this thread?"""
    frame = sys._getframe()
    running = False
    while frame is not None and frame.f_code is not CellRunner.run.__code__:
        running = running or frame.f_globals is namespace
        frame = frame.f_back  # type: ignore[assignment]
    return running and frame is not None


def _without_detours(traceback: TracebackType | None) -> TracebackType | None:
    """The way to an error that was raised again by a call of who had caught it: without that call."""
    entries: list[TracebackType] = []
    while traceback is not None:
        before = [entry.tb_frame for entry in entries]
        if traceback.tb_frame in before:
            del entries[before.index(traceback.tb_frame) :]
        entries.append(traceback)
        traceback = traceback.tb_next
    for entry in reversed(entries):
        traceback = TracebackType(traceback, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return traceback


_RETURN_ERRORS = ("run_code", "run_ast_nodes", "_run_cell")
"""Parts of IPython's ``run_cell``, which has the error in what it returns."""
_RUNNER = InteractiveShell.run_code.__code__.co_filename


def _name_cells(shell: InteractiveShell, info: RankInfo) -> None:
    """Compile under the notebook's own names for the cells, and show their first lines as the user typed them."""
    remember = shell.compile.cache

    def cache(*args: Any, **kwargs: Any) -> str:
        name: str = remember(*args, **kwargs)
        size, _, lines, path = linecache.cache[name]  # type: ignore[misc]
        command = info.command
        if isinstance(command, RunCell) and command.number == 0:
            getattr(shell.compile, "_filename_map", {}).pop(name, None)  # by its file name, then, not as "Cell In[0]"
        if isinstance(command, RunCell) and command.first_line and lines and lines[0].startswith("# %%"):
            linecache.cache[name] = (size, None, [command.first_line, *lines[1:]], path)
            getattr(linecache, "_ipython_cache", {}).pop(name, None)  # IPython 7 would restore its own entry
        return name

    def name(raw: str, transformed: str, number: int) -> str:
        command = info.command
        if isinstance(command, RunCell) and {raw, transformed} & {command.source, command.transformed}:
            return command.filename
        return inherited(raw, transformed, number)  # the cell's code runs another one: %run of a notebook, %rerun

    def transform(raw: str) -> str:
        command = info.command
        if isinstance(command, RunCell) and command.transformed and raw == command.source:
            return command.transformed
        return transform_anew(raw)

    inherited, transform_anew = shell.compile.get_code_name, shell.transform_cell
    shell.transform_cell = transform  # the kernel has done that, for all ranks
    shell.compile.get_code_name = name
    shell.compile.cache = cache


def _learn_sources(shell: InteractiveShell, command: RunCell) -> None:
    for name, (number, lines) in command.sources.items():
        if name in linecache.cache:
            continue  # a cell that this rank has run: the kernel knows only the call of the magic
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)
        if hasattr(shell.compile, "_filename_map"):  # IPython >= 8: what prints "Cell In[5]"
            shell.compile._filename_map[name] = number


class RankDisplayPublisher(DisplayPublisher):
    """``display()`` in the rank: a message to the kernel, in order with what was printed."""

    info: RankInfo
    channel: Channel

    def publish(
        self,
        data: Mapping[str, Any],
        metadata: Mapping[str, Any] | None = None,
        source: str | None = None,
        *,
        transient: Mapping[str, Any] | None = None,
        update: bool = False,
        **_: Any,
    ) -> None:
        """Display ids are this rank's own: the same id in two ranks is two displays."""
        transient = dict(transient or {})
        if "display_id" in transient:
            run = self.info.launch.files.private.name
            transient["own_id"] = transient["display_id"]
            transient["display_id"] = f"{run}-{self.info.ordinal}-{transient['display_id']}"
        bundle, more, transient = (json_ready(part) for part in (_shown(data), metadata or {}, transient))
        self.channel.send(DisplayData(self.info.rank, bundle, more, transient, bool(update), stdio.log_offset()))

    def clear_output(self, wait: bool = False) -> None:
        """Clear this rank's displays, not its peers'."""
        self.channel.send(ClearOutput(self.info.rank, wait, stdio.log_offset()))


class RankDisplayHook(DisplayHook):
    """The cell's last expression. A value with nothing but text is shown once, in the Results; a richer one (a table,
    a figure) is displayed where it was made."""

    silent = False
    """Does the cell end with a semicolon? Then its value is returned, but shown nowhere."""

    def __call__(self, result: object = None) -> None:
        """The value; IPython would ask the kernel's history whether this cell is silent."""
        if self.silent:
            self.fill_exec_result(result)
        else:
            super().__call__(result)

    def quiet(self) -> bool:
        """See ``silent``."""
        return False

    def write_output_prompt(self) -> None:
        """The kernel marks what it shows."""

    def write_format_data(self, format_dict: Mapping[str, Any], md_dict: Mapping[str, Any] | None = None) -> None:
        """Publish a rich value; a widget is a text here."""
        if set(format_dict) - {"text/plain", _WIDGET}:
            self.shell.display_pub.publish(format_dict, md_dict)

    def update_user_ns(self, result: object) -> None:
        """``_`` as in any cell; no growing ``Out``."""
        self.shell.user_ns["_"] = result

    def log_output(self, format_dict: Mapping[str, Any]) -> None:
        """Log nothing: a rank has no history."""

    def finish_displayhook(self) -> None:
        """The default prints a newline."""


def _shown(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data that is shown, without a widget, whose model lives in a process that no front end knows."""
    return {kind: value for kind, value in data.items() if kind != _WIDGET or len(data) == 1}


def _become_rank_shell(shell: InteractiveShell) -> None:
    """Under fork: what the notebook has set up in its shell stays, what its class has for a front end goes."""
    if hasattr(shell, "kernel"):
        front_ends.leave_kernel(shell.kernel)
    front_ends.plain_errors(shell)
    if (magics := shell.magics_manager.registry.get("AutoreloadMagics")) is not None:
        magics._reloader.enabled = False  # each rank would look at the files by itself (_rank/edit/edits.py)
    shell.__class__ = RankShell
    shell.init_hooks()  # what `name?` shows would be sent along with the kernel's reply to the cell
