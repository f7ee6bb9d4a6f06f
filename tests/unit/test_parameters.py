"""A function's parameters as widgets and its newest definition (_notebook/parameters.py)."""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ipywidgets
import pytest

from nbspawn._notebook.parameters import Redefined, values, widgets
from nbspawn.errors import UsageError


class Mode(enum.Enum):
    TRAIN = 1
    TEST = 2


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    ipywidgets.Widget.close_all()


def one(abbreviation: Any) -> Any:
    """The widget of one parameter without a default."""

    def fn(rank, x): ...

    return widgets(fn, {"x": abbreviation})["x"]


@pytest.mark.parametrize(
    "abbreviation, kind, value",
    [
        (True, ipywidgets.Checkbox, True),
        ("text", ipywidgets.Text, "text"),
        (10, ipywidgets.IntSlider, 10),
        (2.5, ipywidgets.FloatSlider, 2.5),
        ((0, 8), ipywidgets.IntSlider, 4),
        ((0, 8, 2), ipywidgets.IntSlider, 4),
        ([1, 2, 4], ipywidgets.Dropdown, 1),
        ({"small": 3, "large": 5}, ipywidgets.Dropdown, 3),
        ([Mode.TEST, None], ipywidgets.Dropdown, Mode.TEST),
    ],
)
def test_an_abbreviation(abbreviation: Any, kind: type, value: object) -> None:
    widget = one(abbreviation)
    assert type(widget) is kind and widget.value == value and widget.description == "x"


@pytest.mark.parametrize(
    "abbreviation, step", [((0.0, 1.0), 0.01), ((0.0, 0.002), 0.00002), ((0.0, 1.0, 0.25), 0.25), ((0, 0.5), 0.005)]
)
def test_the_step_of_floats(abbreviation: Any, step: float) -> None:
    widget = one(abbreviation)
    assert type(widget) is ipywidgets.FloatSlider and widget.step == pytest.approx(step)
    assert (widget.min, widget.max) == abbreviation[:2]


def test_powers_of_ten() -> None:
    def fn(rank, lr, other=0.01, beyond=5.0): ...

    found = widgets(fn, dict.fromkeys(["lr", "other", "beyond"], (1e-4, 1e-1)))
    assert {type(widget) for widget in found.values()} == {ipywidgets.FloatLogSlider}
    assert (found["lr"].min, found["lr"].max) == pytest.approx((-4, -1))
    assert values(found) == pytest.approx({"lr": 10**-2.5, "other": 0.01, "beyond": 10**-2.5})
    assert type(one((1, 100))) is ipywidgets.IntSlider and type(one((0.0, 100.0))) is ipywidgets.FloatSlider
    assert type(one((-1.0, 100.0))) is ipywidgets.FloatSlider and type(one((1.0, 99.0))) is ipywidgets.FloatSlider


def test_the_default_is_chosen() -> None:
    def fn(rank, n=3, lr=0.25, kind="b"): ...

    found = widgets(fn, {"n": (0, 10), "lr": (0.0, 1.0), "kind": ["a", "b"]})
    assert values(found) == {"n": 3, "lr": 0.25, "kind": "b"}
    assert values(widgets(fn, {"n": (10, 20), "lr": (1.0, 2.0), "kind": ["a"]})) == {"n": 10, "lr": 1.0, "kind": "a"}


def test_what_is_not_given_has_its_default() -> None:
    def fn(rank, epochs=10, name="run", path=None, data=(), *, fast=False): ...

    found = widgets(fn, {})
    assert values(found) == {"epochs": 10, "name": "run", "fast": False}
    assert values(widgets(fn, {"path": "/tmp"}))["path"] == "/tmp"


def test_a_widget_that_is_given() -> None:
    named, unnamed = ipywidgets.IntText(4, description="mine"), ipywidgets.IntText(5)
    assert (one(named), named.description) == (named, "mine")
    assert (one(unnamed), unnamed.description) == (unnamed, "x")
    fixed = ipywidgets.fixed({"any": "thing"})
    assert one(fixed) is fixed and values({"x": fixed}) == {"x": {"any": "thing"}}


@pytest.mark.skipif(ipywidgets.__version__ < "8", reason="ipywidgets 7 knows no annotations")
def test_annotations() -> None:
    def fn(rank, n: int, on: bool, mode: Mode): ...

    found = widgets(fn, {})
    assert [type(found[name]) for name in ("n", "on", "mode")] == [
        ipywidgets.IntText,
        ipywidgets.Checkbox,
        ipywidgets.Dropdown,
    ]
    assert found["mode"].value is Mode.TRAIN


@pytest.mark.parametrize("annotation", ["list[int]", "'int | None'", "Unknown", "dict"])
def test_annotations_that_are_no_abbreviation(annotation: str) -> None:
    space: dict[str, Any] = {}
    exec(f"from __future__ import annotations\ndef fn(rank, x: {annotation}): ...", space)
    with pytest.raises(UsageError, match=r"fn\(\) has no value for 'x': interact\(fn, x=…\)"):
        widgets(space["fn"], {})
    assert values(widgets(space["fn"], {"x": 3})) == {"x": 3}


# fmt: off
def no_rank() -> None: ...
def only_names(*, x: int = 1) -> None: ...
def only_more(**more: int) -> None: ...
def all_by_position(*args: int) -> None: ...
def by_position(rank: int, x: int, /) -> None: ...
def plain(rank: int, x: int = 1) -> None: ...
# fmt: on


class Job:
    def __call__(self, rank: int, x: int = 4) -> None: ...

    def method(self, rank: int, x: int = 5) -> None: ...


@pytest.mark.parametrize(
    "fn, found",
    [
        (all_by_position, {}),
        (functools.partial(plain, x=3), {"x": 3}),
        (functools.partial(only_names, x=3), None),
        (Job(), {"x": 4}),
        (Job().method, {"x": 5}),
        (lambda rank, x="l": None, {"x": "l"}),
        (len, {}),
        (no_rank, None),
        (only_names, None),
        (only_more, None),
        (dict, None),
    ],
)
def test_kinds_of_functions(fn: Callable[..., Any], found: dict[str, Any] | None) -> None:
    if found is not None:
        assert values(widgets(fn, {})) == found
        return
    with pytest.raises(UsageError, match="must take the rank as its first argument"):
        widgets(fn, {})


@pytest.mark.parametrize(
    "fn, given, message",
    [
        (by_position, {}, r"by_position\(\) takes 'x' by position only"),
        (plain, {"y": 1}, r"plain\(\) has no parameter 'y'"),
        (plain, {"rank": 1}, r"plain\(\) has no parameter 'rank'"),
        (plain, {"x": object()}, "x=<object object .* is no abbreviation"),
        (plain, {"x": None}, "x=None is no abbreviation"),
        (plain, {"x": (3, 1)}, "is no abbreviation"),
        (plain, {"x": ("a", "b")}, "is no abbreviation"),
    ],
)
def test_what_is_refused(fn: Callable[..., Any], given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        widgets(fn, given)


def test_the_newest_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    here = sys.modules[__name__]

    def other(rank: int, y: int = 2) -> None: ...

    followed, bound, nested = Redefined(plain), Redefined(functools.partial(plain, x=3)), Redefined(other)
    monkeypatch.setattr(here, "plain", other)
    for function in (followed, bound, nested):
        function.update()
    assert followed.current is other and followed.parameters == ["rank", "y"]
    assert bound.current.func is not other and nested.current is other
    monkeypatch.setattr(here, "plain", 5)
    followed.update()
    assert followed.current is other, "no function"
    mine = Redefined(Job().method)
    mine.update()
    assert mine.name == "method"
