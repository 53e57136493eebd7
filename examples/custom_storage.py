"""A storage of your own, in full: a reader for raw images, and the data module that uses it.

A raw file holds nothing but the pixels, so that the shape has to be known. A reader has to say what a row holds, how
many rows there are, and to read a list of them; order, ranks, splits, read-ahead and resume come from the package.

    python examples/custom_storage.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch

from lightning_fastio import FastIODataModule
from lightning_fastio.formats.base import FieldLayout, Rows, check_rows
from lightning_fastio.schema import Batch, FieldSpec, Schema


class RawImages:
    """Images of one size and one byte per pixel, end to end in a file."""

    schema: Schema
    blocks = None  # every row costs the same
    cache_bytes = 0  # nothing to decode
    metadata: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, path: str | Path, *, height: int, width: int) -> None:
        self._path = Path(path)
        self._shape = (height, width)
        self._num_rows = self._path.stat().st_size // (height * width)
        self.schema = Schema({"image": FieldSpec(torch.uint8, self._shape)})

    @property
    def fingerprint(self) -> str:
        return f"{self._path.name} {self._path.stat().st_size} {self._shape}"

    def __len__(self) -> int:
        return self._num_rows

    def will_need(self, rows: Rows) -> None:
        """The kernel's own read-ahead has to do here."""

    def read(self, rows: Rows, out: Batch | None = None) -> Batch:
        batch = self.schema.allocate(len(rows)) if out is None else out
        # Mapped anew in each call, the reader holds no handle and can be sent to another process as it is.
        images = np.memmap(self._path, np.uint8, mode="r", shape=(len(self), *self._shape))
        np.take(images, check_rows(rows, len(self)), axis=0, out=batch["image"].numpy(), mode="clip")
        return batch

    def layout(self) -> list[FieldLayout]:
        return [FieldLayout("image", f"raw uint8 {self._shape}", "memory map")]

    def close(self) -> None:
        """Nothing is kept open."""


class RawImagesDataModule(FastIODataModule):
    """Loads raw images of 28 by 28 pixels."""

    def open_reader(self, source: str) -> RawImages:
        return RawImages(source, height=28, width=28)


def main() -> list[tuple[int, ...]]:
    """Write some images, and load them in shuffled batches."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "images.raw"
        path.write_bytes(np.random.default_rng(0).bytes(1000 * 28 * 28))
        data = RawImagesDataModule(train=str(path), val_split=0.1, batch_size=256)
        data.setup("fit")
        shapes = [tuple(batch["image"].shape) for batch in data.train_dataloader()]
        data.teardown("fit")
    return shapes


if __name__ == "__main__":
    print(main())
