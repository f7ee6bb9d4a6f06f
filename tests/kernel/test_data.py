"""Large data, to the ranks and back: through memory that is shared, copied once, and given back when nobody uses it."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import leftovers
import numpy
import psutil
import pytest
import torch
from kernels import wait_until
from leftovers import until

import nbspawn
from nbspawn._payload.packing import Value
from nbspawn._protocol import shared_memory
from nbspawn._protocol.messages import Returned
from nbspawn._protocol.wire import Decoder, encode_event, load_event

MB = 1_000_000


def mapped() -> int:
    """Bytes of our anonymous files that this process has mapped."""
    found = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, *_, name = line.split(maxsplit=5)
        if "memfd:nbspawn" in name:
            start, end = (int(part, 16) for part in where.split("-"))
            found += end - start
    return found


def open_files() -> int:
    return sum("memfd:nbspawn" in what for what in leftovers.descriptors().values())


def shared_beyond(before: set[str]) -> set[str]:
    """What has come into the machine's shared memory, but for what other tests' processes have mapped."""
    found = set(os.listdir("/dev/shm")) - before
    theirs = {""}  # inodes, since a semaphore's name changes after it was mapped
    if found:
        ours = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        for pid in set(psutil.pids()) - ours:
            with contextlib.suppress(OSError):  # it has ended
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
                theirs |= {line.split()[4] for line in lines if "/dev/shm/" in line}
    return {name for name in found if inode(name) not in theirs}


def inode(name: str) -> str:
    """Of a file in the machine's shared memory; '' if it is gone."""
    with contextlib.suppress(FileNotFoundError):
        return str(os.stat(f"/dev/shm/{name}").st_ino)
    return ""


@pytest.fixture(autouse=True)
def nothing_in_memory(workplace: str, request: pytest.FixtureRequest) -> Iterator[None]:
    torch.ones(MB).sum()  # the threads that it has for that may be there afterwards
    request.getfixturevalue("nothing_left")
    shared = set(os.listdir("/dev/shm"))
    yield
    gc.collect()
    assert mapped() == 0 and open_files() == 0
    assert until(lambda: not shared_beyond(shared)), shared_beyond(shared)


def values_of(rank: int, count: int) -> Any:
    tensor = torch.full((count,), float(rank))
    return {
        "tensor": tensor,
        "part": tensor[: count * 3 // 4],
        "array": numpy.full(count, rank),
        "words": ["x" * 500_000, rank],
    }


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_large_results_are_the_kernels_to_write_and_cost_no_descriptor(method: str) -> None:
    results = nbspawn.spawn(values_of, args=(MB,), nprocs=2, start_method=method)
    for rank, value in enumerate(results):
        assert value["tensor"].sum() == rank * MB and value["array"].sum() == rank * MB
        assert value["words"] == ["x" * 500_000, rank]
        value["part"][:4].fill_(7)
        assert value["tensor"][:5].tolist() == [7, 7, 7, 7, rank], "a view is still one"
        value["array"][0] = 7
    assert 2 * 12 * MB < mapped() < 2 * 14 * MB and open_files() == 0
    kept = results[1]["part"]
    again = nbspawn.spawn(_sums, args=(results,), nprocs=2, start_method=method)
    assert list(again) == [[rank * (MB - 4) for rank in range(2)]] * 2, "results travel like anything else"
    assert [float(value["tensor"][0]) for value in pickle.loads(pickle.dumps(results))] == [7, 7]
    gc.disable()  # it is given back at once, not at the next garbage collection
    try:
        del results, value, again
        assert mapped() < 14 * MB
        assert kept[:5].tolist() == [7, 7, 7, 7, 1]
        del kept
        assert mapped() == 0
    finally:
        gc.enable()


def _sums(rank: int, results: Any) -> list[float]:
    return [float(value["tensor"][4:].sum()) for value in results]


@pytest.mark.extended
def test_ranks_share_what_they_only_read(tmp_path: Path) -> None:
    data, little = torch.ones(25 * MB), torch.ones(1)
    shares = nbspawn.spawn(_share, args=(data, os.fspath(tmp_path), 4), nprocs=4, start_method="forkserver")
    base = nbspawn.spawn(_share, args=(little, os.fspath(tmp_path), 4), nprocs=4, start_method="forkserver")
    assert 0.95 * data.nbytes < sum(shares) - sum(base) < 1.1 * data.nbytes


def _share(rank: int, data: torch.Tensor, folder: str, ranks: int) -> int:
    """This rank's part of the memory of all, while all have the data."""
    import time

    assert float(data[::1024].sum()) > 0
    end = time.monotonic() + 30
    for what in ("read", "measured"):
        Path(folder, f"{what}-{len(data)}-{rank}").touch()
        while len(list(Path(folder).glob(f"{what}-{len(data)}-*"))) < ranks and time.monotonic() < end:
            time.sleep(0.01)
        if what == "read":
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            share = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return share


def test_a_garbage_collection_does_not_copy_what_a_rank_has_inherited(method: str) -> None:
    [copied] = nbspawn.spawn(_copied_by_collection, nprocs=1, start_method=method)
    assert copied < 5 * MB


def _copied_by_collection(rank: int) -> int:
    def own() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))

    before = own()
    gc.collect()
    return own() - before


def test_a_kernel_full_of_data_starts_ranks_that_use_a_little_of_it() -> None:
    """What the ranks do not use is neither copied nor read."""
    main = __import__("__main__")
    main.untouched = untouched = torch.empty(4_000 * MB, dtype=torch.uint8)  # no page of it exists yet
    main.used = torch.arange(MB)
    before = mapped_pages()
    try:
        with nbspawn.Session(2, start_method="forkserver") as session:
            session.push(used=main.used)
            assert list(session.execute("int(used.sum())")) == [MB * (MB - 1) // 2] * 2
        assert mapped_pages() - before < 100 * MB
    finally:
        del main.untouched, main.used, untouched


def mapped_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_ranks_that_are_killed_with_large_data_leave_none(method: str) -> None:
    data = torch.ones(5 * MB)
    with pytest.raises(nbspawn.RankExitedError, match="SIGKILL"):
        nbspawn.spawn(_killed, args=(data,), nprocs=2, start_method=method, grace_period=0.0)


def _killed(rank: int, data: torch.Tensor) -> torch.Tensor:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return data * 2


def test_the_wire() -> None:
    """Large buffers go beside the frames, whole or cut; what nobody reads is closed."""
    attached: list[int] = []
    events = [Returned(number, 1.0, Value.of(numpy.full(MB, number)).result, 0) for number in range(3)]
    frames = [encode_event(event, 0, attached) for event in events]
    assert len(attached) == 3 and sum(map(len, frames)) < 3000
    decoder = Decoder(load_event)
    decoder.attached.extend(attached)
    whole = b"".join(frames[:2])
    found = [event for byte in whole for _, event in decoder.feed(bytes([byte]))]
    assert [int(Value(event.value).get().sum()) for event in found] == [0, MB]
    assert open_files() == 1
    decoder.close()
    ((_, small),) = Decoder(load_event).feed(encode_event(events[2], 0))
    assert Value(small.value).get()[-1] == 2, "no descriptor can go along: all in the frame"


def test_buffers_are_private_and_aligned() -> None:
    parts = [memoryview(b"abc"), memoryview(bytes(100)), memoryview(b"")]
    fd = shared_memory.write(parts)
    first, second = (shared_memory.read([fd], [3, 100, 0]) for _ in range(2))
    os.close(fd)
    first[0][0] = ord("x")
    assert [bytes(part) for part in first] == [b"xbc", bytes(100), b""] and bytes(second[0]) == b"abc"
    assert [start for start, _ in shared_memory.places([3, 100, 0])] == [0, 64, 192]


def test_what_has_no_room() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    data = torch.ones(25 * MB)
    with nbspawn.Session(2) as session:
        session.execute("state = rank")
        resource.setrlimit(resource.RLIMIT_FSIZE, (MB, limits[1]))
        try:
            with pytest.raises(
                nbspawn.StartError, match="the 100 MB that the ranks need cannot be written to shared mem"
            ):
                nbspawn.spawn(_sums, args=(data,), nprocs=2, start_method="forkserver")
            with pytest.raises(nbspawn.StartError, match="Send less"):
                session.push(data=data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert list(session.execute("state")) == [0, 1]


def test_many_bytes_are_written_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "_STRIPE", 10_000)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    parts = [numpy.random.bytes(size) for size in (3, 30_001, 0, 64, 25_000, 1)]
    sizes = [len(part) for part in parts]
    fds = shared_memory.empty_files(sum(sizes))
    shared_memory.fill(fds, [*map(memoryview, parts)])
    found = shared_memory.read(fds, sizes)
    shared_memory.close(fds)
    assert len(fds) == 4 and [bytes(part) for part in found] == parts


def test_who_reads_what_is_not_yet_filled_waits() -> None:
    [fd] = shared_memory.empty_files(3)
    message: list[Any] = []

    def reader(rank: int) -> bytes:
        return bytes(shared_memory.read([fd], [3])[0])

    thread = threading.Thread(target=lambda: message.extend(nbspawn.spawn(reader, nprocs=2, start_method="fork")))
    thread.start()
    inode = f":{os.fstat(fd).st_ino} "
    wait_until(
        lambda: sum("->" in lock and inode in lock for lock in Path("/proc/locks").read_text().splitlines()) == 2,
        "both wait",
    )
    shared_memory.fill([fd], [memoryview(b"abc")])
    thread.join()
    os.close(fd)
    assert message == [b"abc"] * 2
