"""What a rank reports of its memory, as plain data. All sizes are in bytes."""

from __future__ import annotations

from typing import NamedTuple

from nbspawn._accelerators.accelerator import Load


class Held(NamedTuple):
    """What can be reached from one variable, and from none before it. ``what`` describes it in some words: '8 tensors,
    largest .layers[0].weight float32[1000, 1000]'."""

    name: str
    size: int
    what: str


class DeviceMemory(NamedTuple):
    """What torch's allocator has on one device: in use, at most in use so far, and kept for later use. ``summary`` is
    torch's own, ``load`` the driver's."""

    name: str
    allocated: int
    peak: int
    cached: int
    summary: str
    load: Load = Load()


class Memory(NamedTuple):
    """The memory of one rank. ``resident`` is the process's, of that ``shared`` with other processes (-1: not known),
    ``peak`` the most since its start. ``tensors`` is what tensors and arrays in the main memory take, ``pinned`` what
    torch has of it for transfers to a GPU. ``variables`` are the largest, ``others`` are the rest, ``elsewhere`` is
    what no variable leads to. ``partial``: were there more objects than are looked at?"""

    resident: int
    shared: int
    peak: int
    tensors: int
    pinned: int
    variables: tuple[Held, ...]
    others: Held
    elsewhere: Held
    devices: tuple[DeviceMemory, ...]
    partial: bool
