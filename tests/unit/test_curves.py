"""Numbers that ranks print by name become curves; other text does not."""

from __future__ import annotations

from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from nbspawn._protocol.messages import Logged, Printed
from nbspawn._render.curves import html
from nbspawn._state.curves import Curves
from nbspawn._state.run import Run


def curves_of(*lines: str, rank: int = 0, bar: bool = False) -> Curves:
    curves = Curves()
    for moment, line in enumerate(lines):
        curves.add([Printed(rank, () if bar else (line,), line if bar else "")], 100.0 + moment)
    return curves


def values(curves: Curves) -> dict[str, list[float]]:
    return {name: next(iter(ranks.values())).values for name, ranks in curves.drawn.items()}


@pytest.mark.parametrize(
    "line, name",
    [
        ("epoch {} loss {:.2f}", "loss"),
        ("step {}/10 | train/loss: {:.3f} |", "train/loss"),
        ("{{'epoch': {}.0, 'eval_loss': {:.4f}}}", "eval_loss"),
        ("Epoch {}:  40%|████      | 4/10 [00:01<00:00,  3.2it/s, v_num=0, acc={:.2f}]", "acc"),
        ("iteration {}: Validation loss={:.1e}, done", "loss"),
        ("{} val_acc {:.2f}", "val_acc"),
        ("Test Error {}: Accuracy: {:.1f}%, Avg time: 0.213", "Accuracy %"),
        ("step {} accuracy {:.1f} %", "accuracy %"),
    ],
)
def test_numbers_with_names(line: str, name: str) -> None:
    found = values(curves_of(*(line.format(step, 0.5 - step / 10) for step in range(3))))
    assert found[name] == [0.5, 0.4, 0.3]


@pytest.mark.parametrize(
    "line",
    [
        "epoch {} of 10",
        "took 0.3{} s",
        "step {}: elapsed: 0.31",
        "10%|█         | 1/10 [00:0{}<00:09,  1.01it/s]",
        "version 1.{}",
        "loss {}.5.1",
        "Training: {}%|█         |",
        "disk: {}% full",
        "lr=0.1, step {}",
        "http://host:80{}.5/loss",
    ],
)
def test_what_is_no_curve(line: str) -> None:
    assert curves_of(*(line.format(step) for step in range(5))).drawn == {}


def test_whole_percents_count() -> None:
    assert values(curves_of("acc: 50%", "acc: 60%", "acc: 71%")) == {"acc %": [50.0, 60.0, 71.0]}


def test_a_bar_that_is_redrawn_counts_what_has_changed() -> None:
    assert values(curves_of(*["loss=0.5"] * 9, "loss=0.4", "loss=0.3", bar=True)) == {"loss": [0.5, 0.4, 0.3]}
    assert values(curves_of("loss=0.5", "loss=0.4")) == {}, "two points are no curve"


def test_settings_that_are_printed_once_take_no_room() -> None:
    settings = " ".join(f"setting{number}=0.{number}" for number in range(9))
    assert values(curves_of(settings, *(f"loss {loss}" for loss in (0.5, 0.4, 0.3)))) == {"loss": [0.5, 0.4, 0.3]}


def test_the_size_is_bounded() -> None:
    curves = Curves()
    for step in range(1000):
        for rank in range(20):
            line = " ".join(f"n{number}={step}.{rank}" for number in range(9))
            curves.add([Printed(rank, (line,), "")], float(step))
    assert len(curves.drawn) == 4 and all(len(ranks) == 8 for ranks in curves.drawn.values())
    courses = [course for ranks in curves.drawn.values() for course in ranks.values()]
    assert all(len(course.values) <= 121 and course.values[0] < 1 and course.values[-1] >= 999 for course in courses)
    assert len(html(curves, Run.new(20, "fork", "", "", 0.0))) < 60_000


def test_pictures() -> None:
    curves = Curves()
    for step in range(3):
        for rank in range(2):
            curves.add(
                [Printed(rank, (f"<loss>={0.5 - step / 10} loss={1.0 - step / (2 + rank)} acc=0.{step}",), "")],
                1.0 * step,
            )
    page = html(curves, Run.new(2, "fork", "", "", 0.0))
    assert page.count("<img") == 2 and 'alt="loss of ranks 0-1: 1 to 0"' in page, page
    pictures = [
        ElementTree.fromstring(unquote(part.partition('"')[0])) for part in page.split("data:image/svg+xml,")[1:]
    ]
    lines = [[one.attrib["stroke"] for one in picture.iter() if one.tag.endswith("polyline")] for picture in pictures]
    assert len(set(lines[0])) == 2 and len(lines[1]) == 1, "equal ranks have one line"
    assert html(Curves(), Run.new(2, "fork", "", "", 0.0)) == ""


def test_more_than_there_is_room_for_is_named() -> None:
    curves = Curves()
    for step in range(4):
        curves.add([Printed(0, (f"loss {step / 4}",), "")], 1.0 * step)
        curves.add([Logged(0, 1.0 * step, {name: (1.0, 1.0, 1.0) for name in "abcde"})], 0.0)
    assert list(curves.drawn) == ["a", "b", "c", "d"], "what is logged is drawn, also if it does not change"
    assert "not drawn: e, loss" in html(curves, Run.new(1, "fork", "", "", 0.0))


def test_logged_numbers() -> None:
    curves = Curves()
    for step, loss in enumerate((3.0, float("nan"), 2.0, 1.0)):
        curves.add([Logged(1, float(step), {"loss": (loss, loss, loss)})], 0.0)
    assert values(curves) == {"loss": [3.0, 2.0, 1.0]}
    assert curves.drawn["loss"][1].times == [0.0, 2.0, 3.0]
    curves.add([Logged(1, 4.0, {"loss": (1.0, 0.5, 90.0)})], 0.0)
    assert values(curves)["loss"][3:] == [0.5, 90.0, 1.0], "what came between two messages"


def test_extremes_stay() -> None:
    curves = curves_of(*(f"loss {100.0 if step == 137 else 1 + step / 1000}" for step in range(1000)))
    course = curves.drawn["loss"][0]
    assert max(course.values) == course.most == 100.0 and course.least == 1.0
    assert "min 1, max 100" in unquote(html(curves, Run.new(1, "fork", "", "", 0.0)))


def test_two_numbers_of_one_name_are_told_apart_or_left_out() -> None:
    lines = [f"epoch {step} train loss {1 - step / 4} val loss {2 - step / 4}" for step in range(3)]
    assert values(curves_of(*lines)) == {"train loss": [1.0, 0.75, 0.5], "val loss": [2.0, 1.75, 1.5]}
    assert values(curves_of(*(f"loss 0.{step} loss 1.{step}" for step in range(4)))) == {}


def test_quoted_numbers_and_those_that_are_none() -> None:
    assert values(curves_of(*(f"{{'loss': '0.{step}', 'lr': '1e-05'}}" for step in (3, 2, 1))))["loss"] == [
        0.3,
        0.2,
        0.1,
    ]
    curves = curves_of("loss 0.3", "loss 0.2", "loss 0.1", "loss nan")
    assert values(curves) == {"loss": [0.3, 0.2, 0.1]}
    page = html(curves, Run.new(2, "fork", "", "", 0.0))
    assert "nan in rank 0" in unquote(page) and "0.3 to nan" in page


def test_a_bar_that_has_ended_does_not_come_after_the_next_one() -> None:
    bar = "{1:3}%|████      | 4/10 [00:01<00:00,  3.2it/s, acc={0}]"
    curves = curves_of(*(bar.format(0.5 + step / 10, 70 + 10 * step) for step in range(3)), bar=True)
    curves.add([Printed(0, (), bar.format(0.1, 10))], 200.0)
    curves.add([Printed(0, (bar.format(0.75, 100),), bar.format(0.2, 50))], 201.0)
    assert values(curves) == {"acc": [0.5, 0.6, 0.7, 0.1, 0.2]}
    curves.add([Printed(0, (bar.format(0.3, 100),), "")], 202.0)
    assert values(curves)["acc"][-1] == 0.3, "its last value, where no other bar came between"


@pytest.mark.parametrize(
    "line, name",
    [
        ("loss {}", "loss"),
        ("\x1b[3mtrain_loss: {}\x1b[0m", "train_loss"),
        ("Accuracy: {0}/10 ({0}0%)", "Accuracy %"),
    ],
)
def test_whole_numbers_of_metrics_count(line: str, name: str) -> None:
    factor = 10 if "%" in name else 1
    assert values(curves_of(*(line.format(step) for step in (5, 4, 3)))) == {name: [5 * factor, 4 * factor, 3 * factor]}
    assert values(curves_of(*(f"reward={number}" for number in (0.5, 1, 2)))) == {"reward": [0.5, 1.0, 2.0]}
    assert values(curves_of(*(f"size={number}" for number in (5, 4, 3)))) == {}


def test_more_ranks_than_are_drawn_are_named() -> None:
    curves = Curves()
    for step in range(3):
        curves.add([Printed(rank, (f"loss {step + rank}",), "") for rank in range(16)], 1.0 * step)
    assert "of ranks 0-7" in unquote(html(curves, Run.new(16, "fork", "", "", 0.0)))
