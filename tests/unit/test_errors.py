"""Several failures as one error."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from nbspawn._engine.run.outcomes import unreported
from nbspawn._protocol.failure import headline
from nbspawn._protocol.launch import RunFiles
from nbspawn.errors import Failure, rank_error


def lines(*failures: Failure) -> list[str]:
    """The lines of the error up to the traceback."""
    return str(rank_error(failures, 8)).partition("\n\n")[0].splitlines()


def on(host: int, rank: int, time: float, what: str = "KeyError: 1", error: float = 0.001, **more: bool) -> Failure:
    return Failure(rank, time, what, node=host, host=f"host{host}", time_error=error, **more)


def test_failures_that_clocks_cannot_order_are_said_to_be_simultaneous() -> None:
    first, second, later = on(1, 0, 10.0), on(2, 5, 10.0015, "ValueError: 2"), on(2, 6, 10.5, "TypeError: 3")
    assert lines(first, second, later) == [
        "rank 0 of 8 (host1): KeyError: 1",
        "also rank 5 (host2), at the same time as far as their clocks tell: ValueError: 2",
        "also rank 6 (host2): TypeError: 3",
    ]


def test_a_node_that_is_lost_is_no_echo_whatever_the_system_says_of_it() -> None:
    """A cut link was seen as "Connection reset by peer", which gloo says of a rank that has ended."""
    lost = Failure(5, 11.0, code=-9, node=1, host="host2", node_lost="[Errno 104] Connection reset by peer")
    echo = on(1, 0, 10.0, "RuntimeError: Connection closed by peer", lost_peer=True)
    assert lines(echo, lost) == [
        "rank 5 of 8 (host2): its node host2 was lost ([Errno 104] Connection reset by peer)",
        "also rank 0 (host1): lost the connection to a rank that had ended",
    ]


def test_who_has_lost_a_peer_is_an_echo_only_if_one_has_ended() -> None:
    lost = on(1, 0, 10.0, "RuntimeError: Connection closed by peer", lost_peer=True)
    assert lines(lost) == ["rank 0 of 8 (host1): RuntimeError: Connection closed by peer"]
    found = str(rank_error([lost], 8, peer_ended=True))
    assert found.startswith("rank 0 of 8 (host1): lost the connection to a rank that had ended\n")


def test_an_error_with_the_words_of_an_echo_is_none() -> None:
    first = on(1, 3, 10.0, "ConnectionResetError: the database: Connection reset by peer")
    assert lines(on(1, 0, 11.0), first) == [
        "rank 3 of 8 (host1): ConnectionResetError: the database: Connection reset by peer",
        "also rank 0 (host1): KeyError: 1",
    ]


def test_one_machine_has_one_clock() -> None:
    assert lines(on(1, 0, 10.0), on(1, 1, 10.0001)) == [
        "rank 0 of 8 (host1): KeyError: 1",
        "also rank 1 (host1): the same",
    ]


def test_the_same_means_the_whole_text() -> None:
    first, other = (
        replace(on(1, rank, 10.0 + rank), message=f"a sentence\nunused: {rank}\n  in 0x{rank:x}") for rank in (0, 1)
    )
    assert lines(first, other)[1:] == ["also rank 1 (host1): the same, but: unused: 1"]


@pytest.mark.parametrize(
    "text, shown",
    [
        ("one line.", "one line."),
        ("one line.\nanother", "one line."),
        ("Error(s) in loading:\n\tMissing key(s): 'a'", "Error(s) in loading: Missing key(s): 'a'"),
        ("the sentence goes on and \nends here. And more", "the sentence goes on and ends here. And more"),
        (
            "Caught KeyError in worker process 1.\nOriginal Traceback (most recent call last):\n  …\nKeyError: 'x'\n",
            "Caught KeyError in worker process 1: KeyError: 'x'",
        ),
    ],
)
def test_headlines(text: str, shown: str) -> None:
    assert headline(text) == shown


def test_the_others_are_grouped_and_bounded() -> None:
    same = [on(host, rank, 11.0 + rank) for rank, host in enumerate((1, 1, 2, 2))]
    assert lines(on(3, 7, 1.0), *same)[1:] == ["also ranks 0-3: the same"]
    different = [on(1, rank, 11.0 + rank, f"KeyError: {rank}") for rank in range(30)]
    found = lines(on(3, 31, 1.0), *different)
    assert len(found) == 14
    assert found[-1] == "also 18 more ranks, in other ways: the error's `others` lists all"


def test_a_module_that_a_node_lacks() -> None:
    found = lines(on(2, 3, 1.0, "ModuleNotFoundError: No module named 'mine'"))
    assert found[1].startswith("host2 does not have that module. Install it on all nodes")
    local = Failure(0, 1.0, "ModuleNotFoundError: No module named 'mine'")
    assert lines(local) == ["rank 0 of 8: ModuleNotFoundError: No module named 'mine'"]


def test_torchs_error_file_is_read_as_text_alone(tmp_path: Path) -> None:
    """A rank writes it, before it has a channel: the kernel runs no code that is pickled in it."""
    file, made = tmp_path / "errors", tmp_path / "made"
    files = RunFiles(tmp_path, tmp_path)

    class Foreign:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return os.mkdir, (made,)

    file.write_bytes(pickle.dumps(Foreign()))
    ending = unreported(0, 1.0, 1, os.fspath(file), files, None)
    assert (ending.code, ending.traceback) == (1, "") and not made.exists()

    file.write_bytes(pickle.dumps("Traceback (most recent call last):\n  ...\nValueError: no\n"))
    assert unreported(0, 1.0, 1, os.fspath(file), files, None).name == "ValueError: no"
