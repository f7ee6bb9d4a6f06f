"""The widget of ``nbspawn.interact``."""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from html import escape
from types import MappingProxyType
from typing import Any

import ipywidgets  # type: ignore[import-untyped]
import traitlets

from nbspawn._api import spawn
from nbspawn._engine.devices import resolve
from nbspawn._engine.jobs import FunctionJob
from nbspawn._engine.options import MAX_RANKS, LaunchOptions, options_of
from nbspawn._engine.start.start_method import METHODS
from nbspawn._notebook import background, parameters
from nbspawn._notebook.buttons import Buttons
from nbspawn._notebook.parameters import Redefined
from nbspawn._notebook.pictures import Picture
from nbspawn._notebook.slots import Slots, close, close_parts
from nbspawn._notebook.tails import Tails
from nbspawn._notebook.widget_prompts import WidgetPrompts
from nbspawn._protocol.messages import Event
from nbspawn._results import Results
from nbspawn._session import hooks
from nbspawn._session.attachment import BackgroundView
from nbspawn._session.background import BackgroundRun, error_text
from nbspawn._session.options import CommandOptions
from nbspawn._session.pool import Pool
from nbspawn._session.views import Action, log_path
from nbspawn._state.run import Run
from nbspawn.errors import UsageError

_NO_BACKEND = "none"
_BACKENDS = (_NO_BACKEND, "gloo", "nccl", "xla", "tpu_dist", "auto")
_NOT_OPTIONS = {"fn", "args", "nprocs", "join", "daemon", "start_method", "backend", "view"}
"""Of ``spawn``'s arguments: these are the widget's own."""


class Interact(ipywidgets.VBox):
    """Made by ``nbspawn.interact``. ``run`` and ``stop`` do what the buttons do.

    Attributes:
        arguments: the widgets of the function's arguments, by name.
        running: do ranks run?
        result: the ``Results`` of the last run; None while there are none.
        error: the error of the last run; None if it has none.
    """

    running = traitlets.Bool(False)
    result: Results[Any] | None = traitlets.Any(None, allow_none=True)
    error: BaseException | None = traitlets.Any(None, allow_none=True)
    _given: Mapping[str, Any] = MappingProxyType({})  # ipywidgets 7 closes what was refused, too

    def __init__(
        self,
        fn: Callable[..., Any],
        nprocs: int | str,
        start_method: str,
        backend: str | None,
        options: Mapping[str, Any],
        arguments: Mapping[str, Any],
    ) -> None:
        if not callable(fn):
            raise UsageError(f"interact() takes a function, got {fn!r:.60}")
        known = inspect.signature(spawn).parameters.keys() - _NOT_OPTIONS
        if unknown := options.keys() - known:
            raise UsageError(f"interact() has no option {min(unknown)!r}: the options are {', '.join(sorted(known))}")
        self._function = Redefined(fn)
        self._options = dict(options)
        self._given = dict(arguments)
        self._title = ""
        self._handle: BackgroundRun | None = None
        self._view: BackgroundView | None = None
        self.arguments = parameters.widgets(fn, arguments)
        self._parameters = self._function.parameters
        self._call_here = _caller()
        self._ranks = _ranks(nprocs)
        self._method = _choice("start method", METHODS, start_method)
        self._backend = _choice("backend", dict.fromkeys([*_BACKENDS, backend or _NO_BACKEND]), backend or _NO_BACKEND)
        resolve(self._launch_options())
        self._run_button = ipywidgets.Button(
            description="Run", icon="play", button_style="primary", layout={"width": "auto"}
        )
        self._run_button.on_click(lambda _: self._run_pressed())
        self._controls = _Controls()
        self._slots = Slots()
        self._prompts = WidgetPrompts(self._echo, self._stopping)
        self._picture = Picture()
        self._argument_box = ipywidgets.VBox(_shown(self.arguments))
        buttons = self._controls.buttons
        buttons.row.children = [self._run_button, *buttons.row.children]
        super().__init__(
            [
                ipywidgets.HBox([self._ranks, self._method, self._backend], layout={"flex_flow": "row wrap"}),
                self._argument_box,
                buttons.row,
                buttons.pane,
                self._slots.box,
                self._prompts.box,
                self._picture.hider,
            ]
        )
        self._set_running(False)

    # ------------------------------------------------------------ running

    def run(self) -> None:
        """Start the ranks, as *Run* does. Returns when they have been started.

        Raises:
            UsageError: ranks run already, or a value is invalid.
            StartError: the ranks could not be started.
            PayloadError: the function or an argument cannot be pickled.
        """
        if self.running:
            raise UsageError("the ranks still run: stop() stops them")
        self._function.update()
        if self._function.parameters != self._parameters:
            self._rebuild()
        fn, values = self._function.current, parameters.values(self.arguments)
        self._title = f"{self._function.name}({', '.join(f'{name}={value!r:.60}' for name, value in values.items())})"
        self._slots.clear()
        self.result = self.error = None
        pool = Pool(self._launch_options(), options_of(CommandOptions, self._options))
        self._controls.begin(pool.nprocs)
        view = background.notebook_view(self._slots.publish, "html", False, self._controls, prompter=self._prompts)
        self._view = view
        self._prompts.attachment = view.attachment
        self._set_running(True)
        try:
            self._handle = pool.run_in_background(
                FunctionJob(fn, (), values, hooks.cell_names()), pool.command_options, view
            )
        except BaseException:
            self._set_running(False)
            raise
        self._handle.add_done_callback(lambda handle: self._call_here(partial(self._ended, handle)))

    def stop(self) -> None:
        """Stop the ranks by KeyboardInterrupt; called a second time, by SIGKILL. Does not wait for their end."""
        if self._handle is not None:
            self._controls.stopping = True
            self._handle.cancel()

    def wait(self, timeout: float | None = None) -> Results[Any]:
        """Wait until the ranks have ended. The kernel handles no clicks meanwhile: the calling cell asks the questions.

        Args:
            timeout: seconds to wait at most; None for no limit.

        Returns:
            The results, a sequence by rank.

        Raises:
            TimeoutError: the ranks still run after ``timeout`` seconds.
            SpawnError: the error of the run.
            UsageError: nothing has been run.
        """
        if self._handle is None:
            raise UsageError("nothing has been run: run() starts the ranks")
        self._handle.exception(timeout)
        self._ended(self._handle)
        self._draw_picture()  # again: nbclient passes over what arrives between two cells
        return self._handle.result()

    def _run_pressed(self) -> None:
        if self.running:  # pressed twice, before the button was disabled
            return
        try:
            self.run()
        except BaseException as error:
            self._slots.clear()
            self.result = None
            self._slots.publish(data={"text/plain": error_text(error)}, metadata={})
            self.error = error
            self._draw_picture()

    def _ended(self, handle: BackgroundRun) -> None:
        """Show the outcome, unless that has been done."""
        if handle is not self._handle or not self.running:
            return
        self._set_running(False)
        error = handle.exception()
        if error is not None:
            self.error = error
        else:
            self.result = handle.result()
            if not self.result.empty:
                self._slots.publish(data={"text/plain": repr(self.result)}, metadata={})
        self._draw_picture()

    def _set_running(self, running: bool) -> None:
        self.running = running
        self._run_button.disabled = running
        self._controls.buttons.set_disabled(not running)
        self._controls.buttons.set_stopping(False)

    def _launch_options(self) -> LaunchOptions:
        chosen = {
            "nprocs": _number_or_word(self._ranks.value),
            "start_method": self._method.value,
            "backend": None if self._backend.value == _NO_BACKEND else self._backend.value,
        }
        return options_of(LaunchOptions, {**self._options, **chosen})

    def _rebuild(self) -> None:
        """The function has other parameters: keep the widgets of those that it had."""
        known = {**self._given, **self.arguments}
        given = {name: one for name, one in known.items() if name in self._function.parameters}
        before, self.arguments = self.arguments, parameters.widgets(self._function.current, given)
        self._parameters = self._function.parameters
        self._argument_box.children = _shown(self.arguments)
        for one in _shown(before):
            if one not in self._argument_box.children and one not in _shown(self._given):
                close(one)

    def _echo(self, text: str) -> None:
        """Show a question and its answer among what the ranks print; called in the thread that watches the run."""
        if self._view is not None:
            self._view.view.notify(text.rstrip("\n"))

    def _stopping(self) -> bool:
        """Has the end of the run been requested?"""
        return self._controls.stopping or (self._handle is not None and self._handle.stopping)

    # ------------------------------------------------------------ display

    def close(self) -> None:
        """Close the widget with its parts; widgets that were given as arguments stay."""
        close_parts(self, _shown(self._given))
        super().close()

    def _ipython_display_(self, **_: Any) -> None:
        self._picture.show(self, repr(self))
        self._draw_picture()

    def _draw_picture(self) -> None:
        if self._title:
            self._picture.draw(f"<div><code>{escape(self._title)}</code></div>{self._slots.html()}")

    def __repr__(self) -> str:
        return f"<interact: {self._function.name}()>"


class _Controls:
    """The buttons of a run, as its view uses them. (_notebook/view.py)"""

    def __init__(self) -> None:
        self.actions: deque[Action] = deque()
        self.stopping = False
        """Has the user pressed Stop?"""
        self.buttons = Buttons(1, self._act)
        self._tails = Tails()

    def _act(self, action: Action) -> None:
        self.stopping = self.stopping or action.what == "stop"
        self.actions.append(action)

    def begin(self, nprocs: int) -> None:
        """A run begins."""
        self.actions.clear()
        self.stopping = False
        self._tails = Tails()
        self.buttons.reset(nprocs)

    def open(self, run: Run) -> None:
        """Nothing to do: the buttons are there."""

    def show(self, run: Run, events: Sequence[Event]) -> None:
        """Refresh the pane."""
        self._tails.add(run, events)
        self.buttons.refresh(partial(self._tails.text, run), partial(log_path, run))

    def set_disabled(self, disabled: bool) -> None:
        """Nothing to do: while a rank asks, the kernel handles clicks."""

    def close(self) -> None:
        """Nothing to do: the widget disables its buttons when it knows the outcome."""


def _ranks(nprocs: int | str) -> Any:
    if isinstance(nprocs, str):
        control = ipywidgets.Text(nprocs)
    elif isinstance(nprocs, int) and nprocs >= 1:
        control = ipywidgets.BoundedIntText(nprocs, min=1, max=max(nprocs, MAX_RANKS))
    else:
        raise UsageError(f"nprocs must be a number of ranks or a word such as 'gpu', got {nprocs!r:.60}")
    control.description = "ranks"
    control.layout.width = "180px"
    return control


def _number_or_word(nprocs: int | str) -> int | str:
    """What was typed: a word such as 'gpu', or digits."""
    return int(nprocs) if isinstance(nprocs, str) and nprocs.strip().isdecimal() else nprocs


def _choice(name: str, choices: Collection[str], value: str) -> Any:
    if value not in choices:
        raise UsageError(f"unknown {name} {value!r:.60}: expected one of {', '.join(choices)}")
    control = ipywidgets.Dropdown(
        options=list(choices), value=value, description=name, style={"description_width": "auto"}
    )
    control.layout.width = "auto"
    return control


def _shown(arguments: Mapping[str, Any]) -> list[Any]:
    """The arguments that are shown, as widgets: ``fixed`` is none."""
    return [one for one in arguments.values() if isinstance(one, ipywidgets.Widget)]


def _caller() -> Callable[[Callable[[], None]], object]:
    """What calls a function, from any thread, in the thread that is running now, between two cells: observers are the
    user's code. (Clicks may come in the thread of a subshell, which ends when the page is left.) Without an event loop,
    as in a script, it calls the function at once."""
    try:
        loop = asyncio.get_running_loop()  # a kernel runs cells within its loop
    except RuntimeError:
        return lambda function: function()
    return lambda function: None if loop.is_closed() else loop.call_soon_threadsafe(function)
