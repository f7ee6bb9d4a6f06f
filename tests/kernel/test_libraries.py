"""What libraries know of their process: in a rank it is the rank's, also in objects that the notebook has made."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
from kernels import Kernel, ok, prepare

pytestmark = pytest.mark.extended

IMPORT = "import torch\nfrom accelerate import Accelerator\n"

TRAIN = """
def train(accelerator):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.arange(4.0) + accelerator.process_index
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(model(data).square().sum())
        optimizer.step()
    return accelerator.num_processes, [round(x, 5) for x in accelerator.unwrap_model(model).weight.flatten().tolist()]
"""


@pytest.fixture(scope="module")
def module_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One whose fork server has the libraries, as after a user's first run: each rank would import them for seconds."""
    with Kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        prepare(kernel, "torch._dynamo", "accelerate", "lightning", "transformers.trainer")
        yield kernel


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> object:
    """What each rank of torchrun gives: the same for all, as gradients are averaged."""
    script = tmp_path_factory.mktemp("torchrun") / "script.py"
    message = "f'told {train(Accelerator(cpu=True))}\\n'"
    script.write_text(f"{IMPORT}{TRAIN}\nprint({message}, end='')")  # in one piece: both ranks write to one pipe
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    first, second = (ast.literal_eval(line.removeprefix("told ")) for line in printed if line.startswith("told "))
    assert first == second
    return first


def test_an_accelerator_of_the_notebook_trains_as_under_torchrun(
    kernel: Kernel, method: str, under_torchrun: object
) -> None:
    pytest.importorskip("accelerate")
    ok(kernel.execute(f"{IMPORT}{TRAIN}\naccelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)"))
    ok(kernel.execute(f"%%spawn 2 -m {method} -o trained\ntrain(accelerator)"))
    assert kernel.value("list(trained)") == [under_torchrun] * 2
    assert kernel.value("accelerator.num_processes") == 1, "the notebook's is as it was"


STATES = """
from accelerate import Accelerator, PartialState
from transformers import TrainingArguments
arguments = TrainingArguments("out", use_cpu=True, report_to=[])
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
state = PartialState()
def processes():
    return [(it.num_processes, it.process_index) for it in (accelerator, accelerator.state, state)]
"""


def test_states_and_arguments_of_the_notebook_are_the_ranks(kernel: Kernel, method: str) -> None:
    """Whichever is asked first, and also through a function that the cell calls."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ok(kernel.execute(STATES))
    for first, then in (
        ("processes()", "arguments.world_size, arguments.process_index"),
        ("arguments.world_size, arguments.process_index", "processes()"),
    ):
        cell = (
            f"first = {first}\nthen = {then}\nsorted(map(str, (first, then))), accelerator.gradient_accumulation_steps"
        )
        ok(kernel.execute(f"%%spawn 2 -m {method} -b gloo -o told\n{cell}"))
        assert kernel.value("list(told)") == [(sorted([str([(2, rank)] * 3), str((2, rank))]), 3) for rank in range(2)]
    assert kernel.value("arguments.world_size, accelerator.num_processes") == (1, 1)


def test_an_accelerator_of_the_cell_is_the_ranks(kernel: Kernel, method: str) -> None:
    """Though the notebook, from which the rank is forked, has made one before."""
    pytest.importorskip("accelerate")
    ok(kernel.execute(f"{IMPORT}_ = Accelerator(cpu=True, mixed_precision='no')"))
    cell = "from accelerate import Accelerator\na = Accelerator(cpu=True, mixed_precision='bf16')"
    reply = ok(kernel.execute(f"%%spawn 2 -m {method}\n{cell}\na.num_processes, a.process_index, a.mixed_precision"))
    assert reply.result == "[0] (2, 0, 'bf16')\n[1] (2, 1, 'bf16')"


TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
set_seed(0)
config = BertConfig(
    vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)
data = [{"input_ids": torch.arange(6) + i, "labels": torch.tensor(i % 2)} for i in range(4)]
model = BertForSequenceClassification(config)
def of(size, data_seed=7):
    where = {"output_dir": "out", "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    arguments = TrainingArguments(**where, max_steps=1, per_device_train_batch_size=size, data_seed=data_seed)
    return Trainer(model, arguments, train_dataset=data)
trainer = of(2)
def train():
    trainer.train()
    return trainer.args.world_size, trainer.state.global_step, trainer.model.classifier.weight.flatten().tolist()
"""


def test_a_trainer_of_the_notebook_trains_in_all_ranks_together(kernel: Kernel, method: str) -> None:
    """All four rows in one step. Without data_seed their order would come from the random numbers that a rank has."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ok(kernel.execute(TRAINER))
    ok(kernel.execute(f"%%spawn 2 -m {method} -o trained\ntrain()"))
    (processes, steps, weights), second = kernel.value("list(trained)")
    assert (processes, steps, weights) == second and (processes, steps) == (2, 1)
    ok(kernel.execute("of(4).train()"))
    ok(kernel.execute("trainer = of(2, None)"))
    table = ok(kernel.execute(f"%%spawn 2 -m {method}\ntrainer.args.world_size")).table["text/plain"]
    assert "trainer was made in the notebook: ranks would shuffle its data differently." in table
    assert weights == pytest.approx(kernel.value("model.classifier.weight.flatten().tolist()"), abs=1e-5)


LIGHTNING = """
import torch, lightning
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
def make(**options):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return lightning.Trainer(accelerator="cpu", max_steps=2, **dict.fromkeys(quiet, False), **options)
data = torch.utils.data.TensorDataset(torch.arange(32.0).view(8, 4) / 32)
"""


def test_lightning_imported_in_the_notebook(kernel: Kernel, method: str) -> None:
    """At its import it concludes that it is in a notebook, and that this is rank 0."""
    pytest.importorskip("lightning")
    ok(kernel.execute(LIGHTNING))
    cell = """
trainer, model = make(devices=2, strategy="ddp"), Model()
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
from lightning.pytorch.utilities import rank_zero_only
trainer.world_size, trainer.global_rank, rank_zero_only.rank, model.layer.weight.tolist()"""
    ok(
        kernel.execute(
            f"%%spawn 2 -m {method} -o trained\nfrom lightning.pytorch.utilities import rank_zero_only\n"
            f"before = rank_zero_only.rank\n{cell}, before"
        )
    )
    (*first, weights, _), (*second, other, before) = kernel.value("list(trained)")
    assert (first, second, before) == ([2, 0, 0], [2, 1, 1], 1) and weights == other


HELD = """
trainer, parts = make(devices=1), {"of": [make(devices=1)]}
class Holder:
    pass
holder = Holder()
holder.trainer = trainer
def train():
    return trainer.world_size
def train_later():
    return train()
"""


def test_what_was_made_for_one_process_is_named(kernel: Kernel, method: str) -> None:
    """Wherever it is: in a variable, a part of one, or behind functions. But a model that was fitted is no Trainer."""
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    ok(kernel.execute(f"{LIGHTNING}{HELD}\ntrainer.fit(Model(), torch.utils.data.DataLoader(data))"))
    uses = {
        "trainer.world_size": "trainer",
        "train()": "train -> trainer",
        "train_later()": "train_later -> train -> trainer",
        "holder.trainer.world_size": "holder.trainer",
        "parts['of'][0].world_size": "parts['of'][0]",
    }
    # The kernel looks for it, and each rank that is not forked imports Lightning.
    for use, path in uses.items() if method == "fork" else [("train_later()", uses["train_later()"])]:
        reply = ok(kernel.execute(f"%%spawn 2 -m {method}\n{use}"))
        table = reply.table["text/plain"]
        assert f"{path} was made in the notebook, for one process" in table and "Make it in the cell." in table
        assert "Warning" not in reply.text(), "of what is unpickled, nothing is news"
    ok(kernel.execute("model = Model()\ntrainer.fit(model, torch.utils.data.DataLoader(data))"))
    table = ok(kernel.execute(f"%%spawn 2 -m {method}\nmodel.layer.weight.sum().item()")).table["text/plain"]
    assert "made in the notebook" not in table


PREPARED = """
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
loader = torch.utils.data.DataLoader([1, 2, 3])
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
"""


def test_what_accelerate_has_prepared_is_named(kernel: Kernel, method: str) -> None:
    """Also without the Accelerator: it would not prepare it again."""
    pytest.importorskip("accelerate")
    ok(kernel.execute(f"{IMPORT}{PREPARED}"))
    table = ok(kernel.execute(f"%%spawn 2 -m {method}\naccelerator.num_processes")).table["text/plain"]
    assert "accelerator has prepared things in the notebook" in table and "call prepare() in the cell" in table
    table = ok(kernel.execute(f"%%spawn 2 -m {method}\n[*loader], model, optimizer\n1")).table["text/plain"]
    assert "loader, model and optimizer were prepared in the notebook, for one process" in table
    ok(kernel.execute("del accelerator, model, optimizer, loader"))
