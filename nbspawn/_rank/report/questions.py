"""Answers the kernel's questions, in the sampler's thread: also if the main thread hangs in native code, as long as
that has released Python's lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from nbspawn._protocol import questions
from nbspawn._rank.program.channel import Channel
from nbspawn._rank.program.info import RankInfo
from nbspawn._rank.report import memory, recorder, variables

_log = logging.getLogger(__name__)

answers: dict[str, Callable[[], Any]] = {
    questions.COLLECTIVES.name: recorder.report,
    questions.MEMORY.name: memory.report,
    questions.VARIABLES.name: variables.report,
}


@contextmanager
def answering(info: RankInfo, channel: Channel) -> Iterator[None]:
    """While the rank lives: answer the kernel's questions. As long as nobody asks, this costs a look into shared memory
    at each sample."""
    recorder.cells = info.names
    asked = questions.Asked(info.launch.files.questions)

    def look(waits: bool) -> None:
        if (new := asked.new()) is None:
            return
        number, question = new
        try:
            value = answers[question]()
        except Exception:
            _log.exception("the question about %s cannot be answered", question)
            value = None
        with suppress(OSError):  # a full disk: the rank then counts as one that does not answer
            questions.write_answer(info.launch.files.answer(info.rank), number, value)

    info.on_look.append(look)
    yield
