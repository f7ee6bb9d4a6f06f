"""Places agents on the nodes of a Ray cluster: Ray reserves resources, starts an agent on each node, and reports the
death of nodes. What flows while ranks run goes over connections of our own (link.py).

An actor on each node holds its share and starts the agent (holder.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from nbspawn._engine.cluster import ray_connection
from nbspawn._engine.cluster.holder import Holder
from nbspawn._engine.cluster.ray_connection import asked, connect
from nbspawn.errors import StartError

_TICK = 0.2


class RayNodes:
    """``nodes`` nodes of the cluster at ``where`` ('ray', or 'ray:HOST:PORT'), each with so many CPUs and GPUs. Equal
    to others that want the same."""

    needs_modules = False
    news_seconds = 0.0  # Ray takes longer than a user wants to wait

    def __init__(self, where: str, nodes: int, cpus: int, gpus: int) -> None:
        self.nodes = nodes
        self._where = where
        self._share = {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}
        self._group: Any = None
        self._actors: list[Any] = []
        self._held: list[Any] = []
        self._connection = ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RayNodes):
            return False
        return (other._where, other.nodes, other._share) == (self._where, self.nodes, self._share)

    def __hash__(self) -> int:
        return hash((self._where, self.nodes))

    @property
    def address(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())

    def name(self, node: int) -> str:
        return f"node {node}"

    def prepare(self, waiting: Callable[[str], object]) -> None:
        """Connect to the cluster, and reserve the nodes' resources: all, or none."""
        connect(self._where)
        from ray.util.placement_group import placement_group

        self._connection = ray_connection.current()
        ray_connection.users.add(id(self))
        try:
            self._check_that_it_can_fit()
            self._group = asked(placement_group, [self._share] * self.nodes, "STRICT_SPREAD")
            while not self._group.wait(_TICK):
                self._check_that_it_can_fit()
                waiting(f"Waiting for {self._wanted} of the Ray cluster")
        except BaseException:
            self.close()
            raise

    def _check_that_it_can_fit(self) -> None:
        """Raises StartError if no wait will help. Ray itself finds some such requests feasible."""
        found = nodes()
        able = [host for host, has in found if all(has[name] >= count for name, count in self._share.items())]
        if len(able) < self.nodes:
            there = ", ".join(f"{host} with {described(has)}" for host, has in found)
            raise StartError(f"the Ray cluster cannot give {self._wanted}: it has {there}")

    @property
    def _wanted(self) -> str:
        each = " each" * (self.nodes > 1)
        return f"{self.nodes} node{'s' * (self.nodes > 1)} with {described(self._share)}{each}"

    def start(self, node: int, arguments: tuple[str, ...], token: str) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=node)
        holder: Any = ray.remote(max_restarts=0, max_concurrency=1)(Holder)
        actor = holder.options(
            num_cpus=self._share["CPU"], num_gpus=self._share.get("GPU", 0.0), scheduling_strategy=where
        ).remote()
        actor.start.remote(arguments, token, int(self._share["CPU"]))
        self._actors.append(actor)
        self._held.append(actor.hold.remote())

    def failures(self) -> dict[int, str]:
        import ray

        # After ray.shutdown(), and maybe ray.init(), Ray does not know these references.
        with ray_connection.in_use(self._connection) as connected:
            if not connected:
                return dict.fromkeys(range(self.nodes), "the connection to the Ray cluster was closed")
            done, _ = ray.wait(self._held, num_returns=len(self._held), timeout=0)
            return {self._held.index(one): _why(one) for one in done}

    def close(self) -> None:
        import ray

        actors, self._actors, self._held = self._actors, [], []
        group, self._group = self._group, None
        ray_connection.users.discard(id(self))
        if ray_connection.left_if_lost(self._connection):
            return
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            with suppress(StartError):  # its head ends just now
                asked(ray.util.remove_placement_group, group)


def count(where: str, asked: int | None) -> int:
    """One, if nothing else was asked for."""
    return asked or 1


def starter(where: str, nprocs: int, nodes: int, backend: str | None) -> RayNodes:
    """Nodes for so many ranks: a CPU for each, and a GPU where the cluster has any and ``backend`` can use it."""
    connect(where)
    each = -(-nprocs // nodes)
    import ray

    with_gpus = backend == "nccl" or (backend in (None, "auto") and bool(asked(ray.cluster_resources).get("GPU")))
    return RayNodes(where, nodes, each, each if with_gpus else 0)


def singly(where: str) -> list[str]:
    """None: users name the whole."""
    return []


def found(where: str) -> tuple[list[tuple[str, str]], int]:
    """Ray's version and what each node has, and how many nodes can have a rank."""
    connect(where)
    import ray

    there = nodes()
    rows = [("ray", ray.__version__), *((host, described(has)) for host, has in there)]
    return rows, sum(has["CPU"] >= 1 for _, has in there)


def _why(ended: Any) -> str:
    """Why a holder holds its node no more."""
    import ray

    try:
        return f"its agent has ended: {ray.get(ended)}".strip()
    except Exception as error:  # whatever Ray raises for a dead actor or node
        return str(error).strip().splitlines()[0]


def nodes() -> list[tuple[str, dict[str, float]]]:
    """The names of the cluster's nodes, and what they have of 'CPU' and 'GPU'."""
    import ray

    return [
        (node["NodeManagerHostname"], {name: node["Resources"].get(name, 0.0) for name in ("CPU", "GPU")})
        for node in asked(ray.nodes)
        if node["Alive"]
    ]


def described(has: Mapping[str, float]) -> str:
    """'4 CPUs and 1 GPU'."""
    named = [f"{count:g} {name}{'s' * (count != 1)}" for name, count in has.items() if count]
    return " and ".join(named) or "neither CPUs nor GPUs"
