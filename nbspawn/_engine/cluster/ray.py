"""Places agents on the nodes of a Ray cluster: Ray reserves resources, starts an agent on each node, and reports the
death of nodes. What flows while ranks run goes over connections of our own (link.py).

An actor on each node holds its share and starts the agent (holder.py).
"""

from __future__ import annotations

import os
import re
import socket
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from nbspawn._engine.cluster.holder import Holder
from nbspawn.errors import StartError, UsageError

T = TypeVar("T")

_ANSWER_SECONDS = 5.0  # Ray itself waits for a head that does not answer for minutes
_TICK = 0.2
_EXTRA = "pip install 'nbspawn[ray]'"
_PATIENCE, _FOR_EVER = "RAY_gcs_rpc_server_reconnect_timeout_s", "1000000"
"""After so many seconds without the cluster's head, 60 by default, Ray ends the process. (In ms they must fit 31 bits.)
"""
_DIES = (
    "If the head of the Ray cluster is lost, Ray ends this kernel after a minute, with all of its variables. It does "
    f"not if nbspawn connects to the cluster, or after os.environ['{_PATIENCE}'] = '{_FOR_EVER}' before ray.init()."
)


class RayNodes:
    """``nodes`` nodes of the cluster at ``where`` ('ray', or 'ray:HOST:PORT'), each with so many CPUs and GPUs. Equal
    to others that want the same."""

    def __init__(self, where: str, nodes: int, cpus: int, gpus: int) -> None:
        self.nodes = nodes
        self._where = where
        self._share = {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}
        self._group: Any = None
        self._actors: list[Any] = []
        self._held: list[Any] = []
        self._id = ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RayNodes):
            return False
        return (other._where, other.nodes, other._share) == (self._where, self.nodes, self._share)

    def __hash__(self) -> int:
        return hash((self._where, self.nodes))

    @property
    def have_gpus(self) -> bool:
        """Is there a GPU for each rank?"""
        return "GPU" in self._share

    @property
    def address(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())

    def prepare(self, waiting: Callable[[str], object]) -> None:
        """Connect to the cluster, and reserve the nodes' resources: all, or none."""
        connect(self._where)
        from ray.util.placement_group import placement_group

        self._id = _connection_id()
        self._check_that_it_can_fit()
        self._group = _asked(placement_group, [self._share] * self.nodes, "STRICT_SPREAD")
        try:
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

        if (
            _connection_id() != self._id
        ):  # ray.shutdown(), and maybe ray.init() again: Ray does not know these references
            return dict.fromkeys(range(self.nodes), "the connection to the Ray cluster was closed")
        if not _connection.acquire(blocking=False):  # it is being closed; the next look will say so
            return {}
        try:
            done, _ = ray.wait(self._held, num_returns=len(self._held), timeout=0)
            return {self._held.index(one): _why(one) for one in done}
        finally:
            _connection.release()

    def close(self) -> None:
        import ray

        actors, self._actors, self._held = self._actors, [], []
        group, self._group = self._group, None
        with _connection:
            if _connection_id() != self._id or _left_if_lost():
                return
            for actor in actors:
                ray.kill(actor)
            if group is not None:
                with suppress(StartError):  # its head ends just now
                    _asked(ray.util.remove_placement_group, group)


def starter(where: str, nprocs: int, nodes: int, backend: str | None) -> RayNodes:
    """Nodes for so many ranks: a CPU for each, and a GPU where the cluster has any and ``backend`` can use it."""
    connect(where)
    each = -(-nprocs // nodes)
    import ray

    with_gpus = backend == "nccl" or (backend in (None, "auto") and bool(_asked(ray.cluster_resources).get("GPU")))
    return RayNodes(where, nodes, each, each if with_gpus else 0)


def found(where: str) -> tuple[list[tuple[str, str]], int]:
    """Ray's version and what each node has, and how many nodes can have a rank."""
    connect(where)
    import ray

    there = nodes()
    rows = [("ray", ray.__version__), *((host, described(has)) for host, has in there)]
    return rows, sum(has["CPU"] >= 1 for _, has in there)


_made = "", ""
"""The address with which this module has connected, by which Ray may not know the cluster, and that connection's id."""
_connection = threading.RLock()  # held while it is made, used by calls that would make one, or closed


def connect(where: str) -> None:
    """Connect to the cluster that ``where`` names, or to the one that the user has connected to already. Raises
    StartError if there is none."""
    with _connection:
        _connect(where)


def _connect(where: str) -> None:
    global _made
    try:
        import ray
    except ModuleNotFoundError:
        raise UsageError(f"--on ray needs Ray, in this environment and on all nodes: {_EXTRA}") from None
    address = where.partition(":")[2] or os.environ.get("RAY_ADDRESS", "")
    if address.startswith(("//", "ray://")):
        raise UsageError(
            "ray:// is Ray Client, over which ranks cannot be watched: run the notebook on a machine of the cluster's "
            "network, and use --on ray there"
        )
    if ray.is_initialized() and not _left_if_lost():
        ours = ray.get_runtime_context().gcs_address
        if address not in ("", "auto", ours) and (address, _connection_id()) != _made:
            raise UsageError(f"this kernel is connected to the Ray cluster at {ours}: ray.shutdown() leaves it")
        if not _answers():
            raise StartError(
                f"the Ray cluster at {ours} has ended, or its head does not answer: ray.shutdown() leaves it"
            )
        if _made[1] != _connection_id() and _PATIENCE not in os.environ:
            warnings.warn(_DIES, stacklevel=2)
        return
    if address and address not in ("auto", "local"):
        if not re.fullmatch(r".+:\d+", address):
            raise UsageError(f"{address!r} is not the address of a Ray cluster: --on ray:HOST:PORT (the port is 6379)")
        try:
            _open_connection(address)
        except OSError as refusal:
            raise StartError(f"no Ray cluster answers at {address}: {refusal.strerror or refusal}") from None
    patience = os.environ.setdefault(_PATIENCE, _FOR_EVER)
    try:
        ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as refusal:
        first = str(refusal).strip().splitlines()[0]
        raise StartError(
            f"no Ray cluster can be used: {first} Start one (ray start --head), or name it: --on ray:HOST:PORT"
        ) from None
    finally:
        if patience == _FOR_EVER:  # for this process alone
            del os.environ[_PATIENCE]
    _made = address, _connection_id()


def _open_connection(address: str) -> None:
    """Raises OSError if nothing listens there."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()


def _left_if_lost() -> bool:
    """Leave the cluster if this module has connected to it, and it has ended; returns whether it has. Ray would look
    for it, with a whole CPU."""
    import ray

    lost = _made[1] == _connection_id() and not _answers()
    if lost:
        ray.shutdown()
    return lost


def _answers() -> bool:
    """Does the head answer of the cluster to which this process is connected? Ray is not asked before it is known that
    something does: a call that fails for a minute ends the process. Where another cluster has its address by now, this
    call raises an error; most others end the process."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_get

    try:
        _open_connection(ray.get_runtime_context().gcs_address)
        _asked(_internal_kv_get, b"nbspawn")
    except Exception:  # StartError, or one of several of Ray's
        return False
    return True


def _asked(question: Callable[..., T], *arguments: Any) -> T:
    """What Ray answers to a call for which it asks the cluster's head: in a thread, since it returns only when the head
    has answered, and hears no Stop. Raises StartError if that takes too long."""
    answers: list[Any] = []

    def ask() -> None:
        try:
            answers.append((question(*arguments), None))
        except BaseException as error:
            answers.append((None, error))

    asking = threading.Thread(target=ask, name="nbspawn-asks-ray", daemon=True)
    asking.start()
    asking.join(_ANSWER_SECONDS)
    if not answers:
        raise StartError(f"the head of the Ray cluster has not answered for {_ANSWER_SECONDS:g} s: has it ended?")
    ((answer, error),) = answers
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]


def _connection_id() -> str:
    """The id of this process's connection to a cluster; '' if there is none. Jobs of two clusters may have the same."""
    import ray

    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.get_node_id()} {context.get_job_id()}"


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
        for node in _asked(ray.nodes)
        if node["Alive"]
    ]


def described(has: Mapping[str, float]) -> str:
    """'4 CPUs and 1 GPU'."""
    named = [f"{count:g} {name}{'s' * (count != 1)}" for name, count in has.items() if count]
    return " and ".join(named) or "neither CPUs nor GPUs"
