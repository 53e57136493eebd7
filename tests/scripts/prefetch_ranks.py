"""Trains on two gloo processes without and with PrefetchCallback. Run by tests/callbacks/test_prefetch_ranks.py."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_fastio.callbacks import PrefetchCallback


class Steps(LightningModule):
    """Notes the rows of every step, and whether it was the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        is_last = self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        self.seen.append(["train", batch.tolist(), batch_idx, is_last])
        return self.layer(batch.float().unsqueeze(1)).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(["val", batch.tolist(), batch_idx])
        self.log("val", batch.float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


def train(folder: Path, callbacks: list[Callback]) -> dict[str, Any]:
    torch.manual_seed(3)
    module = Steps()
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = torch.arange(24)
    trainer.fit(module, DataLoader(rows, batch_size=2, shuffle=True), DataLoader(rows[:9], batch_size=2))  # type: ignore[arg-type]
    metric = float(trainer.callback_metrics["val"])
    return {"rank": trainer.global_rank, "seen": module.seen, "weights": module.layer.weight.tolist(), "val": metric}


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    runs = [train(folder, callbacks) for callbacks in ([], [PrefetchCallback(3)])]
    (folder / f"rank{runs[0]['rank']}.json").write_text(json.dumps(runs))


if __name__ == "__main__":
    main()
