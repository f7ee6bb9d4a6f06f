"""What a rank says harms nobody, is lost only with a reason, and is said by the rank alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernels import Kernel, ok, once

both = pytest.mark.parametrize("method", ["fork", "forkserver"])

# As of a rank whose memory, or whose libraries, somebody has taken over.
BOMB = """%%spawn 2 -o out -m {method}
import os, pickle, struct
from nbspawn._rank.debug import pdb_methods
class Bomb:
    def __reduce__(self):
        return os.system, ("touch {touched}",)
if rank:
    body = pickle.dumps(Bomb())
    pdb_methods.rank.channel._socket.sendall(struct.pack("!QLL", len(body), 0, 1) + body)
rank"""


@both
def test_nothing_that_a_rank_sends_runs_in_the_kernel(kernel: Kernel, method: str, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    reply = ok(kernel.execute(BOMB.format(method=method, touched=touched)))
    assert not touched.exists()
    assert kernel.value("list(out)") == [0, 1], "what it says besides is heard"
    assert "A message of rank 1 could not be read" in reply.table["text/plain"]


@once
def test_an_error_after_a_group_of_numpys_numbers(kernel: Kernel, method: str) -> None:
    """torch keeps a group's ranks as they were given, and the recorder reports them."""
    group = "import numpy, torch, torch.distributed as dist\ngroup = dist.new_group(list(numpy.arange(2)))\n"
    failing = "if rank: raise ValueError('mine')\ndist.all_reduce(torch.ones(1), group=group)"
    ok(kernel.execute(f"%%spawn 2 --keep -b gloo\n{group}kept = 5"))
    try:
        reply = kernel.execute(f"%%ranks\n{failing}")
        assert reply.ename == "RankRaisedError" and "ValueError: mine" in reply.traceback
        assert ok(kernel.execute("%%ranks\nkept")).result == "[0-1] 5"
        between = "one = torch.ones(1)\nif rank: dist.recv(one, src=numpy.int64(0), tag=numpy.int32(1))\n"
        between += "else: dist.send(one, dst=numpy.int64(1), tag=numpy.int32(1))\n"
        reply = kernel.execute(f"%%ranks\n{between}{failing.replace(', group=group', '')}")
        assert reply.ename == "RankRaisedError" and "ValueError: mine" in reply.traceback
        assert ok(kernel.execute("%%ranks\nkept")).result == "[0-1] 5"
    finally:
        kernel.execute("%ranks stop")


FORKS = """import os, sys
pid = os.fork()
if pid:
    _, status = os.waitpid(pid, 0)
    status = os.waitstatus_to_exitcode(status)
else:
    {child}
(rank, status) if pid else "of the child" """


@both
@pytest.mark.parametrize("child, code", [("pass", 0), ("1 / 0", 1), ("sys.exit(3)", 3), ("display('x')", 0)])
def test_a_process_that_a_rank_forks_does_not_speak_for_it(kernel: Kernel, method: str, child: str, code: int) -> None:
    reply = ok(kernel.execute(f"%%spawn 2 -o out -m {method}\n{FORKS.format(child=child)}"))
    assert kernel.value("list(out)") == [(0, code), (1, code)]
    assert ("ZeroDivisionError" in reply.text()) is (child == "1 / 0"), "as a script prints it"


@once
def test_what_a_kept_rank_forks_ends_with_the_cell(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("%%spawn 2 --keep\nx = 0"))
    try:
        for number in range(3):
            cell = f"%%ranks -o out\nx += 1\n{FORKS.format(child='x = 100')}"
            ok(kernel.execute(cell))
            assert kernel.value("list(out)") == [(0, 0), (1, 0)]
            assert ok(kernel.execute("%%ranks\nx")).result == f"[0-1] {number + 1}"
    finally:
        kernel.execute("%ranks stop")


ASKS = """import threading
from nbspawn._rank.debug import pdb_methods
channel, found = pdb_methods.rank.channel, []
def ask():
    while channel._running: time.sleep(0.001)
    for _ in range(2):
        try:
            found.append(input("? "))
        except RuntimeError as error:
            found.append(str(error))
thread = threading.Thread(target=ask)
thread.start()"""


@both
def test_a_thread_that_asks_after_its_cell_takes_nothing_from_the_next(kernel: Kernel, method: str) -> None:
    ok(kernel.execute(f"%%spawn 2 --keep -m {method}\nimport time\n{ASKS}"))
    try:
        for _ in range(3):
            assert ok(kernel.execute("%%ranks\nrank")).result == "[0] 0\n[1] 1"
        reply = ok(kernel.execute("%%ranks\nthread.join(); found"))
        assert "the cell that has started this thread has ended: nobody can answer" in reply.result
        assert ok(kernel.execute("%%ranks\ninput('name? ')", answers=["a", "a"])).result == "[0-1] 'a'"
    finally:
        kernel.execute("%ranks stop")


@once
def test_text_that_cannot_be_written_arrives_all_the_same(kernel: Kernel, method: str) -> None:
    """A lone surrogate, as of a file name that is not UTF-8."""
    cell = """%%spawn 2
odd = "caf\\udce9"
class Odd:
    def __repr__(self):
        return odd
display(Odd())
{what}"""
    reply = ok(kernel.execute(cell.format(what="answer = input(odd)\nOdd()"), answers=["x", "y"]))
    assert reply.result == "[0-1] caf\\udce9" and reply.text().count("caf\\udce9\n") == 2
    assert {prompt for prompt, _ in reply.prompts} == {"[0] caf\\udce9", "[1] caf\\udce9"}
    reply = kernel.execute(cell.format(what="raise ValueError(odd)"))
    assert "ValueError: caf\\udce9" in reply.traceback


@once
def test_a_result_that_cannot_be_written_costs_no_ranks(kernel: Kernel, method: str) -> None:
    ok(kernel.execute("%%spawn 2 --keep\nimport resource, torch"))
    try:
        limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))"
        reply = ok(kernel.execute(f"%%ranks -o out\n{limit}\ntorch.zeros(10_000_000)"))
        assert "could not be written by the rank" in kernel.execute("out[0]").traceback, reply
        assert ok(kernel.execute("%%ranks\nrank")).result == "[0] 0\n[1] 1"
    finally:
        kernel.execute("%ranks stop")


@once
def test_an_error_of_the_users_is_no_echo_for_its_words(kernel: Kernel, method: str) -> None:
    cell = """%%spawn 2 -b gloo
import time, torch, torch.distributed as dist
if rank == 0:
    raise ConnectionResetError("the database: Connection reset by peer")
dist.all_reduce(torch.ones(1))"""
    reply = kernel.execute(cell)
    assert "Rank 0 of 2: ConnectionResetError: the database" in reply.traceback.replace("rank 0", "Rank 0"), reply
    assert "ConnectionResetError: the database" in reply.table["text/plain"]
