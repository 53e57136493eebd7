"""A project as most people have one, with the two callbacks added: no other line changes.

    python examples/train.py

The run ends with a table that says how long the steps waited for data, and what to do about it.
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_fastio import MemoryHygieneCallback, PrefetchCallback


class Net(LightningModule):
    """A network of two layers for 64 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val_accuracy", (self.layers(x).argmax(dim=1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(max_epochs: int = 10) -> Trainer:
    """Train on the digits of scikit-learn."""
    digits = load_digits()
    samples = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
    train, val = random_split(samples, [0.8, 0.2], torch.Generator().manual_seed(0))
    trainer = Trainer(max_epochs=max_epochs, callbacks=[MemoryHygieneCallback(), PrefetchCallback()])
    trainer.fit(Net(), DataLoader(train, 64, shuffle=True), DataLoader(val, 64))
    return trainer


if __name__ == "__main__":
    main()
