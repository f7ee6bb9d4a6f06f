"""Calls that wait in native code, in a thread of their own: so the main thread hears an interrupt, or gives them up."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nbspawn._process import traced


def ends_within(seconds: float, call: Callable[[], object]) -> bool:
    """Call it; False if it has not returned after so many ``seconds`` (-1: without a limit). It goes on then, as after
    a KeyboardInterrupt, which is raised here. Raises what it raises."""
    ended, errors = threading.Lock(), list[BaseException]()
    ended.acquire()

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)
        finally:
            ended.release()

    traced.thread(run, "nbspawn-native").start()
    if not ended.acquire(timeout=seconds):  # a lock's acquire is interrupted, which Thread.join is not
        return False
    if errors:
        raise errors[0]
    return True
