"""A user's code, checked by mypy and pyright (test_typing.py); nothing here is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nbspawn
from nbspawn import BackgroundRun, Difference, LocalContext, RankSubset, Results, Session

if TYPE_CHECKING:
    from typing_extensions import assert_type


def train(rank: int, lr: float, *, epochs: int = 1) -> float:
    return lr * epochs * rank


def spawns() -> None:
    losses = nbspawn.spawn(train, (0.1,), nprocs=2, backend="gloo")
    assert_type(losses, Results[float])
    assert_type(losses[0], float)
    assert_type(losses[1:], list[float])
    assert_type(losses.by_rank, dict[int, float])
    total: float = sum(losses)
    context = nbspawn.spawn(train, (total,), nprocs="auto", join=False)
    assert_type(context, LocalContext)
    context.join(timeout=5.0, grace_period=3.0)
    context.interrupt()


def keeps() -> None:
    with Session(4, backend="gloo", idle_timeout=60.0) as session:
        assert_type(session, Session)
        assert_type(session.run(train, 0.1, epochs=2), Results[float])
        assert_type(session.run(train, 0.1, timeout=5.0), Results[float])
        assert_type(session.execute("rank"), Results[Any])
        assert_type(session[1:], RankSubset)
        assert_type(session[2].pull("loss"), Results[Any])
        assert_type(session.diff("loss", rtol=1e-5), Difference)
        assert_type(session[1:].diff("loss").differing, list[dict[str, Any]])
        handle = session.run(train, 0.1, background=True)
        assert_type(handle, BackgroundRun)
        assert_type(handle.result(timeout=5.0), Results[Any])
        assert_type(handle.done(), bool)
        assert_type(handle.exception(), BaseException | None)
        session.push({"lr": 0.1}, batch=3)
        assert_type(session.pids, list[int])


def fails() -> None:
    try:
        nbspawn.spawn(train)
    except nbspawn.RankRaisedError as error:
        assert_type(error.rank, int)
        assert_type(error.log_path, str)
        for other in error.others:
            assert_type(other.rank, int)
    except nbspawn.PayloadError as error:
        assert_type(error.culprit, str)


def wrong() -> None:
    nbspawn.spawn(train, nprocs=2, methods="fork")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    Session(2, keep=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Session(2).execute("rank", 5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
