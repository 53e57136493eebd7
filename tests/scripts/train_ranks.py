"""Trains on several gloo processes and writes down the rows that each rank saw. Run by tests/test_ranks.py."""

from __future__ import annotations

import argparse
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_fastio.callbacks import PrefetchCallback
from lightning_fastio.datamodules import FastIODataModule
from tests.memory import MemoryReader, counting_reader


class Rows(FastIODataModule):
    def open_reader(self, source: Any) -> MemoryReader:
        num_rows, block = source
        if not block:
            return counting_reader(num_rows)
        blocks = [*range(0, num_rows, block), num_rows]
        return counting_reader(num_rows, blocks=blocks, cache_bytes=12 * 8 * block)


class Recorder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: dict[str, list[list[int]]] = {"train": [], "val": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen["train"].append(batch["x"].tolist())
        return self.weight * batch["y"].mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["val"].append(batch["x"].tolist())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


class SignalAt(Callback):
    """Sends a signal to this process after some batches, as a scheduler would."""

    def __init__(self, batch: int, number: int) -> None:
        self.batch, self.number = batch, number

    def on_train_batch_end(self, trainer: Trainer, module: Any, *rest: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.batch:
            os.kill(os.getpid(), self.number)


class WriteSeen(Callback):
    """Writes down what this rank saw, in whatever process it ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: Trainer, module: Any) -> None:
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(module.seen))

    def on_exception(self, trainer: Trainer, module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.folder / "a.ckpt")
        self.on_fit_end(trainer, module)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-rows", type=int, default=145)
    parser.add_argument("--val-rows", type=int, default=21)
    parser.add_argument("--block", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--signal-at", type=int)
    parser.add_argument("--signal", type=int, default=signal.SIGKILL)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--prefetch", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-distributed-sampler", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    checkpoint = args.folder / "a.ckpt"
    callbacks: list[Callback] = [WriteSeen(args.folder)]
    if args.save_at:
        callbacks.append(ModelCheckpoint(args.folder, "a", every_n_train_steps=args.save_at, save_top_k=1))
    if args.signal_at:
        callbacks.append(SignalAt(args.signal_at, args.signal))
    if args.prefetch:
        callbacks.append(PrefetchCallback(args.prefetch, summary=False))
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=args.strategy if args.devices > 1 else "auto",
        max_epochs=args.epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=args.save_at is not None,
        num_sanity_val_steps=0,
        use_distributed_sampler=not args.no_distributed_sampler,
        callbacks=callbacks,
    )
    model = Recorder()
    data = Rows(
        train=[args.num_rows, args.block], val=[args.val_rows, args.block], batch_size=args.batch_size, num_workers=2
    )
    trainer.fit(model, data, ckpt_path=checkpoint if args.resume else None)


if __name__ == "__main__":
    main()
