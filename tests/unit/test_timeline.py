"""What each rank did when: bins of bounded number, lanes, and the picture, the text and the records made of them."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import NamedTuple
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import Event, InputRequest, Printed, Sampled, Stopped
from nbspawn._render import profile as drawing
from nbspawn._render import text, timeline
from nbspawn._render.lanes import MAX_LANES, lanes
from nbspawn._state.line_profile import Profile
from nbspawn._state.run import Run, State
from nbspawn._state.snapshot import Snapshot
from nbspawn._state.timeline import Activity, Bin, Timeline

SOURCE = ("%%spawn 2", "for step in range(9):", "    work(step)", "    dist.barrier()")


def at_line(line: int, waiting: bool = False) -> Activity:
    return Activity(Frame("cell", line, ""), waiting)


WORK, BARRIER, OUTSIDE = at_line(3), at_line(4, waiting=True), Activity(None, False)
Spans = Sequence[tuple[Activity, float]]


def timeline_of(*ranks: Spans) -> Timeline:
    """One in which each rank does one thing after another, for so many seconds each."""
    made = Timeline(len(ranks), 0.0)
    for rank, spans in enumerate(ranks):
        begin = 0.0
        for activity, seconds in spans:
            made.spend(rank, activity, begin, seconds)
            begin += seconds
    return made


def spent(one: Bin) -> dict[Activity, float]:
    return {activity: round(seconds, 6) for activity, seconds in one.seconds.items() if seconds > 1e-6}


def total(bins: Sequence[Bin]) -> dict[Activity, float]:
    """Seconds by activity."""
    seconds: Counter[Activity] = Counter()
    for one in bins:
        seconds.update(one.seconds)
    return dict(seconds)


# ---------------------------------------------------------------- bins


def test_a_time_over_several_bins() -> None:
    made = Timeline(1, 0.0)
    made.spend(0, WORK, 0.05, 0.2)
    made.spend(0, BARRIER, 0.25, 0.1)
    assert [spent(one) for one in made.bins[0]] == [
        {WORK: 0.05},
        {WORK: 0.1},
        {WORK: 0.05, BARRIER: 0.05},
        {BARRIER: 0.05},
    ]


def test_bins_begin_where_ranks_are_looked_at() -> None:
    """At full tenths of the clock, not when the run happened to begin."""
    made = Timeline(1, 123.456)
    assert made.origin == pytest.approx(123.4)
    made.spend(0, WORK, 123.5, 0.1)
    assert [spent(one) for one in made.bins[0]] == [{}, {WORK: 0.1}]


def test_what_was_before_the_run_counts_to_its_begin() -> None:
    made = Timeline(1, 100.0)
    made.spend(0, WORK, 99.0, 0.2)
    assert total(made.bins[0]) == pytest.approx({WORK: 0.2}) and len(made.bins[0]) == 2
    made.print(0, 99.0)
    made.ask(0, 99.0)
    assert made.bins[0][0].printed and made.bins[0][0].asked


@pytest.mark.parametrize("seconds", [12.0, 60.0, 600.0, 36_000.0, 3e7])
def test_a_long_run_has_no_more_bins_than_a_short_one(seconds: float) -> None:
    made = Timeline(2, 0.0)
    for step in range(1000):
        made.spend(0, WORK, step * seconds / 1000, seconds / 1000)
    made.spend(1, WORK, 0.0, seconds)
    assert 60 <= len(made.bins[0]) <= 120 and len(made.bins[1]) == len(made.bins[0])
    for bins in made.bins:
        assert total(bins) == pytest.approx({WORK: seconds})
        assert all(sum(one.seconds.values()) == pytest.approx(made.width) for one in bins[:-1])


@pytest.mark.parametrize("nprocs", [1, 64, 1000, 4096])
def test_many_ranks_have_fewer_bins(nprocs: int) -> None:
    made = timeline_of(*[[(WORK, 40.0), (BARRIER, 20.0)]] * nprocs)
    assert sum(map(len, made.bins)) <= max(8192, 8 * nprocs)
    assert {len(bins) for bins in made.bins} == {len(made.bins[0])} and len(made.bins[0]) >= 4
    assert total(made.bins[-1]) == pytest.approx({WORK: 40.0, BARRIER: 20.0})


@pytest.mark.parametrize("seed", range(8))
def test_no_second_is_lost_when_bins_become_wider(seed: int) -> None:
    rng = random.Random(seed)
    some = [WORK, BARRIER, OUTSIDE, at_line(2), at_line(3, waiting=True)]
    mean = 10 ** rng.uniform(-2, 3)
    ranks = [
        [(rng.choice(some), rng.expovariate(1 / mean)) for _ in range(rng.randrange(1, 400))]
        for _ in range(rng.choice([1, 3, 200]))
    ]
    made = timeline_of(*ranks)
    for spans, bins in zip(ranks, made.bins, strict=True):
        wanted: Counter[Activity] = Counter()
        for activity, seconds in spans:
            wanted[activity] += seconds  # type: ignore[assignment]
        assert total(bins) == pytest.approx(dict(wanted))
        assert max(sum(one.seconds.values()) for one in bins) <= made.width * (1 + 1e-9)
        assert len(bins) <= 120


@pytest.mark.parametrize("seed", range(4))
def test_of_too_many_activities_those_that_took_least_are_one(seed: int) -> None:
    rng = random.Random(seed)
    one = Bin()
    parts = [(at_line(line, waiting), 2.0**line) for line in range(1, 12) for waiting in (False, True)] * 2
    rng.shuffle(parts)
    for activity, seconds in parts:
        one.add(activity, seconds)
        assert len(one.seconds) <= 6
    assert {at_line(11), at_line(11, waiting=True)} <= one.seconds.keys(), "those that took most have their line"
    for waiting in (False, True):
        kept = sum(seconds for activity, seconds in one.seconds.items() if activity.waiting == waiting)
        assert kept == pytest.approx(2 * sum(2.0**line for line in range(1, 12)))


def test_a_line_that_comes_last_and_takes_long_has_its_time() -> None:
    one = Bin()
    for line in range(1, 10):
        one.add(at_line(line), 1.0)
    for _ in range(200):
        one.add(WORK, 0.05)
    assert one.seconds[WORK] == pytest.approx(10.0, abs=1.0) and len(one.seconds) <= 6


def test_marks_stay_where_they_are_when_bins_become_wider() -> None:
    made = Timeline(2, 0.0)
    for moment in (0.05, 33.33):
        made.print(0, moment)
    made.ask(0, 21.0)
    made.spend(1, WORK, 0.0, 500.0)
    assert made.width > 0.1
    printed = [index for index, one in enumerate(made.bins[0]) if one.printed]
    asked = [index for index, one in enumerate(made.bins[0]) if one.asked]
    assert (printed, asked) == ([0, int(33.33 / made.width)], [int(21.0 / made.width)])
    assert not any(one.printed or one.asked for one in made.bins[1]) and total(made.bins[0]) == {}


# ---------------------------------------------------------------- from events


def a_run(nprocs: int = 2, ended: float | None = None, source: Sequence[str] = SOURCE) -> Run:
    run = Run.new(nprocs, "fork", "", "/tmp", 0.0, "cell", tuple(source), {"cell": "Cell In[5]"})
    return replace(run, ended=ended)


def position(activity: Activity) -> Position:
    frames = () if activity.frame is None else (activity.frame._replace(name="<module>"),)
    return Position(frames, "", activity.waiting, activity.device)


def sampled(rank: int, begin: float, *spans: tuple[Activity, float]) -> Sampled:
    parts = tuple((position(activity), seconds) for activity, seconds in spans)
    return Sampled(rank, begin + sum(seconds for _, seconds in spans), parts[-1][0], begin, parts)


def test_what_one_message_tells_is_in_order() -> None:
    profile = Profile(a_run())
    profile.add([sampled(1, 0.5, (WORK, 0.1), (BARRIER, 0.2), (WORK, 0.1))], 1.0)
    assert [spent(one) for one in profile.timeline.bins[1]] == [
        *({},) * 5,
        *({WORK: 0.1}, {BARRIER: 0.1}, {BARRIER: 0.1}, {WORK: 0.1}),
    ]
    assert profile.timeline.bins[0] == []


def test_printing_and_asking_count_when_they_are_received() -> None:
    profile = Profile(a_run())
    profile.add([Printed(0, ("text",), ""), InputRequest(1, "? ", False, 0)], 0.15)
    profile.add([Stopped(1, 0.0, Frame("cell", 2, "f"), False)], 0.35)
    assert [one.printed for one in profile.timeline.bins[0]] == [False, True]
    assert [one.asked for one in profile.timeline.bins[1]] == [False, True, False, True]


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_events_of_an_unknown_rank_change_nothing(rank: int) -> None:
    profile = Profile(a_run())
    events: list[Event] = [
        sampled(rank, 0.0, (WORK, 1.0)),
        Printed(rank, ("text",), ""),
        InputRequest(rank, "", False, 0),
    ]
    profile.add(events, 1.0)
    assert profile.timeline.bins == [[], []] and not profile.lines and not profile.totals


# ---------------------------------------------------------------- lanes


STEPS: Spans = [(WORK, 0.6), (BARRIER, 0.4)] * 30


def groups(made: Timeline, apart: Sequence[int] = ()) -> list[tuple[int, ...]]:
    return [lane.ranks for lane in lanes(made, apart)]


def test_few_ranks_have_a_lane_each() -> None:
    made = timeline_of(*[STEPS] * 16)
    assert groups(made) == [(rank,) for rank in range(16)]
    assert [lane.bins for lane in lanes(made)] == made.bins


def test_equal_ranks_share_a_lane() -> None:
    made = timeline_of(*[STEPS] * 64)
    (lane,) = lanes(made)
    assert lane.ranks == tuple(range(64))
    assert total(lane.bins) == pytest.approx({WORK: 64 * 18.0, BARRIER: 64 * 12.0})


@pytest.mark.parametrize("seconds", [2, 12, 60])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_flicker_alike_are_equal(seconds: int, seed: int) -> None:
    """They do the same three things, but no two of them the same at the moment of a sample."""
    rng = random.Random(seed)

    def flicker() -> Spans:
        return [(rng.choices([WORK, at_line(2), BARRIER], (42, 28, 30))[0], 0.1) for _ in range(seconds * 10)]

    assert len(groups(timeline_of(*(flicker() for _ in range(64))))) <= 4


def test_a_straggler_has_a_lane_of_its_own() -> None:
    made = timeline_of(*([(WORK, 30.0)] if rank == 37 else STEPS for rank in range(64)))
    assert groups(made) == [(*range(37), *range(38, 64)), (37,)]


def test_each_stage_of_a_pipeline_has_a_lane() -> None:
    stages = [[(BARRIER, 2.0 * stage), (at_line(10 + stage), 30.0), (BARRIER, 6.0 - 2 * stage)] for stage in range(4)]
    made = timeline_of(*(stages[rank // 16] for rank in range(64)))
    assert groups(made) == [tuple(range(16 * stage, 16 * stage + 16)) for stage in range(4)]


def test_who_did_the_same_in_another_order_has_another_lane() -> None:
    orders: list[Spans] = [[(WORK, 30.0), (at_line(2), 30.0)], [(at_line(2), 30.0), (WORK, 30.0)]]
    made = timeline_of(*(orders[rank % 2] for rank in range(20)))
    assert groups(made) == [tuple(range(0, 20, 2)), tuple(range(1, 20, 2))]


def test_failed_ranks_are_alone() -> None:
    made = timeline_of(*[STEPS] * 64)
    others = tuple(rank for rank in range(64) if rank not in (3, 40))
    assert groups(made, apart=[40, 3]) == [others, (3,), (40,)]
    found = groups(made, apart=range(63, 30, -1))
    assert [ranks for ranks in found if len(ranks) == 1] == [(rank,) for rank in range(56, 64)], "the first eight"


@pytest.mark.parametrize("seed", range(10))
def test_there_are_never_too_many_lanes(seed: int) -> None:
    rng = random.Random(seed)
    nprocs = rng.choice([1, 16, 17, 64, 300])
    made = timeline_of(
        *(
            [(at_line(rng.randrange(20), rng.random() < 0.3), rng.expovariate(0.5)) for _ in range(rng.randrange(30))]
            for _ in range(nprocs)
        )
    )
    found = lanes(made, rng.sample(range(nprocs), rng.randrange(nprocs)))
    assert len(found) <= MAX_LANES
    assert sorted(rank for lane in found for rank in lane.ranks) == list(range(nprocs))
    assert [lane.ranks[0] for lane in found] == sorted(lane.ranks[0] for lane in found)
    taken = sum(sum(total(lane.bins).values()) for lane in found)
    assert taken == pytest.approx(sum(sum(total(bins).values()) for bins in made.bins))


# ---------------------------------------------------------------- the picture


class Box(NamedTuple):
    """Pixels, to the next whole one."""

    colour: str
    left: int
    top: int
    right: int
    bottom: int


class Page(HTMLParser):
    """Well-formed HTML: the tags and attributes that occur, the pictures, and what the mouse can point at."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.pictures: list[ElementTree.Element] = []
        self.areas: list[tuple[tuple[int, ...], str]] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.add(tag)
        self.attributes |= given.keys()
        if tag == "img":
            head, _, svg = given["src"].partition(",")
            assert head == "data:image/svg+xml"
            self.pictures.append(ElementTree.fromstring(unquote(svg)))
        elif tag == "area":
            self.areas.append((tuple(map(int, given["coords"].split(","))), given["title"]))
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: ElementTree.Element) -> Iterator[Box]:
    """The rectangles in the lanes."""
    for group in svg.findall(f"{SVG}g"):
        left, top, scale = map(
            float, re.fullmatch(r"translate\((\S+) (\S+)\) scale\((\S+) 1\)", group.get("transform", "")).groups()
        )
        for path in group.findall(f"{SVG}path"):
            drawn = path.get("d", "")
            parts = re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-(\d+)", drawn)
            assert "".join("M{} {}h{}v{}h-{}".format(*part) for part in parts) == drawn
            for x, y, width, height, back in (map(int, part) for part in parts):
                assert back == width
                right = left + (x + width) * scale
                yield Box(
                    path.get("fill", ""), round(left + x * scale), round(top + y), round(right), round(top + y + height)
                )


def labels(svg: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in svg.findall(f"{SVG}text")]


def drawn(profile: Profile, snapshot: Snapshot) -> Page:
    return Page(timeline.html(profile, snapshot, "name"))


def two_ranks(ended: float | None = 5.8, **states: tuple[State, float, str]) -> tuple[Profile, Snapshot]:
    """Rank 0 works for 2 s and waits for 3.8 s; rank 1 works."""
    run = a_run(ended=ended)
    profile = Profile(run)
    profile.add([sampled(0, 0.0, (WORK, 2.0), (BARRIER, 3.8)), sampled(1, 0.0, (WORK, 5.8))], 5.8)
    return profile, Snapshot(run, 5.8)


def ended(snapshot: Snapshot, rank: int, state: State, since: float, detail: str) -> Snapshot:
    ranks = list(snapshot.run.ranks)
    ranks[rank] = replace(ranks[rank], state=state, since=since, detail=detail)
    return replace(snapshot, run=replace(snapshot.run, ranks=tuple(ranks)))


def test_each_rank_has_a_lane_with_the_colours_of_its_lines() -> None:
    page = drawn(*two_ranks())
    (svg,) = page.pictures
    first, waiting = timeline.COLOURS[0], timeline.WAITING
    # 42 pixels are for the names, 638 for 5.8 seconds
    assert sorted(boxes(svg)) == sorted(
        [Box(first, 42, 0, 262, 16), Box(waiting, 262, 0, 680, 16), Box(first, 42, 22, 680, 38)]
    )
    assert labels(svg) == ["rank 0", "rank 1", "0", "1.0 s", "2.0 s", "3.0 s", "4.0 s", "5.0 s"]
    assert (svg.get("width"), svg.get("height")) == ("680", "64")
    assert page.tags == {"img", "map", "area"}


def test_a_wait_for_the_gpu_has_a_colour_and_a_letter() -> None:
    run, waits = a_run(1, ended=4.0), WORK._replace(device=True)
    profile, snapshot = Profile(run), Snapshot(run, 4.0)
    profile.add([sampled(0, 0.0, (WORK, 1.0), (waits, 3.0))], 4.0)
    page = drawn(profile, snapshot)
    assert sorted(box.colour for box in boxes(page.pictures[0])) == sorted([timeline.COLOURS[0], timeline.DEVICE])
    assert any("3.0 s waiting for its GPU at line 3: work(step)" in title for _, title in page.areas)
    assert timeline.text(profile, snapshot)[1] == "rank 0  " + "a" * 14 + "°" * 44


def test_lines_have_colours_in_the_order_of_the_code() -> None:
    """Those that took most time; what is left has one colour."""
    run = a_run(1, ended=12.0, source=[f"line {number}" for number in range(20)])
    profile = Profile(run)
    lines = [11, 3, 5, 2, 9, 7, 10, 4, 8, 6]
    profile.add([sampled(0, 0.0, *((at_line(line), 1.0 + (line < 10)) for line in lines))], 12.0)
    key = timeline.key(profile)
    assert [frame.line for frame in key.lines] == list(range(2, 10))
    assert [key.colour(frame) for frame in key.lines] == list(timeline.COLOURS)
    assert "".join(key.letter(frame) for frame in key.lines) == "abcdefgh"
    assert (key.colour(at_line(11).frame), key.letter(at_line(10).frame)) == (timeline.OTHERS, "-")
    assert (key.colour(None), key.letter(None)) == (timeline.OTHERS, "-")
    found = sorted(boxes(drawn(profile, Snapshot(run, 12.0)).pictures[0]), key=lambda box: box.left)
    assert [box.colour for box in found] == [key.colour(at_line(line).frame) for line in lines]


def test_a_line_that_only_waits_needs_no_colour() -> None:
    profile, _ = two_ranks()
    assert timeline.key(profile).lines == [WORK.frame]


def test_activities_of_a_bin_are_on_top_of_one_another() -> None:
    run = a_run(1, ended=0.1)
    profile = Profile(run)
    waiting = at_line(2, waiting=True)
    profile.add([sampled(0, 0.0, (waiting, 0.05), (at_line(4), 0.025), (WORK, 0.025))], 0.1)
    first, second, *_ = timeline.COLOURS
    assert sorted(boxes(drawn(profile, Snapshot(run, 0.1)).pictures[0]), key=lambda box: box.top) == [
        Box(first, 42, 0, 680, 4),
        Box(second, 42, 4, 680, 8),
        Box(timeline.WAITING, 42, 8, 680, 16),
    ]


def test_a_line_below_tells_when_a_rank_has_printed() -> None:
    profile, snapshot = two_ranks()
    profile.add([Printed(1, ("text",), "")], 1.05)
    profile.add([Printed(1, ("text",), "")], 1.15)
    (line,) = (box for box in boxes(drawn(profile, snapshot).pictures[0]) if box.bottom - box.top == 2)
    assert line == Box("#808080", 152, 39, 174, 41)


def test_what_the_mouse_points_at_is_told() -> None:
    assert drawn(*two_ranks()).areas == [
        ((42, 0, 262, 16), "rank 0, 0.0 to 2.0 s\n2.0 s at line 3: work(step)"),
        ((262, 0, 680, 16), "rank 0, 2.0 to 5.8 s\n3.8 s waiting for other ranks at line 4: dist.barrier()"),
        ((42, 22, 680, 38), "rank 1, 0.0 to 5.8 s\n5.8 s at line 3: work(step)"),
    ]


def test_what_took_most_is_told_first() -> None:
    run = a_run(1, ended=10.0)
    profile = Profile(run)
    parts = [(OUTSIDE, 0.3), (at_line(2), 0.1), (WORK, 0.4), (BARRIER, 0.2)] * 2000  # three are told
    profile.add([sampled(0, 0.0, *((activity, seconds / 200) for activity, seconds in parts))], 10.0)
    ((_, title),) = drawn(profile, Snapshot(run, 10.0)).areas
    assert title.splitlines() == [
        "rank 0, 0.0 to 10.0 s",
        "4.0 s at line 3: work(step)",
        "3.0 s at other lines",
        "2.0 s waiting for other ranks at line 4: dist.barrier()",
    ]


def test_what_took_next_to_nothing_is_not_told() -> None:
    run = a_run(1, ended=10.0)
    profile = Profile(run)
    profile.add([sampled(0, 0.0, (at_line(2), 0.04), (WORK, 9.46), (BARRIER, 0.5))], 10.0)
    assert [title for _, title in drawn(profile, Snapshot(run, 10.0)).areas] == [
        "rank 0, 0.0 to 9.5 s\n9.5 s at line 3: work(step)",
        "rank 0, 9.5 to 10.0 s\n0.5 s waiting for other ranks at line 4: dist.barrier()",
    ]


def test_of_ranks_in_one_lane_the_average_is_told() -> None:
    run = a_run(64, ended=10.0)
    profile = Profile(run)
    profile.add([sampled(rank, 0.0, (WORK, 10.0)) for rank in range(64)], 10.0)
    page = drawn(profile, Snapshot(run, 10.0))
    assert [title for _, title in page.areas] == ["ranks 0-63, 0.0 to 10.0 s\n10.0 s at line 3: work(step)"]
    assert labels(page.pictures[0])[0] == "ranks 0-63" and len(list(boxes(page.pictures[0]))) == 1


def test_where_ranks_failed_were_stopped_or_asked() -> None:
    profile, snapshot = two_ranks()
    for now in (1.0, 1.1, 4.0):
        profile.add([InputRequest(1, "name? ", False, 0)], now)
    snapshot = ended(snapshot, 0, "failed", 2.9, "KeyError: 'x' (line 3)")
    snapshot = ended(snapshot, 1, "killed", 5.8, "SIGTERM by nbspawn (a peer failed)")
    page = drawn(profile, snapshot)
    assert page.areas[:4] == [
        ((361, 0, 373, 16), "✗ rank 0: failed after 2.9 s: KeyError: 'x' (line 3)"),
        ((152, 22, 164, 38), "? rank 1 asked for input after 1.0 s"),
        ((482, 22, 494, 38), "? rank 1 asked for input after 4.0 s"),
        ((668, 22, 680, 38), "■ rank 1: killed after 5.8 s: SIGTERM by nbspawn (a peer failed)"),
    ]
    marks = [one for one in page.pictures[0].findall(f"{SVG}text") if one.text in ("✗", "■", "?")]
    assert [(one.text, one.get("x"), one.get("y")) for one in marks] == [
        ("✗", "361", "13"),
        ("?", "152", "35"),
        ("?", "482", "35"),
        ("■", "668", "35"),
    ]
    assert [one.get("fill") == "#808080" for one in marks] == [False, True, True, False]


def test_a_rank_that_was_gone_before_the_run_is_marked_at_its_begin() -> None:
    """A kept rank may die between two cells."""
    profile, snapshot = two_ranks()
    snapshot = ended(snapshot, 0, "failed", -700.0, "SIGKILL")
    assert drawn(profile, snapshot).areas[0][0] == (42, 0, 54, 16)
    assert timeline.text(profile, snapshot)[1].startswith("rank 0  ✗aaa")


@pytest.mark.parametrize("seconds", [0.0, 0.7, 5.8, 59.0, 3600.0, 7 * 3600.0, 40 * 86_400.0])
def test_nothing_is_outside_of_the_picture(seconds: float) -> None:
    run = a_run(3, ended=seconds)
    profile = Profile(run)
    if seconds:
        profile.add([sampled(0, 0.0, (WORK, seconds)), sampled(1, 0.0, (WORK, 2 * seconds))], seconds)
    snapshot = ended(Snapshot(run, seconds), 1, "failed", 3 * seconds, "late")
    page = drawn(profile, snapshot)
    height = int(page.pictures[0].get("height", ""))
    for (left, top, right, bottom), _ in page.areas:
        assert 0 <= left <= right <= 680 and 0 <= top <= bottom <= height
    ticks = [one for one in page.pictures[0].findall(f"{SVG}text") if one.get("y") == str(height - 6)]
    assert 1 <= len(ticks) <= 10
    assert all(0 <= int(tick.get("x", "")) <= 680 for tick in ticks)
    assert len({tick.text for tick in ticks}) == len(ticks)


HOSTILE = {
    "tag": "x = '<script>alert(1)</script>'",
    "quotes": """x = '"' + "'" + "><img src=x onerror=alert(1)>" + '" onmouseover="alert(1)'""",
    "cdata": "x = ']]>' + '<![CDATA[' + '&lt;&amp;&#0;' + '--><!--'",
    "control": "x = '\x00\x01\x07\x0b\x0c\x1b[31m\x1b]0;title\x07\x7f\x9b1m'",
    "long": "x = '" + "a" * 1_000_000 + "'",
    "wide": "x = '" + "オ🔥" * 5000 + "'",
    "bidi": "x = '\u202e\u2066\ufeff\u200d' # %s %d {} {0} %(name)s",
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_hostile_source_is_text(line: str) -> None:
    """As a line of the cell, as one of another file, and in an error."""
    run = a_run(2, ended=5.0, source=["%%spawn 2", line, f"    {line}"])
    profile = Profile(run)
    elsewhere = Frame(f"/tmp/{line[:50]}.py", 7, f"<b>{line[:50]}")
    profile.add(
        [
            sampled(0, 0.0, (at_line(2), 2.0), (at_line(3, waiting=True), 3.0)),
            sampled(1, 0.0, (at_line(3), 2.0), (Activity(elsewhere, False), 3.0)),
            Printed(0, (line,), line),
        ],
        5.0,
    )
    snapshot = ended(Snapshot(run, 5.0, lambda frame: f"  {line}\n"), 1, "failed", 4.0, line)
    page = drawing.html(profile, snapshot, True, "name")
    parsed = Page(page)
    assert parsed.tags == {
        *("details", "summary", "div", "img", "map", "area"),
        *("table", "thead", "tbody", "tr", "th", "td", "span"),
    }
    assert parsed.attributes == {
        *("style", "open", "alt", "width", "height", "usemap", "src", "name"),
        *("shape", "coords", "title", "align"),
    }
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", page) and len(page) < 15_000
    assert all(
        one.tag in {f"{SVG}{name}" for name in ("svg", "g", "path", "text")} for one in parsed.pictures[0].iter()
    )
    titles = [title for _, title in parsed.areas]
    assert any(re.match(r"rank 0.*\n2\.0 s at line 2: x = ", title) for title in titles)
    lines = drawing.text(profile, snapshot).splitlines()
    assert len(lines) == 1 + 3 + 1 + 4, "one line a row"
    assert max(sum(map(text._columns, one)) for one in lines) <= 100


def flickering(nprocs: int, seconds: int, *activities: Activity) -> tuple[Profile, Snapshot]:
    """Another activity at every look."""
    rng = random.Random(0)
    source = ["%%spawn", *(f"    loss = train(model, batch[{number}], optimizer)" for number in range(30))]
    run = a_run(nprocs, ended=float(seconds), source=source)
    profile = Profile(run)
    for begin in range(seconds):
        spans = [[(rng.choice(activities), 0.1) for _ in range(10)] for _ in range(nprocs)]
        profile.add([sampled(rank, float(begin), *one) for rank, one in enumerate(spans)], begin + 1.0)
    return profile, Snapshot(run, float(seconds))


@pytest.mark.parametrize(
    ("nprocs", "seconds", "most"), [(1, 60, 30), (4, 60, 60), (16, 4, 55), (16, 60, 95), (64, 60, 35), (1000, 4, 35)]
)
def test_the_html_is_small_even_if_ranks_never_do_the_same(nprocs: int, seconds: int, most: int) -> None:
    """``most`` are kilobytes."""
    profile, snapshot = flickering(nprocs, seconds, WORK, at_line(2), BARRIER)
    page = drawing.html(profile, snapshot, True, "name")
    assert len(page) < 1000 * most
    assert len(Page(page).areas) <= 100


def test_the_html_is_bounded_however_many_lines_take_time() -> None:
    some = [at_line(line, waiting) for line in range(2, 30) for waiting in (False, True)]
    page = drawing.html(*flickering(16, 100, *some), True, "name")
    assert len(page) < 130_000 and len(Page(page).areas) <= 100


# ---------------------------------------------------------------- text


def test_text() -> None:
    profile, snapshot = two_ranks()
    assert timeline.text(profile, snapshot) == [
        "        0" + "5.8 s".rjust(57),
        "rank 0  " + "a" * 20 + "·" * 38,
        "rank 1  " + "a" * 58,
    ]


def test_text_of_ranks_that_ended_early() -> None:
    profile, snapshot = two_ranks(ended=None)
    snapshot = replace(ended(snapshot, 0, "failed", 2.95, "KeyError"), now=11.6)
    snapshot = ended(snapshot, 1, "interrupted", 11.6, "stop")
    assert timeline.text(profile, snapshot) == [
        "        0" + "11.6 s".rjust(57),
        "rank 0  " + "a" * 10 + "·" * 4 + "✗" + "·" * 14,
        "rank 1  " + "a" * 29 + " " * 28 + "■",
    ]


@pytest.mark.parametrize("nprocs", [1, 16, 64, 1000])
def test_the_text_has_at_most_eighty_columns(nprocs: int) -> None:
    run = a_run(nprocs, ended=60.0)
    profile = Profile(run)
    profile.add([sampled(rank, 0.0, (at_line(rank * rank % 11), 60.0)) for rank in range(nprocs)], 60.0)
    lines = timeline.text(profile, Snapshot(run, 60.0))
    assert len(lines) <= 17 and len(lines) > min(nprocs, 6)
    assert max(sum(map(text._columns, line)) for line in lines) <= 80


# ---------------------------------------------------------------- records


def rows(profile: Profile, snapshot: Snapshot) -> list[tuple[object, ...]]:
    found = timeline.records(profile.timeline, snapshot)
    names = ["rank", "start", "end", "seconds", "line", "file", "source", "waiting", "device"]
    assert all(list(row) == names for row in found)
    return [tuple({**row, "seconds": round(row["seconds"], 6)}.values()) for row in found]


def test_records() -> None:
    assert rows(*two_ranks()) == [
        (0, 0.0, 2.0, 2.0, 3, "Cell In[5]", "work(step)", False, False),
        (0, 2.0, 5.8, 3.8, 4, "Cell In[5]", "dist.barrier()", True, False),
        (1, 0.0, 5.8, 5.8, 3, "Cell In[5]", "work(step)", False, False),
    ]


def test_records_of_bins_with_several_activities() -> None:
    """And of what is in another file, or in none."""
    run = a_run(1, ended=0.6)
    profile = Profile(run)
    other = Activity(Frame("/home/me/train.py", 12, ""), False)
    both = (OUTSIDE, 0.05), (WORK, 0.05)
    profile.add([sampled(0, 0.0, (OUTSIDE, 0.2), *both, *both, (BARRIER, 0.1), (other, 0.1))], 0.6)
    assert rows(profile, Snapshot(run, 0.6, lambda frame: f"text of line {frame.line}")) == [
        (0, 0.0, 0.2, 0.2, None, "", "", False, False),
        (0, 0.2, 0.3, 0.05, None, "", "", False, False),
        (0, 0.2, 0.3, 0.05, 3, "Cell In[5]", "work(step)", False, False),
        (0, 0.3, 0.4, 0.05, None, "", "", False, False),
        (0, 0.3, 0.4, 0.05, 3, "Cell In[5]", "work(step)", False, False),
        (0, 0.4, 0.5, 0.1, 4, "Cell In[5]", "dist.barrier()", True, False),
        (0, 0.5, 0.6, 0.1, 12, "/home/me/train.py", "text of line 12", False, False),
    ]


def test_records_of_a_rank_that_was_not_looked_at_for_a_while() -> None:
    run = a_run(1, ended=2.0)
    profile = Profile(run)
    profile.add([sampled(0, 0.2, (WORK, 0.2)), sampled(0, 1.0, (WORK, 0.5)), Printed(0, ("text",), "")], 1.9)
    assert rows(profile, Snapshot(run, 2.0)) == [
        (0, 0.2, 0.4, 0.2, 3, "Cell In[5]", "work(step)", False, False),
        (0, 1.0, 1.5, 0.5, 3, "Cell In[5]", "work(step)", False, False),
    ]
