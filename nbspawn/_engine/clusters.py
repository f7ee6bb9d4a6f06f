"""What ``--on`` takes besides this machine, by the word before its first colon: the kinds of clusters.

The module of a kind starts agents on its nodes. It is imported for the first ranks there.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Cluster:
    usage: str
    """As in help."""
    nodes: str
    """What its nodes are: 'the nodes of a Ray cluster'."""
    _module: str
    assigns_gpus: bool = False
    """Does it give its nodes' GPUs to who asks for so many?"""

    @property
    def module(self) -> Any:
        """The module. It has ``count(where, asked)``, which returns on how many nodes ranks run if so many were asked
        for (None: as many as are usual there); ``starter(where, nprocs, nodes, backend)``, which returns a ``Starter``
        (base.py) for so many ranks on so many nodes; and, for ``python -m nbspawn``, ``found(where)``: pairs of texts
        about the cluster, and how many of its nodes can have a rank; and ``singly(where)``: each of the nodes alone, as
        far as users name them. They raise UsageError, and StartError where there
        is no cluster."""
        return importlib.import_module(self._module)


KINDS = {
    "ray": Cluster("ray or ray:HOST:PORT", "the nodes of a Ray cluster", "nbspawn._engine.cluster.ray", True),
    "ssh": Cluster("ssh:HOST,HOST", "hosts that ssh reaches", "nbspawn._engine.cluster.ssh"),
    "slurm": Cluster("slurm or slurm:JOB", "the nodes of a Slurm allocation", "nbspawn._engine.cluster.slurm"),
}


def is_one(where: str) -> bool:
    """Is this a cluster?"""
    return where.partition(":")[0] in KINDS


def named(where: str) -> Cluster:
    """The kind of ``where``, such as 'ray:HOST:PORT'. Raises KeyError for what names none."""
    return KINDS[where.partition(":")[0]]


def nodes(where: str, asked: int | None) -> int:
    """On how many nodes ranks run there, if so many were asked for. Raises UsageError."""
    return int(named(where).module.count(where, asked))


def usage() -> str:
    """What can be given: 'local, ray or ray:HOST:PORT'."""
    return ", ".join(["local", *(kind.usage for kind in KINDS.values())])
