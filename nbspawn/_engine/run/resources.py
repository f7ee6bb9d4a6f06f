"""What a run holds open in the kernel."""

from __future__ import annotations

import os
import selectors
from contextlib import ExitStack

from nbspawn._engine.kernel import descriptors
from nbspawn._engine.kernel.guardian_client import guard
from nbspawn._engine.kernel.waker import Waker
from nbspawn._engine.run.channel import Hub
from nbspawn._engine.run.rendezvous import Rendezvous
from nbspawn._protocol.launch import RunFiles


class Resources:
    """The lifeline, the sockets, the store that the ranks meet at."""

    def __init__(self, files: RunFiles, nprocs: int) -> None:
        self._announced = bytearray(nprocs)
        with ExitStack() as undo:  # also what is half built is given back
            guard.begin(files.private)
            undo.callback(guard.end, files.private)
            flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
            self.lifeline = descriptors.close_after_fork(os.open(files.lifeline, flags))
            undo.callback(descriptors.close, self.lifeline)
            self._interrupts = descriptors.close_after_fork(os.open(files.interrupts, os.O_WRONLY | os.O_CLOEXEC))
            undo.callback(descriptors.close, self._interrupts)
            self.gauges = descriptors.close_after_fork(os.open(files.gauges, os.O_RDONLY | os.O_CLOEXEC))
            undo.callback(descriptors.close, self.gauges)
            self.selector = selectors.DefaultSelector()
            descriptors.close_after_fork(self.selector.fileno())
            undo.callback(self._close_selector)
            self.waker = Waker(self.selector)
            undo.callback(self.waker.close)
            self.hub = Hub(files.socket, nprocs, self.selector)
            undo.callback(self.hub.close)
            self.rendezvous = Rendezvous(self.selector)
            undo.callback(self.rendezvous.close)
            self._undo = undo.pop_all()

    def _close_selector(self) -> None:
        descriptors.unmark(self.selector.fileno())
        self.selector.close()

    def announce_interrupt(self, rank: int) -> None:
        """Announce that one more interrupt is about to be sent to the rank: it ignores those that are not announced."""
        self._announced[rank] = (self._announced[rank] + 1) % 256 or 1
        os.pwrite(self._interrupts, self._announced, 0)

    def announced_interrupts(self, rank: int) -> int:
        """How many interrupts have been announced to the rank so far; from 255 the count goes on with 1."""
        return self._announced[rank]

    def close(self) -> None:
        """Give all back; the end of the lifeline also ends what is left in the ranks' process groups, and the guardian
        what is left elsewhere."""
        self._undo.close()
