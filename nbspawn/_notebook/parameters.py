"""A function's parameters as widgets, by the abbreviations of ``ipywidgets.interact``; and its newest definition."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from typing import Any, get_origin

import ipywidgets  # type: ignore[import-untyped]

from nbspawn.errors import UsageError

_WIDE = 100  # times its least value: then a range of floats has a logarithmic slider
_STEPS = 100  # of a slider for floats; ipywidgets' own has steps of 0.1, whatever the range


def widgets(fn: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A widget, or ``ipywidgets.fixed``, for each parameter after the rank; by name.

    ``given`` are abbreviations or widgets: ``(min, max[, step])`` is a slider, a list or a dict a choice, a number a
    slider around it, a string a text, a bool a checkbox. A parameter that is not given has its default, or its type, as
    abbreviation; it has no widget if that is none.

    Raises UsageError if the function does not take the rank first, if a parameter has no value, or if a name or an
    abbreviation is unknown.
    """
    name = getattr(fn, "__name__", "the function")
    parameters = list(_parameters(fn, name))
    rest = dict(given)
    found = {}
    for parameter in parameters:
        abbreviation = rest.pop(parameter.name, _default(parameter))
        widget = _widget(abbreviation, parameter.default)
        if widget is not None:
            if not getattr(widget, "description", "unnamed"):
                widget.description = parameter.name
            found[parameter.name] = widget
        elif parameter.name in given:
            raise UsageError(
                f"{parameter.name}={abbreviation!r:.60} is no abbreviation for a widget: give (min, max), a list of "
                "choices, a number, a string, a bool, a widget, or ipywidgets.fixed(value)"
            )
        elif parameter.default is parameter.empty:
            raise UsageError(
                f"{name}() has no value for {parameter.name!r}: interact({name}, {parameter.name}=…) gives one, for "
                "example (0.0, 1.0) for a slider or [1, 2, 4] for a choice"
            )
    if rest:
        raise UsageError(f"{name}() has no parameter {next(iter(rest))!r}")
    return found


def values(widgets: Mapping[str, Any]) -> dict[str, Any]:
    """The values that are chosen now; by name."""
    return {name: widget.value for name, widget in widgets.items()}


def _parameters(fn: Callable[..., Any], name: str) -> Iterator[inspect.Parameter]:
    """The parameters after the rank that can be given by name."""
    no_rank = UsageError(f"{name}() must take the rank as its first argument, as with torch's spawn")
    try:
        rank, *others = _signature(fn).parameters.values()
    except ValueError:
        raise no_rank from None
    if rank.kind in (rank.KEYWORD_ONLY, rank.VAR_KEYWORD):
        raise no_rank
    for parameter in others:
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            yield parameter
        elif parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UsageError(f"{name}() takes {parameter.name!r} by position only: interact gives arguments by name")


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn, eval_str=True)
    except Exception:  # an annotation that is no code, or names what is not there
        return inspect.signature(fn)


def _default(parameter: inspect.Parameter) -> Any:
    """The parameter's default, or the type that it is annotated with. (Strings and ``list[int]`` would be taken for
    choices.)"""
    if parameter.default is not parameter.empty:
        return parameter.default
    is_type = isinstance(parameter.annotation, type) and get_origin(parameter.annotation) is None
    return parameter.annotation if is_type else parameter.empty


def _widget(abbreviation: Any, default: Any) -> Any:
    if abbreviation is inspect.Parameter.empty or abbreviation is None:
        return None
    if isinstance(abbreviation, tuple) and len(abbreviation) == 2 and _floats(abbreviation):
        least, most = map(float, abbreviation)
        if 0 < least and most / least >= _WIDE:
            start = math.sqrt(least * most)
            if isinstance(default, Real) and least <= float(default) <= most:
                start = float(default)
            return ipywidgets.FloatLogSlider(value=start, min=math.log10(least), max=math.log10(most), step=0.05)
    try:
        widget = ipywidgets.interactive.widget_from_abbrev(abbreviation, default)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{abbreviation!r:.60} is no abbreviation for a widget: {error}") from None
    if isinstance(widget, ipywidgets.FloatSlider) and widget is not abbreviation:
        if not (isinstance(abbreviation, tuple) and len(abbreviation) == 3):
            widget.step = (widget.max - widget.min) / _STEPS
        widget.readout_format = ".3g"
        if isinstance(default, Real) and widget.min <= float(default) <= widget.max:
            widget.value = float(default)
    return widget


def _floats(abbreviation: tuple[Any, ...]) -> bool:
    numbers = all(isinstance(one, Real) and not isinstance(one, bool) for one in abbreviation)
    return numbers and not all(isinstance(one, Integral) for one in abbreviation)


class Redefined:
    """A function whose cell may be edited and run again: it is followed by its name in its module, if it is what that
    name means now."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.current = fn
        self._followed = self._find() is fn

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.current, "__name__", "the function")

    @property
    def parameters(self) -> list[str]:
        """The names of its parameters."""
        return list(inspect.signature(self.current).parameters)

    def update(self) -> None:
        """Take the newest definition."""
        found = self._find()
        if self._followed and callable(found):
            self.current = found

    def _find(self) -> Any:
        module = sys.modules.get(getattr(self.current, "__module__", None) or "")
        try:
            return functools.reduce(getattr, self.current.__qualname__.split("."), module)
        except AttributeError:
            return None
