"""What a rank's error says that a user can do, in its second line."""

from __future__ import annotations

import socket

import pytest
from kernels import Kernel, Reply, ok

GROUP = "import torch, torch.distributed as dist\n"
TWO_GPUS = (
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!"  # torch's
)
ON_CPU = "No backend type associated with device type cpu"


def hint(reply: Reply) -> str:
    """The line below the error's first one."""
    assert reply.ename == "RankRaisedError", reply
    return reply.traceback.splitlines()[1]


@pytest.mark.parametrize("begin", ["%%spawn 2", "%%spawn 2 -m fork"])
def test_names_of_other_ranks(kernel: Kernel, begin: str) -> None:
    """All that the cell will miss, and the cell that had them."""
    ok(kernel.execute("%%spawn 2\nimport json as jay\n!echo\ndef half(x): return x / 2\nfactor = 3"))
    number = kernel.value("len(In) - 2")
    said = hint(kernel.execute(f"{begin}\nprint(jay.dumps(half(factor)))"))
    assert said.startswith(f"jay, factor and half belong to the ranks of cell [{number}], and these are others: import")
    assert "--keep" in said
    ok(kernel.execute("%%spawn 2\nfactor = 4"))
    number = kernel.value("len(In) - 2")
    assert hint(kernel.execute(f"{begin}\nfactor")).startswith(f"factor belongs to the ranks of cell [{number}]")
    assert "----" in hint(kernel.execute(f"{begin}\nfaktor")), "nobody knows better"


def test_names_that_kept_ranks_do_not_have(kernel: Kernel) -> None:
    ok(kernel.execute("%%spawn 2 --keep\nthree = 3"))
    ok(kernel.execute("one, two = 1, 2"))
    said = hint(kernel.execute("%%ranks\nprint(one + two + three)\nlater = 1\nlater"))
    assert said == "one and two exist in the notebook, but not in the ranks: %%ranks --push one,two sends them."
    assert "[0-1] 6" in ok(kernel.execute("%%ranks --push one,two\nprint(one + two + three)")).text()
    ok(kernel.execute("%ranks stop"))


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (f"%%spawn 2\n{GROUP}dist.all_reduce(torch.ones(1))", "These ranks have no process group: `-b auto`"),
        (f"%%spawn 2 -b gloo\n{GROUP}dist.init_process_group()", "-b gloo has made the process group already: leave"),
        (f"%%spawn 2\nraise RuntimeError({TWO_GPUS!r})", "`device` is the rank's own"),
        (f"%%spawn 2\nraise RuntimeError({ON_CPU!r})", "NCCL moves tensors that are on a GPU: `tensor.to(device)`"),
    ],
)
def test_the_commonest_errors(kernel: Kernel, cell: str, said: str) -> None:
    assert hint(kernel.execute(cell)).startswith(said)


def test_a_port_that_is_taken(kernel: Kernel) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        method = f"init_method='tcp://127.0.0.1:{other.getsockname()[1]}', rank=rank, world_size=2"
        reply = kernel.execute(f"%%spawn 2\n{GROUP}dist.init_process_group('gloo', {method})", 60)
    assert "rank 0 of 2: DistNetworkError: The server socket has failed to listen" in reply.traceback.splitlines()[0]
    assert hint(reply).startswith("Something has this port already")
