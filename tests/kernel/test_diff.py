"""``%ranks diff``, ``Session.diff`` and ``diff`` at the debugger's prompt, in real kernels with real ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kernels import Kernel, ok
from users import User

START = """%%spawn 4 --keep -b gloo
import torch, torch.distributed as dist
def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, optimizer
model, optimizer = made()
group = dist.group.WORLD"""


@pytest.fixture(scope="module")
def session(module_kernel: Kernel) -> Iterator[Kernel]:
    """Four ranks that stay for all tests."""
    ok(module_kernel.execute(START))
    yield module_kernel
    module_kernel.execute("%ranks stop")


@pytest.fixture
def kept(session: Kernel) -> Iterator[Kernel]:
    """Their model is as at the start."""
    ok(session.execute("%%ranks\nmodel, optimizer = made();"))
    return session


def diff(kernel: Kernel, line: str) -> list[str]:
    """What it prints."""
    return ok(kernel.execute(f"%ranks diff {line}")).text().splitlines()


def test_all_agree(kept: Kernel) -> None:
    assert diff(kept, "model") == ["model: 4 entries are equal in all 4 ranks."]
    assert diff(kept, "model.state_dict()") == ["model.state_dict(): 4 entries are equal in all 4 ranks."]
    assert diff(kept, "{'model': model.state_dict(), 'lr': [0.1]}")[0].endswith("5 entries are equal in all 4 ranks.")
    assert diff(kept, "optimizer")[0].endswith("entries are equal in all 4 ranks.")
    assert diff(kept, "torch.default_generator") == ["torch.default_generator is equal in all 4 ranks."]


def test_one_weight_of_one_rank(kept: Kernel) -> None:
    ok(kept.execute("%%ranks 1\nwith torch.no_grad(): model[0].weight[3, 7] = model[0].weight[3, 7] * 0 + 2"))
    ok(kept.execute("%%ranks 0,2,3\nwith torch.no_grad(): model[0].weight[3, 7] = model[0].weight[3, 7] * 0 + 1"))
    assert diff(kept, "model.state_dict()") == [
        "model.state_dict(): 1 of 4 entries differs between the ranks.",
        "  ['0.weight'] (float32[8, 8]): ranks 0 and 2-3 agree, rank 1 differs",
        "    rank 1: 1 of 64 elements differ, largest difference 1 (relative 1), first at [3, 7]: 2, not 1",
    ]
    for line in ("model.state_dict() --rtol 1", "--atol 1 model.state_dict()"):
        assert "4 entries are equal in all 4 ranks within" in diff(kept, line)[0]
    assert diff(kept, "model --rtol 1e-3")[1:] == [
        line.replace("['0.weight']", ".0.weight") for line in diff(kept, "model.state_dict()")[1:]
    ]


def test_optimizers_nan_types_shapes_and_keys(kept: Kernel) -> None:
    ok(
        kept.execute(
            "%%ranks\noptimizer.param_groups[0]['lr'] = 0.1 if rank == 3 else 0.2\n"
            "if rank == 2: optimizer.state[model[0].bias]['exp_avg'][1] = float('nan')\n"
            "value = {'a': torch.ones(3 + (rank == 0)), 'b': torch.ones(2).to(torch.float64 if rank else torch.half)}\n"
            "if rank == 1: value['c'] = {'d': torch.ones(1)}"
        )
    )
    ok(kept.execute("%%ranks 3\nbias = model[2].bias.detach().clone()\nmodel[2].bias.data += 1"))
    text = "\n".join(diff(kept, "optimizer"))
    ok(kept.execute("%%ranks 3\nmodel[2].bias.data.copy_(bias);"))
    assert ".param_groups[0]['params'][3] (float32[4]): ranks 0-2 agree, rank 3 differs" in text
    assert ".param_groups[0]['lr'] (float): 0.2 in ranks 0-2, 0.1 in rank 3" in text
    assert ".state[1]['exp_avg'] (float32[8]): ranks 0-1 and 3 agree, rank 2 differs" in text
    assert "first at [1]: nan, not" in text and "; 1 NaN (not 0)" in text
    assert diff(kept, "value")[1:] == [
        "  ['a']: float32[3] in ranks 1-3, float32[4] in rank 0",
        "  ['b']: float64[2] in ranks 1-3, float16[2] in rank 0",
        "  ['c']: dict in rank 1, missing in ranks 0 and 2-3",
    ]


def test_sharded_tensors(kept: Kernel) -> None:
    ok(
        kept.execute(
            "%%ranks\n"
            "from torch.distributed.device_mesh import init_device_mesh\n"
            "try: from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor\n"
            "except ImportError:  # torch 2.4\n"
            "    from torch.distributed._tensor import DTensor, Replicate, Shard, distribute_tensor\n"
            "    from torch.distributed._tensor.placement_types import Partial\n"
            "mesh = init_device_mesh('cpu', (2, 2))\n"
            "whole = torch.arange(16.).reshape(8, 2)\n"
            "parts = {'half': distribute_tensor(whole, mesh, [Replicate(), Shard(0)]),\n"
            "         'same': distribute_tensor(whole, mesh, [Replicate(), Replicate()]),\n"
            "         'sum': DTensor.from_local(whole, mesh, [Partial(), Replicate()]),\n"
            "         'quarter': distribute_tensor(whole, mesh, [Shard(0), Shard(1)])}"
        )
    )
    notes = [
        "1 entry is sharded in 2 parts: each part is compared among the ranks that hold it.",
        "1 entry is sharded so that each rank has another part: shape, dtype and placement agree, and there is nothing "
        "else to compare.",
        "Not compared: ['sum'] (its placement is Partial: each rank has another summand).",
    ]
    assert diff(kept, "parts") == ["parts: 2 entries are equal in all 4 ranks.", *notes]
    ok(kept.execute("%%ranks 2\nparts['half'].to_local()[1, 1] += 1\nparts['same'].to_local()[3, 1] = 0"))
    first, half, how, same, *rest = diff(kept, "parts")
    assert half.startswith("  ['half'] (float32[8, 2] ") and half.endswith("part 0): ranks 0 and 2 differ")
    assert how == "    rank 2: 1 of 8 elements differ, largest difference 1 (relative 0.333), first at [1, 1]: 4, not 3"
    assert same.startswith("  ['same']") and same.endswith("ranks 0-1 and 3 agree, rank 2 differs")
    assert rest[1:] == notes
    ok(kept.execute("%%ranks\nif rank == 1: parts['quarter'] = parts['quarter'].to_local()"))
    assert any(line.startswith("  ['quarter']: float32[8, 2] ") for line in diff(kept, "parts"))


def test_fsdp(kept: Kernel) -> None:
    ok(
        kept.execute(
            "%%ranks\n"
            "from torch.distributed.fsdp import FullyShardedDataParallel\n"
            "try: from torch.distributed.fsdp import fully_shard\n"
            "except ImportError: from torch.distributed._composable.fsdp import fully_shard\n"  # torch 2.4
            "second = fully_shard(made()[0])\n"
            "first = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))\n"
            "first = FullyShardedDataParallel(first, use_orig_params=True, device_id=torch.device('cpu'))\n"
            "optimizer = torch.optim.AdamW(first.parameters())\n"
            "first(torch.ones(2, 8)).sum().backward(); optimizer.step();"
        )
    )
    assert diff(kept, "second") == [
        "second: nothing in it is compared by its contents.",
        "4 entries are sharded so that each rank has another part: shape, dtype and placement agree, and there is "
        "nothing else to compare.",
    ]
    assert diff(kept, "[p.full_tensor() for p in second.parameters()]")[0].endswith(
        "4 entries are equal in all 4 ranks."
    )
    assert "(a flat shard of FSDP1, in each rank another)." in diff(kept, "first")[-1]
    assert diff(kept, "optimizer")[0].endswith("entries are equal in all 4 ranks.")
    assert "optimizer: " in diff(kept, "optimizer")[0] and ".state[0]" in diff(kept, "optimizer")[-1]


def test_an_expression_that_raises_leaves_all_as_it_was(kept: Kernel) -> None:
    reply = kept.execute("%ranks diff 1 / (rank - 2)")
    assert reply.ename == "RankRaisedError" and "rank 2 of 4: ZeroDivisionError: division by zero" in reply.traceback
    assert "    1 / (rank - 2)" in reply.traceback and "_rank/" not in reply.traceback
    reply = kept.execute("%ranks diff modle")
    assert "NameError: name 'modle' is not defined" in reply.traceback and "also ranks " in reply.traceback
    assert ok(kept.execute("%%ranks\ndist.all_reduce(torch.ones(1)); group is dist.group.WORLD")).result == "[0-3] True"
    assert "_value" not in ok(kept.execute("%%ranks\nsorted(globals())")).result
    assert diff(kept, "model") == ["model: 4 entries are equal in all 4 ranks."]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("diff", "diff needs an expression, which each rank evaluates: `diff model.state_dict()`"),
        ("diff model optimizer", "diff needs an expression, got 'model optimizer': invalid syntax"),
        ("diff x = 1", "diff needs an expression"),
        ("diff model --rtol a", "rtol is a number of 0 or more, got 'a'"),
        ("diff @nobody model", "there are no kept ranks named 'nobody'"),
    ],
)
def test_usage_errors(kept: Kernel, line: str, says: str) -> None:
    reply = kept.execute(f"%ranks {line}")
    assert reply.ename == "UsageError" and says in reply.traceback


def test_names_of_sessions_and_products(kept: Kernel) -> None:
    ok(kept.execute("%%spawn 2 --keep --name two\nvalue = [[rank]]"))
    for line in ("diff @two value[0]", "@two diff value[0]", "diff value[0] @two"):
        text = ok(kept.execute(f"%ranks {line}")).text()
        assert text.splitlines()[1] == "  [0] (int): 0 in rank 0, 1 in rank 1"
    ok(kept.execute("%ranks stop @two"))
    assert "is equal in all 4 ranks." in diff(kept, "model[0].weight @ model[0].weight")[0]
    assert kept.complete("%ranks di") == ["diff"]


def test_busy_ranks_and_the_debugger_in_the_background(kept: Kernel) -> None:
    loop = "%%ranks --background -o handle\nimport time\nstep = rank\nwhile step < 1e9: step += 4; time.sleep(0.01)"
    ok(kept.execute(loop))
    try:
        reply = kept.execute("%ranks diff model")
        assert reply.ename == "UsageError"
        assert "the ranks are busy: `%ranks debug 0:` stops them, and `diff model` at the prompt" in reply.traceback
        user = User(kept, "%ranks debug 0:")
        try:
            user.prompt()
            while "4 ranks" not in (text := user.say("diff model")):
                pass  # the last of them is on its way to the prompt
            assert "model: 4 entries are equal in all 4 ranks." in text
            assert "the debugger" not in user.say("diff step") and not user.cell.over
            user.say("all c")
        finally:
            user.leave()
    finally:
        kept.execute("%ranks interrupt")
        kept.execute("%ranks wait")
    assert diff(kept, "model") == ["model: 4 entries are equal in all 4 ranks."]


STOPPED = """%%spawn 3 -b gloo{magic} -o out
import {debugger}
import torch, torch.distributed as dist
def train(step):
    weights = torch.arange(6.0).reshape(2, 3)
    if rank == 1: weights[1, 2] += step
    if rank < 2: {stop}
    return weights.sum().item()
found = train(4)
dist.barrier()
found"""


@pytest.mark.parametrize("stop", ["breakpoint()", "pdb.set_trace()", "torch.ones(7) + weights[1]"])
def test_at_the_debuggers_prompt(debugged: Kernel, stop: str) -> None:
    debugger, magic = ("pdb", " --pdb") if "ones" in stop else ("pdb", "")
    user = User(debugged, STOPPED.format(debugger=debugger, magic=magic, stop=stop))
    first = user.prompt()
    while "Rank 2 has not stopped" not in (text := user.say("diff weights")):
        assert "only rank" in text  # the other is on its way
    assert [line for line in text.splitlines() if line] == [
        "weights differs between the ranks.",
        "  float32[2, 3]: ranks 0-1 differ",
        "    rank 1: 1 of 6 elements differ, largest difference 4 (relative 0.8), first at [1, 2]: 9, not 5",
        "Rank 2 has not stopped: not compared.",
    ]
    assert user.prompt() == first, "and then the prompt is there again"
    assert "[step for _ in range(step)]: 4 entries are equal in ranks 0-1." in user.say(
        "diff [step for _ in range(step)]"
    )
    assert "is equal in ranks 0-1 within rtol 1." in user.say("diff weights --rtol 1")
    assert "[0-1] *** NameError: name 'nothing' is not defined" in user.say("diff nothing")
    assert "[0] *** ZeroDivisionError" in user.say("diff 1 / rank")
    assert "*** diff needs an expression, got 'x y': invalid syntax" in user.say("diff x y")
    assert "cannot ask for input" in user.say("diff input()")
    assert "7" in user.say("!diff = 7", "p diff"), "a variable of that name is the user's"
    assert user.prompt() == first
    if "ones" in stop:
        user.say("q")
        assert user.cell.wait().ename in ("RankRaisedError", "KeyboardInterrupt")
    else:
        user.say("all c")
        ok(user.cell.wait())
        assert debugged.value("list(out)") == [15.0, 19.0, 15.0]


def test_a_rank_that_is_stopped_while_it_evaluates(debugged: Kernel) -> None:
    user = User(debugged, STOPPED.format(debugger="time", magic="", stop="breakpoint()"))
    user.prompt()
    while "differ" not in user.say("diff weights"):
        pass
    user.kernel.answer("diff print('begun') or time.sleep(600)")
    user.cell.until_ranks("begun", [0, 1])
    user.kernel.interrupt()
    assert user.cell.wait().ename == "KeyboardInterrupt"


@pytest.fixture
def debugged(module_kernel: Kernel, request: pytest.FixtureRequest) -> Iterator[Kernel]:
    """A test that fails leaves nobody at a prompt."""
    failed = request.session.testsfailed
    yield module_kernel
    if request.session.testsfailed > failed:
        module_kernel.interrupt()


SCRIPT = """
import nbspawn
with nbspawn.Session(3, backend="gloo") as ranks:
    ranks.execute("import torch; weights = {'a': torch.ones(4), 'b': torch.arange(6)}; value = rank")
    same, all_differ, some = ranks.diff("weights"), ranks.diff("value"), ranks[1:].diff("value // 2")
    ranks.execute("if rank == 2: weights['a'][3] = 1.5")
    found, close = ranks.diff("weights"), ranks.diff("weights", rtol=0.5)
    try:
        ranks[0].diff("value")
    except nbspawn.UsageError as error:
        print(error)
"""


def test_session(module_kernel: Kernel) -> None:
    reply = ok(module_kernel.execute(SCRIPT))
    assert reply.text() == "diff compares ranks, and there is only rank 0\n"
    value = module_kernel.value
    assert value("[bool(one) for one in (same, all_differ, some, found, close)]") == [False, True, True, True, False]
    assert value("[one.equal for one in (same, found)]") == [True, False]
    assert value("str(same)") == "weights: 2 entries are equal in all 3 ranks."
    assert value("some.ranks") == (1, 2)
    (one,) = value("found.differing")
    (closer,) = one.pop("closer")
    assert one == {
        "path": "['a']",
        "groups": [[0, 1], [2]],
        "kinds": ["float32[4]", "float32[4]"],
        "values": ["", ""],
        "statistics": [(1.0, 1.0, 0, 0), (1.0, 1.5, 0, 0)],
        "part": "",
    }
    assert closer == {
        "count": 1,
        "largest": 0.5,
        "relative": 0.5,
        "index": (3,),
        "values": (1.0, 1.5),
        "close": False,
    }
