"""The network that the demo trains."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from torch import nn


class DigitsNet(LightningModule):
    """A small convolutional network for 8x8 images of digits.

    Takes batches of ``image``, uint8 ``(batch, 8, 8)`` with values up to 16, and ``label``, int64 ``(batch,)``.
    """

    def __init__(self, width: int = 16, lr: float = 4e-3) -> None:
        """Set up.

        Args:
            width: Channels of the first layer.
            lr: Learning rate of Adam.
        """
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.layers = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 16, 10),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Scores of the ten digits, ``(batch, 10)``."""
        scores: torch.Tensor = self.layers(image[:, None].float() / 16)
        return scores

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross entropy of a batch."""
        return nn.functional.cross_entropy(self(batch["image"]), batch["label"])

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        """Log the share of digits that are recognised."""
        hits = self(batch["image"]).argmax(dim=1) == batch["label"]
        self.log("val_accuracy", hits.float().mean(), batch_size=len(hits))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)
