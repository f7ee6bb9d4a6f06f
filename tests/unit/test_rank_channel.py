"""The rank's end of its channel, with a kernel that the test plays: whoever reads, each thread gets what is for it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from nbspawn._protocol.messages import Close, Command, InputReply, InputRequest, RankEvent, RunFunction, Started
from nbspawn._protocol.wire import Decoder, encode_command, load_event
from nbspawn._rank.program.channel import Channel

PATIENCE = 60.0
COMMAND = RunFunction(command_number=2, names={})


class Play:
    """A channel, and the kernel's end of it."""

    def __init__(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(path))
            listener.listen()
            self.channel = Channel(path)
            self.kernel, _ = listener.accept()
        self.kernel.settimeout(PATIENCE)
        self._decoder = Decoder(load_event)
        self._events: list[RankEvent] = []

    def say(self, *commands: Command) -> None:
        self.kernel.sendall(b"".join(map(encode_command, commands)))

    def hear(self) -> RankEvent:
        while not self._events:
            self._events += [event for _, event in self._decoder.feed(self.kernel.recv(1 << 16))]
        return self._events.pop(0)

    def hear_question(self) -> InputRequest:
        event = self.hear()
        assert isinstance(event, InputRequest)
        return event


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Play]:
    play = Play(tmp_path / "socket")
    yield play
    play.kernel.close()
    play.channel.close()


def begun(call: Callable[[], Any]) -> Future[Any]:
    """It is called in another thread."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def question() -> InputRequest:
    return InputRequest(0, "? ", False, 0)


def test_a_thread_that_asks_does_not_take_the_next_command(play: Play) -> None:
    """It reads, for the main thread, too."""
    asking = begun(lambda: play.channel.ask(question()))
    asked = play.hear_question()
    play.say(COMMAND)
    assert play.channel.receive() == COMMAND
    play.say(InputReply("text", "yes", asked.number))
    assert asking.result(PATIENCE) == InputReply("text", "yes", asked.number)


def test_the_main_thread_does_not_take_the_reply(play: Play) -> None:
    receiving = begun(play.channel.receive)
    asking = begun(lambda: play.channel.ask(question()))
    asked = play.hear_question()
    play.say(InputReply("text", "yes", asked.number), COMMAND)
    assert asking.result(PATIENCE).text == "yes"
    assert receiving.result(PATIENCE) == COMMAND


def test_a_reply_that_comes_too_late_answers_nothing_else(play: Play) -> None:
    """Of a question that Stop has ended in the rank."""
    play.say(InputReply("text", "old", 7))
    asking = begun(lambda: play.channel.ask(question()))
    asked = play.hear_question()
    play.say(InputReply("text", "new", asked.number))
    assert asking.result(PATIENCE).text == "new"


def test_a_command_that_ends_leaves_no_thread_that_waits(play: Play) -> None:
    asking = begun(lambda: play.channel.ask(question()))
    play.hear_question()
    play.channel.end()
    play.say(COMMAND)
    assert play.channel.receive() == COMMAND
    assert asking.result(PATIENCE).kind == "refused"
    assert play.channel.ask(question()).kind == "refused", "between two commands"
    play.channel.begin(2)
    again = begun(lambda: play.channel.ask(question()))
    play.say(InputReply("text", "yes", play.hear_question().number))
    assert again.result(PATIENCE).text == "yes"


def test_all_who_wait_hear_of_the_kernels_end(play: Play) -> None:
    waiting = [begun(play.channel.receive), begun(lambda: play.channel.ask(question()))]
    play.hear_question()
    play.kernel.shutdown(socket.SHUT_RDWR)
    for one in waiting:
        assert isinstance(one.exception(PATIENCE), EOFError)


def test_a_forked_process_does_not_speak_for_the_rank(play: Play) -> None:
    pid = os.fork()
    if not pid:
        try:
            play.channel.send(Started(0, 1, 0.0))
            play.channel.ask(question())
        except EOFError:
            os._exit(17)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 17
    play.channel.send(Started(0, 2, 0.0))
    assert play.hear() == Started(0, 2, 0.0), "nothing came before it"


def test_many_threads_ask_while_commands_come(play: Play) -> None:
    def answer() -> None:
        for number in range(200):
            play.say(RunFunction(command_number=number, names={}))
            asked = play.hear_question()
            play.say(InputReply("text", asked.prompt, asked.number))
        play.say(Close())

    kernel = begun(answer)
    threads = [
        begun(lambda part=part: [play.channel.ask(InputRequest(0, f"{part} {n}", False, 0)).text for n in range(50)])
        for part in range(4)
    ]
    numbers = []
    while isinstance(command := play.channel.receive(), RunFunction):
        numbers.append(command.command_number)
    kernel.result(PATIENCE)
    assert numbers == list(range(200))
    assert [thread.result(PATIENCE) for thread in threads] == [[f"{part} {n}" for n in range(50)] for part in range(4)]
