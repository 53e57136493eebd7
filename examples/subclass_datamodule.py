"""A data module of your own: random augmentation of whole batches, in the reader threads.

fastio demo                            # writes fastio-demo/digits.h5
python examples/subclass_datamodule.py
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_fastio import HDF5DataModule, PrefetchCallback
from lightning_fastio.demo import DigitsNet


class ShiftedDigits(HDF5DataModule):
    """Moves each training batch by up to one pixel."""

    def transform_batch(self, batch: Any, stage: str, generator: torch.Generator | None = None) -> Any:
        # The generator depends on (seed, epoch, batch, rank) alone: a resumed run sees the same augmentations.
        if stage == "train":
            down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
            batch["image"] = batch["image"].roll((down, right), dims=(1, 2))
        return batch


def main(path: str = "fastio-demo/digits.h5", max_epochs: int = 10) -> Trainer:
    """Train on augmented digits."""
    data = ShiftedDigits(train=path, val_split=0.2, stratify_by="label", batch_size=64)
    trainer = Trainer(max_epochs=max_epochs, callbacks=[PrefetchCallback()])
    trainer.fit(DigitsNet(), data)
    return trainer


if __name__ == "__main__":
    main()
