"""Lightning's Trainer with the strategy ddp."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Small(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, number):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.log("train_loss", loss, prog_bar=True)
        print(f"\nrank {self.global_rank} step {self.global_step} loss {loss.item()!r}")
        return loss

    def test_step(self, batch, number):
        x, y = batch
        self.log("test_loss", nn.functional.mse_loss(self.layers(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


L.seed_everything(20)
x = torch.randn(32, 8)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = Small()
trainer = L.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False)
trainer.fit(model, loader)
print(f"rank {trainer.global_rank} of {trainer.world_size}")

# %%
(tested,) = trainer.test(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))
print(f"rank {trainer.global_rank} tests {tested['test_loss']!r}")
