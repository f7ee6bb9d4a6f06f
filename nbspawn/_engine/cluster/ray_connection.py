"""This process's connection to a Ray cluster, which no end of the cluster may turn into the kernel's own."""

from __future__ import annotations

import os
import re
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from nbspawn.errors import StartError, UsageError

T = TypeVar("T")

_ANSWER_SECONDS = 5.0  # Ray itself waits for a head that does not answer for minutes
_EXTRA = "pip install 'nbspawn[ray]'"
_PATIENCE, _FOR_EVER = "RAY_gcs_rpc_server_reconnect_timeout_s", "1000000"
"""After so many seconds without the cluster's head, 60 by default, Ray ends the process. (In ms they must fit 31 bits.)
"""
_DIES = (
    "If the head of the Ray cluster is lost, Ray ends this kernel after a minute, with all of its variables. It does "
    f"not if nbspawn connects to the cluster, or after os.environ['{_PATIENCE}'] = '{_FOR_EVER}' before ray.init()."
)

_made = "", ""
"""The address with which this module has connected, by which Ray may not know the cluster, and that connection's id."""
_warned = ""
"""The id of the user's connection about which they were warned."""
users: set[int] = set()
"""The ids of those whom leaving would cost ranks."""
_lock = threading.RLock()  # while the connection is made or left: calls meanwhile would make another one


def current() -> str:
    """The id of this process's connection; '' if there is none. Jobs of two clusters may have the same number."""
    import ray

    if not ray.is_initialized():
        return ""
    context = ray.get_runtime_context()
    return f"{context.get_node_id()} {context.get_job_id()}"


@contextmanager
def in_use(connection: str) -> Iterator[bool]:
    """Is it still this process's connection? Meanwhile it stays."""
    with _lock:
        yield current() == connection


def connect(where: str) -> None:
    """Connect to the cluster that ``where`` names, or to the one that the user has connected to already. Raises
    StartError if there is none, UsageError for what is no address."""
    global _made, _warned
    try:
        with _patient():  # some of its connections have the patience that it finds when it is imported
            import ray
    except ModuleNotFoundError:
        raise UsageError(f"--on ray needs Ray, in this environment and on all nodes: {_EXTRA}") from None
    address = where.partition(":")[2] or os.environ.get("RAY_ADDRESS", "")
    if address.startswith(("//", "ray://")):
        raise UsageError(
            "ray:// is Ray Client, over which ranks cannot be watched: run the notebook on a machine of the cluster's "
            "network, and use --on ray there"
        )
    with _lock:
        lost = ray.is_initialized() and left_if_lost(current())
        if not ray.is_initialized():
            _made = address, _new(address)
            return
        ours = ray.get_runtime_context().gcs_address
        if address not in ("", "auto", ours) and (address, current()) != _made:
            raise UsageError(f"this kernel is connected to the Ray cluster at {ours}: ray.shutdown() leaves it")
        if lost:
            raise StartError(
                f"the Ray cluster at {ours} has ended, or its head does not answer: ray.shutdown() leaves it"
            )
        if current() not in (_made[1], _warned) and _PATIENCE not in os.environ:
            _warned = current()
            warnings.warn(_DIES, stacklevel=2)


def _new(address: str) -> str:
    """Connect to the cluster at this address; returns the connection's id."""
    import ray

    if address not in ("", "auto", "local"):
        if not re.fullmatch(r".+:\d+", address):
            raise UsageError(f"{address!r} is not the address of a Ray cluster: --on ray:HOST:PORT (the port is 6379)")
        try:
            _open_connection(address)
        except OSError as refusal:
            raise StartError(f"no Ray cluster answers at {address}: {refusal.strerror or refusal}") from None
    try:
        with _patient():
            ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as refusal:
        first = str(refusal).strip().splitlines()[0]
        raise StartError(
            f"no Ray cluster can be used: {first} Start one (ray start --head), or name it: --on ray:HOST:PORT"
        ) from None
    return current()


@contextmanager
def _patient() -> Iterator[None]:
    """Have Ray wait for a cluster's head for ever, in this process alone."""
    own = os.environ.get(_PATIENCE)
    os.environ[_PATIENCE] = own or _FOR_EVER
    try:
        yield
    finally:
        if own is None:
            del os.environ[_PATIENCE]


def left_if_lost(connection: str) -> bool:
    """Has this connection ended, or its cluster? If it has, this module has made the connection, and nobody uses it,
    leave it: Ray would look for the cluster for ever, with a whole CPU."""
    import ray

    with _lock:
        if current() != connection:
            return True
        lost = not _answers()
        if lost and connection == _made[1] and not users:
            ray.shutdown()
        return lost


def _answers() -> bool:
    """Does the cluster's head answer? Ray is not asked before it is known that something does: a call that fails for a
    minute ends the process. Where another cluster has its address by now, this call raises an error; most others end
    the process."""
    import ray
    from ray.experimental.internal_kv import _internal_kv_get

    try:
        _open_connection(ray.get_runtime_context().gcs_address)
        asked(_internal_kv_get, b"nbspawn")
    except Exception:  # StartError, OSError, or one of several of Ray's
        return False
    return True


def _open_connection(address: str) -> None:
    """Raises OSError if nothing listens there."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), _ANSWER_SECONDS).close()


def asked(question: Callable[..., T], *arguments: Any) -> T:
    """What Ray answers to a call for which it asks the cluster's head: in a thread, since it returns only when the head
    has answered, and hears no Stop. Raises StartError if that takes too long."""
    answers: list[tuple[Any, BaseException | None]] = []

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
    answer, error = answers[0]
    if error is not None:
        raise error
    return answer  # type: ignore[no-any-return]
