"""Asks ranks, busy or idle, and collects what they answer (_rank/report/questions.py)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection

from nbspawn._protocol import questions
from nbspawn._protocol.launch import RunFiles
from nbspawn._protocol.plain import NotPlainError
from nbspawn._protocol.questions import Question, T

_log = logging.getLogger(__name__)

_ANSWER_A_RANK = 0.01  # seconds
_TICK = 0.002  # seconds


class Questions:
    """Asks the ranks of one run."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._number = 0
        self._lock = threading.Lock()
        """The thread that watches the ranks may ask, and the user's."""

    def ask(self, question: Question[T], ranks: Collection[int]) -> dict[int, T | None]:
        """The answers of these ranks, within some seconds; none of a rank that does not answer, because it holds
        Python's lock or is stopped."""
        with self._lock:
            self._number += 1
            try:
                fd = os.open(self._files.questions, os.O_WRONLY | os.O_CLOEXEC)
            except OSError:  # deleted, or this process has no descriptor left
                return {}
            try:
                questions.ask(fd, self._number, question.name)
            finally:
                os.close(fd)
            found: dict[int, T | None] = {}
            end = time.monotonic() + question.seconds + _ANSWER_A_RANK * len(ranks)
            while len(found) < len(ranks) and time.monotonic() < end:
                for rank in set(ranks) - found.keys():
                    try:
                        answer = questions.read_answer(self._files.answer(rank), self._number)
                    except NotPlainError as error:
                        _log.error("rank %d: its answer about %s cannot be read: %s", rank, question.name, error)
                        answer = (None,)
                    if answer is not None:
                        (found[rank],) = answer
                time.sleep(_TICK)
            return found
