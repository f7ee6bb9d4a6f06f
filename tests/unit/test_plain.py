"""What a rank or an agent sends can only be a message: nothing that it contains runs, and each part has its type."""

from __future__ import annotations

import collections.abc
import dataclasses
import os
import pickle
import random
import tracemalloc
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy
import pytest
import torch

from nbspawn._protocol import messages, plain, wire
from nbspawn._protocol.agents import CALLS, FromAgent, Reported, Status
from nbspawn._protocol.collectives import Collectives, GroupCalls
from nbspawn._protocol.frames import Frame, Position
from nbspawn._protocol.messages import DisplayData, Event, Raised, RankEvent, Result, Returned, Sampled, Started
from nbspawn._protocol.plain import Buffer, NotPlainError

DECLARED = sorted({*get_args(RankEvent), *get_args(FromAgent), *CALLS.values()}, key=str)
TEXTS = "", "plain", "ünïcode ✓", "x" * 300, "<b>&", "\0"


def some(declared: Any, chance: random.Random) -> Any:
    """Any value of that type."""
    origin, arguments = get_origin(declared), get_args(declared)
    if declared == Buffer:
        return chance.randbytes(chance.randrange(5))
    if origin in (Union, types.UnionType):
        return some(chance.choice(arguments), chance)
    if declared is Any:
        return chance.choice(["text", 1, 2.5, None, True, [1, "a"], {"a": [{"b": 2}]}])
    if declared in (None, types.NoneType):
        return None
    if declared in (int, float, bool, str, bytes):
        return {
            int: chance.randrange(-(2**70), 2**70),
            float: chance.choice([0.0, -1.5, 1e300]),
            bool: chance.random() < 0.5,
            str: chance.choice(TEXTS),
            bytes: chance.randbytes(3),
        }[declared]
    if origin is tuple and arguments[-1] is not ...:
        return tuple(some(one, chance) for one in arguments)
    if origin in (tuple, list):
        return origin(some(arguments[0], chance) for _ in range(chance.randrange(4)))
    if origin in (dict, Mapping, collections.abc.Mapping):
        return {some(arguments[0], chance): some(arguments[1], chance) for _ in range(chance.randrange(4))}
    hints = get_type_hints(declared)
    names = declared._fields if issubclass(declared, tuple) else [one.name for one in dataclasses.fields(declared)]
    return declared(**{name: some(hints[name], chance) for name in names})


@pytest.mark.parametrize("declared", DECLARED, ids=str)
def test_each_message_arrives_as_it_was(declared: Any) -> None:
    chance = random.Random(1)
    for _ in range(30):
        value = some(declared, chance)
        found = plain.loaded(declared, wire.pickled(declared, value))
        assert found == value and type(found) is type(value)
        assert plain.copy(declared, value) == value


class Runs:
    """What runs something when it is unpickled."""

    def __init__(self, *how: Any) -> None:
        self.how = how

    def __reduce__(self) -> Any:
        return self.how


STARTED = b"cnbspawn._protocol.messages\nStarted\n"
ATTACKS: dict[str, bytes] = {
    "a function": pickle.dumps(Runs(os.system, ("touch {ran}",))),
    "an old protocol": pickle.dumps(Runs(os.system, ("touch {ran}",)), protocol=0),
    "a module's module": b"\x80\x04\x8c\x1anbspawn._protocol.frames\x8c\tos.system\x93\x8c\x0btouch {ran}\x85R.",
    "nbspawn's pickle": b"\x80\x04\x8c\x18nbspawn._payload.packing\x8c\x0cpickle.loads\x93C\x01N\x85R.",
    "a name of builtins": pickle.dumps(Runs(eval, ("open('{ran}', 'w')",))),
    "a class of messages": STARTED + b"(I0\nI0\nF0.0\ntR.",
    "an attribute of that class": STARTED + b"(N}S'rank'\nS'changed'\nstb.",
    "a persistent id": b"Pwhat\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "nothing": b"",
    "half a pickle": pickle.dumps("text")[:-2],
    "a size beyond all memory": b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "a buffer that is not there": b"\x80\x05\x97.",
}


@pytest.mark.parametrize(
    "declared",
    [RankEvent, FromAgent, Event, str, tuple[int, Collectives | None]],
    ids=["an event", "an agent's", "any event", "text", "a row"],
)
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_of_it_is_run(attack: str, declared: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotPlainError):
        plain.loaded(declared, ATTACKS[attack].replace(b"{ran}", b"./ran"))
    assert not list(tmp_path.iterdir())
    assert Started(1, 2, 3.0).rank == 1 and Started.__name__ == "Started"


def parts(event: object) -> Any:
    return plain.apart(RankEvent, event)


def changed(event: object, place: int, value: object) -> bytes:
    """The event with a part that it cannot have."""
    name, fields = parts(event)
    return pickle.dumps((name, (*fields[:place], value, *fields[place + 1 :])))


STARTS = Started(0, 1, 2.0)
SAMPLE = Sampled(0, 1.0, Position((Frame("f", 1, "g"),), "call", True), 0.5, ((Position(), 0.25),))


@pytest.mark.parametrize(
    "data",
    [
        *(changed(STARTS, place, wrong) for place in range(3) for wrong in ("0", None, [], {}, b"", (1,), True)),
        *(changed(SAMPLE, 2, wrong) for wrong in (None, (), ((), "", 1), ((("f", "1", "g"),), "", False))),
        changed(Returned(0, 1.0, Result(), 0), 2, (b"", (), 5, "")),
        changed(Returned(0, 1.0, Result(), 0), 2, ("", (), "", "")),
        pickle.dumps(("Started", ())),
        pickle.dumps(("Started", (0, 1, 2.0, 3))),
        pickle.dumps(("Exited", (0, 1.0, 0))),  # the engine's own
        pickle.dumps(("nobody", (0,))),
        pickle.dumps("Started"),
        pickle.dumps(None),
        pickle.dumps(3),
        pickle.dumps(([], ())),
    ],
)
def test_what_is_not_of_the_declared_type_is_refused(data: bytes) -> None:
    with pytest.raises(NotPlainError):
        wire.load_event(data)


@pytest.mark.parametrize("operation", [pickle.LONG_BINPUT, pickle.BYTEARRAY8, pickle.BINBYTES8, pickle.FRAME])
def test_a_size_that_is_not_there_takes_no_memory(operation: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(NotPlainError):
        wire.load_event(pickle.PROTO + b"\x05N" + operation + b"\0\0\0\1" + bytes(4) + b".")  # 16 MB, or as many items
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1e6


def test_bytes_that_were_damaged_are_a_message_or_refused() -> None:
    chance = random.Random(2)
    whole = [wire.pickled(RankEvent, some(RankEvent, chance)) for _ in range(100)]
    for _ in range(3000):
        data = bytearray(chance.choice(whole))
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            found = wire.load_event(bytes(data))
        except NotPlainError:
            continue
        assert isinstance(found, get_args(RankEvent))
        assert repr(wire.load_event(wire.pickled(RankEvent, found))) == repr(found), "nan is not equal to itself"


class Number(int):
    """An int that is none of Python's."""


class Text(str):
    """Like NumPy's, or markupsafe's."""


@pytest.mark.parametrize(
    "ranks", [list(numpy.arange(3)), [torch.tensor(rank) for rank in range(3)], [Number(0), True, 2], [*range(3)]]
)
def test_numbers_and_text_of_libraries_become_plain(ranks: list[Any]) -> None:
    given = Collectives(numpy.int64(1), (GroupCalls(numpy.str_("0"), Text("pg"), tuple(ranks), ()),), None)  # type: ignore[arg-type]
    found = plain.copy(Collectives, given)
    assert list(map(type, found.groups[0].ranks)) == [int] * 3
    assert {type(found.rank), type(found.groups[0].name), type(found.groups[0].description)} == {int, str}
    event = Raised(0, numpy.float32(1), Text("n"), "m", "t", (), None, 0, numpy.bool_(True), given)  # type: ignore[arg-type]
    sent = wire.load_event(wire.pickled(RankEvent, event))
    assert sent.collectives == found and type(sent.name) is str and sent.lost_peer is True and type(sent.time) is float


@pytest.mark.parametrize(
    "event",
    [
        Started("0", 1, 2.0),  # type: ignore[arg-type]
        Started(0, 1, "2.0"),  # type: ignore[arg-type]
        Started(0, 1.5, 2.0),  # type: ignore[arg-type]
        DisplayData(0, {"a": object()}, {}, {}, False, 0),
        DisplayData(0, {"a": Number(1)}, {}, {}, False, 0),
        Returned(0, 1.0, object(), 0),  # type: ignore[arg-type]
        messages.Exited(0, 1.0, 0),
        object(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_cannot_be_made_plain_is_refused_in_the_rank(event: Any) -> None:
    with pytest.raises(NotPlainError):
        wire.encode_event(event, 1)


def test_text_that_arrives_can_be_written() -> None:
    odd = "\udc80 and ünïcode \ud800"
    shown = DisplayData(0, {"text/plain": odd, odd: [odd, {"a": odd}]}, {}, {}, False, 0)
    for event in (shown, Raised(0, 1.0, odd, odd, odd, (odd,), None, 0), Returned(0, 1.0, Result(repr=odd), 0)):
        sent = wire.load_event(pickle.dumps(plain.apart(RankEvent, event), protocol=5))
        assert repr(sent).encode() and "ünïcode" in repr(sent)
        assert "\\udc80" in repr(sent)


def test_the_messages_of_an_agent_carry_those_of_its_ranks() -> None:
    status = Status(1, False, False, True, ())
    report = Reported((STARTS, messages.Exited(0, 1.0, None), SAMPLE), status)
    assert plain.loaded(FromAgent, wire.pickled(FromAgent, report)) == report


def test_a_file_that_is_shorter_than_it_should_be(tmp_path: Any) -> None:
    """To read what is not there is a SIGBUS."""
    event = Returned(0, 1.0, Result(b"", (bytearray(1_000_000),)), 0)
    attached: list[int] = []
    frame = wire.encode_event(event, 1, attached)
    os.ftruncate(attached[0], 5000)
    decoder = wire.Decoder(wire.load_event)
    decoder.attached.append(attached[0])
    ((_, found),) = decoder.feed(frame)
    assert "could not be received by the kernel" in found.value.reason


def test_a_frame_without_its_file() -> None:
    attached: list[int] = []
    frame = wire.encode_event(Returned(0, 1.0, Result(b"", (bytearray(1_000_000),)), 0), 1, attached)
    os.close(attached[0])
    ((_, found),) = wire.Decoder(wire.load_event).feed(frame)
    assert isinstance(found, NotPlainError)
