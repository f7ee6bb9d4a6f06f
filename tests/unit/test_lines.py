"""A rank's bytes become the lines that a terminal would have shown; the bars are real tqdm's."""

from __future__ import annotations

import io
import time

import pytest
from tqdm import tqdm  # type: ignore[import-untyped]

from nbspawn._render.lines import LineBuffer, strip_ansi


def lines_of(*chunks: bytes) -> list[str]:
    buffer = LineBuffer()
    return [line for chunk in chunks for line in buffer.feed(chunk)[0]] + buffer.finish()


def written_by_tqdm(nested: int, *, leave: bool | None = True, after: str = "") -> bytes:
    """What real bars write, every update drawn; ``nested`` of them in each other."""
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="utf-8", write_through=True) as file:

        def loop(depth: int) -> None:
            bars = tqdm(
                range(3), f"level {depth}", file=file, ncols=60, mininterval=0, miniters=1,
                leave=leave if depth else True, bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}",
            )  # fmt: skip
            for _ in bars:
                if depth + 1 < nested:
                    loop(depth + 1)

        loop(0)
        file.write(after)
        return raw.getvalue()


def test_a_line_for_which_a_bar_has_made_way_is_complete_at_once() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"\r10 %") == ([], "10 %")
    assert buffer.feed(b"\x1b[2K\x1b[J\x1b[Gloss 3\n\r10 %") == (["loss 3"], "10 %")
    assert buffer.feed(b"\r20 %\x1b[2K\x1b[J\x1b[Gloss 2\n\r20 %\n\rinner\x1b[A") == (["loss 2"], "20 %")
    assert buffer.feed(b"\x1b[2K\x1b[J\x1b[Gloss 1\n\r20 %") == (["loss 1"], "20 %")
    assert buffer.feed(b"\n") == ([], "20 %")
    assert buffer.finish() == ["20 %"]


def test_plain_lines_and_the_one_being_written() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"a\n\nb") == (["a", ""], "b")
    assert buffer.feed(b"c") == ([], "bc")
    assert buffer.feed(b"\n") == (["bc"], "")
    assert buffer.finish() == []
    assert lines_of(b"a\r\nb\tc \n\n") == ["a", "b\tc ", ""]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"10 %\r20 %\r100 %\n", ["100 %"]),
        (b"long line\rshort\n", ["shortline"]),
        (b"long line\r\x1b[Kshort\n", ["short"]),
        (b"long line\rshort\x1b[2K\n.", ["."]),
        (b"abc\x1b[1Kd\n", ["   d"]),
        (b"abc\x1b[2Gd\n", ["adc"]),
        (b"|\b/\b-\b\\\bok\n", ["ok"]),
        (b"\b\bx\n", ["x"]),
        (b"one\ntwo\n\x1b[A\x1b[A1\x1b[B\n3\n", ["1ne", "two", "3"]),
        (b"one\ntwo\n\x1b[2A1\n2\n", ["1ne", "2wo"]),
        (b"a\x1b[5Cb\x1b[10;3Hc\x1b[?25l\x07\x00d\n", ["abcd"]),
        (b"\x1b]0;title\x07a\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", ["alink"]),
        (b"\x1b(Ba\x1b7b\x1b[\n", ["ab"]),
        (b"caf\xc3\xa9 \xff \xe2\x82\n", ["café � �"]),
        (b"cut \xe2\x82", ["cut �"]),
        (b"\x1b[99999999999Aup\n", ["up"]),
    ],
)
def test_control_characters(data: bytes, lines: list[str]) -> None:
    assert lines_of(data) == lines


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"\x1b[31mred\x1b[0m plain\n", ["\x1b[31mred\x1b[0m plain"]),
        (b"\x1b[31mred\nstill\n\x1b[mno\n", ["\x1b[31mred\x1b[0m", "\x1b[31mstill\x1b[0m", "no"]),
        (b"\x1b[1m\x1b[31mx\x1b[22my\x1b[39mz\n", ["\x1b[1;31mx\x1b[0m\x1b[31my\x1b[0mz"]),
        (b"\x1b[38;5;208mo\x1b[48;2;1;2;3mp\x1b[0m\n", ["\x1b[38;5;208mo\x1b[0m\x1b[38;5;208;48;2;1;2;3mp\x1b[0m"]),
        (b"\x1b[31mred\rg\x1b[0m\n", ["\x1b[31mged\x1b[0m"]),
        (b"\x1b[777mx\x1b[>4;1my\n", ["xy"]),
    ],
)
def test_colours_are_kept_and_closed(data: bytes, lines: list[str]) -> None:
    assert lines_of(data) == lines


def test_the_style_does_not_grow() -> None:
    buffer = LineBuffer()
    for index in range(1000):
        line = buffer.feed(f"\x1b[{31 + index % 7}m\x1b[38;5;{index % 256}mx\n".encode())[0][0]
    assert len(line) < 30


def test_one_bar_is_one_line() -> None:
    assert lines_of(written_by_tqdm(1, after="done\n")) == [f"level 0: 100%|{'█' * 41}| 3/3", "done"]


@pytest.mark.parametrize("nested", [2, 3])
@pytest.mark.parametrize("leave", [True, False, None])
def test_nested_bars_are_not_repeated(nested: int, leave: bool | None) -> None:
    lines = lines_of(written_by_tqdm(nested, leave=leave, after="done\n"))
    kept = 1 + sum(3**depth for depth in range(1, nested)) if leave else 1
    assert len(lines) == kept + 1
    assert lines[-1] == "done"
    assert all("100%" in line and line.endswith("3/3") for line in lines[:-1])


def test_nested_bars_poll_by_poll() -> None:
    """Fed update by update, the outer bar is the current line, and no line comes out before the end."""
    buffer = LineBuffer()
    seen = []
    for update in written_by_tqdm(2, leave=False).split(b"\x1b[A"):
        lines, current = buffer.feed(update + b"\x1b[A")
        assert lines == []
        seen.append(current)
    assert len(seen) > 12 and all(current.startswith("level 0") for current in seen)
    assert buffer.finish() == [f"level 0: 100%|{'█' * 41}| 3/3"]


def test_a_bar_that_ended_waits_for_an_ordinary_line() -> None:
    """The cursor could still go back to it."""
    buffer = LineBuffer()
    bar = f"level 0: 100%|{'█' * 41}| 3/3"
    assert buffer.feed(written_by_tqdm(1)) == ([], bar)
    assert buffer.feed(b"after\n") == ([bar, "after"], "")


def test_a_bar_that_ended_leaves_when_the_cursor_stays_below_it() -> None:
    """From one look to the next, whether the next bar has begun or not."""
    buffer = LineBuffer()
    bar = f"level 0: 100%|{'█' * 41}| 3/3"
    for below, current in (b"", ""), (b"\r50 %", "50 %"):
        buffer.feed(written_by_tqdm(1) + below)
        assert buffer.settle() == []
        assert buffer.settle() == [bar] and buffer.feed(b"") == ([], current)
        buffer.finish()


def test_bars_that_are_gone_back_to_do_not_leave() -> None:
    buffer = LineBuffer()
    for update in written_by_tqdm(2, leave=False).split(b"\x1b[A")[:-1]:
        assert buffer.feed(update + b"\x1b[A")[0] == [] and buffer.settle() == [] and buffer.settle() == []


def test_something_else_than_text_comes() -> None:
    """What is not complete is a line, so that the order is kept; a bar goes on."""
    buffer = LineBuffer()
    buffer.feed(b"name? ")
    assert buffer.pause() == ["name? "]
    buffer.feed(b"\r10 %")
    assert buffer.pause() == [] and buffer.feed(b"\r20 %") == ([], "20 %")
    assert buffer.finish() == ["20 %"]


def test_a_buffer_begins_anew_after_it_has_finished() -> None:
    buffer = LineBuffer()
    buffer.feed(b"10 %\r20 %\x1b[3")
    assert buffer.finish() == ["20 %"]
    assert buffer.feed(b"1mnext\n") == (["1mnext"], "")
    buffer.feed(b"\x1b[31mred\r")
    assert buffer.finish() == ["\x1b[31mred\x1b[0m"]
    assert buffer.feed(b"next\n") == (["next"], ""), "neither in red nor taken for a bar, which waits"


def test_bars_with_a_position_of_their_own() -> None:
    """``tqdm(position=rank)``, as written for a terminal that all ranks share, is one bar in the rank's own log."""
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="utf-8", write_through=True) as file:
        with tqdm(total=2, file=file, position=3, mininterval=0, leave=False, ncols=40, bar_format="{n_fmt}") as bar:
            bar.update()
            buffer = LineBuffer()
            assert buffer.feed(raw.getvalue()) == ([], "1")
    assert buffer.finish() == ["1"]


@pytest.mark.parametrize(
    "data",
    [
        "plain\n\n\x1b[1;32mgrün\nオレンジ\x1b[0m\r\n|\b/\b\x1b]0;t\x07 ok\x1b[K\n10 %\r99 %\nrest".encode(),
        written_by_tqdm(1, after="done\nrest"),
        written_by_tqdm(2, leave=True, after="done\n"),
        written_by_tqdm(2, leave=False, after="done\n\nend\n"),
    ],
    ids=["controls", "one bar", "nested, left", "nested, cleared"],
)
def test_where_the_bytes_are_cut_changes_nothing(data: bytes) -> None:
    whole = lines_of(data)
    for position in range(len(data) + 1):
        assert lines_of(data[:position], data[position:]) == whole, data[:position]
    assert lines_of(*(data[index : index + 1] for index in range(len(data)))) == whole


def test_a_row_that_left_cannot_be_gone_back_to() -> None:
    """A program that redraws ordinary lines is shown once too often at most: then it is known."""
    buffer = LineBuffer()
    lines = [line for n in range(20) for line in buffer.feed(f"\x1b[2Afirst {n}\nsecond {n}\n".encode())[0]]
    assert lines + buffer.finish() == ["first 19", "second 19"]
    buffer = LineBuffer()
    lines = buffer.feed(b"first\nsecond\n")[0]
    lines += [line for n in range(20) for line in buffer.feed(f"\x1b[2Afirst {n}\nsecond {n}\n".encode())[0]]
    assert lines + buffer.finish() == ["first", "second", "first 19", "second 19"]


def test_an_endless_line_is_broken() -> None:
    buffer = LineBuffer()
    lines, current = buffer.feed(b"x" * 200_000)
    assert [len(line) for line in lines] == [65_536] * 3
    assert len(current) == 200_000 - 3 * 65_536
    assert [len(line) for line in lines_of(b"y" * 65_536 + b"\n", b"z" * 70_000 + b"\n")] == [65_536, 65_536, 4_464]


def test_a_flood_of_short_lines() -> None:
    data = b"".join(b"step %06d loss 0.123456 lr 1e-3 and some more text\n" % index for index in range(250_000))
    begin = time.process_time()
    lines, _ = LineBuffer().feed(data)
    assert time.process_time() - begin < 0.5  # seconds; measured: 0.12
    assert len(lines) == 250_000


def test_strip_ansi() -> None:
    assert strip_ansi("\x1b[1;31mred\x1b[0m \x1b]8;;u\x1b\\x") == "red x"


@pytest.mark.parametrize(
    "piece",
    [b"ab\b", b"abc\x1b[K", b"x\b", b"x\x1b[1K", b"x\x1b[60000Gy\x1b[2K", b"\x1b[1Gx\x1b[1K\x1b[K", b"\x1b[31ma\b\r"],
    ids=repr,
)
def test_every_sequence_takes_its_own_time_however_long_its_line_is(piece: bytes) -> None:
    """Many minutes, if each of these went through the row."""
    buffer = LineBuffer()
    buffer.feed(b"y" * 60_000 + b"\b" * 30_000 + piece * (200_000 // len(piece)))
    assert all(len(line) <= 65_536 * 6 for line in buffer.finish())


def test_a_cursor_above_what_was_shown_last() -> None:
    """It hides, and goes up: an error in the kernel, once."""
    buffer = LineBuffer()
    lines = buffer.feed(b"a\nb\n\x1b[?25l\x1b[A\x1b[A")[0] + buffer.feed(b"c\n")[0] + buffer.finish()
    assert lines == ["c", "b"]
