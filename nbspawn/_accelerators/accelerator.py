"""What there is to know of a kind of accelerator. Its own file says what differs from a GPU of torch's."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

_WAIT = 60.0  # seconds: torch is imported, and a driver asked


class Load(NamedTuple):
    """What is known of a device that a process uses, by the driver's own library: ``busy`` percent of the last moments,
    ``used`` of ``total`` bytes, by all processes, ``own`` bytes of this one, with its context and what libraries have.
    -1: not known; ``number`` -1: there is none."""

    number: int = -1
    busy: int = -1
    used: int = -1
    total: int = -1
    own: int = -1


class Unavailable(Exception):
    """The accelerator cannot be used as the user wants to. The text says why, and what to do."""


class Accelerator:
    """A kind of accelerator whose work torch queues, by ``torch.cuda`` or a module like that.

    The methods down to ``is_held`` are for the kernel, and touch no runtime there: a kernel that has initialised CUDA
    cannot fork ranks, and one that has initialised a TPU holds it: no rank can use it. The others are for ranks.
    """

    type = ""
    """torch's name: of devices, and of its module."""
    title = ""
    word = "gpu"
    """For one rank on each of them: ``%%spawn gpu``."""
    backends: tuple[str, ...] = ()
    """The process groups that need it. The first is ``-b auto``."""
    visible: tuple[str, ...] = ()
    """The environment variables that say which of them a process may use, the strongest first."""
    packages: tuple[str, ...] = ()
    """What each rank imports beside torch, which takes seconds."""
    counting = ""
    """What counts them in Python."""
    only_spawn = ""
    """Why ranks are started by spawn if the user does not ask for another method; '' where they need not be."""

    def is_built(self) -> bool:
        """Is this torch built for it?"""
        raise NotImplementedError

    def count(self, env: Mapping[str, str]) -> int:
        """How many a process with this environment could use. Raises Unavailable for a package that is missing."""
        return counted(self.counting, tuple((name, env.get(name)) for name in self.visible)) if self.is_built() else 0

    def select(self, indices: Sequence[int], env: Mapping[str, str]) -> dict[str, str]:
        """The environment variables by which ranks see only those with these indices, of those that a process with
        ``env`` sees. Raises Unavailable if there are none with these indices."""
        name = next((name for name in self.visible if env.get(name) is not None), self.visible[0])
        found = self.count(env)
        there = (env[name].split(",") if name in env else [str(index) for index in range(found)])[:found]
        if missing := [index for index in indices if not 0 <= index < found]:
            within = f" with {name}={env[name]}" if name in env else ""
            has = f"{self.title} devices 0 to {found - 1}" if found else f"no {self.title} device"
            raise Unavailable(f"--devices {missing[0]}: there {'are' if found else 'is'} {has} here{within}")
        if len(set(indices)) < len(indices):
            raise Unavailable(f"--devices {','.join(map(str, indices))} names one of them twice")
        return {name: ",".join(there[index].strip() for index in indices)}

    def prepare(self, nprocs: int, env: Mapping[str, str]) -> dict[str, str]:
        """The environment variables that so many ranks need in addition to ``env``. Raises Unavailable if there cannot
        be so many."""
        return {}

    def note(self, nprocs: int, env: Mapping[str, str], backend: str | None) -> str:
        """A warning for the view; '' for none."""
        return ""

    def is_held(self, env: Mapping[str, str]) -> bool:
        """Does this process have what only one can have, and ranks with this environment would need?"""
        return False

    # ------------------------------------------------------------ in a rank

    @property
    def module(self) -> Any:
        """torch's module for it; None before torch is imported, and in a torch that has none."""
        return getattr(sys.modules.get("torch"), self.type, None)

    def initialise(self, rank: int, ranks: int) -> int | None:
        """Prepare the accelerator before the command runs, in the ``rank``-th of so many on this machine. Returns
        the number by which the program knows the rank, if the runtime assigns one.

        The rank's own device becomes the current one as soon as the user's code initialises the runtime, and not
        sooner: a context takes time, and hundreds of MB of the GPU. (With all ranks on the first GPU, a group of NCCL
        hangs in its first collective.)"""

        def take() -> None:
            if index := rank % self.module.device_count():  # the first is current, and without a context if not used
                self.module.set_device(index)

        self.module._lazy_call(take)
        return None

    def device(self, rank: int) -> torch.device:
        """The device of the ``rank``-th on this machine; the CPU where the runtime finds none. No context is made."""
        import torch

        if not self.module.is_available():
            return torch.device("cpu")
        return torch.device(self.type, rank % self.module.device_count())

    def backend(self, asked: str) -> str:
        """torch's name of the group that the user has ``asked`` for."""
        return asked

    def is_used(self) -> bool:
        """Has this process initialised it?"""
        return self.module is not None and bool(self.module.is_initialized())

    def load(self, index: int) -> Load:
        """The load of the device with this index, which this process has initialised. Takes some milliseconds, whatever
        the device does meanwhile."""
        return Load(index)

    def synchronize(self) -> None:
        """Wait until all that this process has queued has ended. Raises the error of what fails there."""
        self.module.synchronize()


@functools.cache
def counted(counting: str, visible: tuple[tuple[str, str | None], ...]) -> int:
    """What torch itself counts with these environment variables (None: not set), in a process of its own, in
    seconds."""
    env = {name: value for name, value in os.environ.items() if name not in dict(visible)}
    env.update((name, value) for name, value in visible if value is not None)
    command = [sys.executable, "-c", f"import torch; print({counting})"]
    try:
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=_WAIT)
        return int(child.stdout.split()[-1])
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return 0
