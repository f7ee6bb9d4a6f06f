"""What options mean on this machine, in short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nbspawn._engine.devices import resolve
from nbspawn._engine.options import LaunchOptions


class Resolved(NamedTuple):
    nprocs: int | str
    backend: str | None
    accelerator: str


def resolved(
    nprocs: int | str, backend: str | None, env: Mapping[str, str], devices: Sequence[int] | None = None
) -> Resolved:
    found = resolve(LaunchOptions(nprocs=nprocs, backend=backend, env=env, devices=devices))
    return Resolved(found.nprocs, found.backend, found.accelerator)
