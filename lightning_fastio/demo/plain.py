"""What the demo compares with: a dataset that reads one sample at a time, under torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, Dataset


class PlainDigits(Dataset[dict[str, Any]]):
    """One sample at a time, as most projects read a file."""

    def __init__(self, name: str, path: Path, rows: npt.NDArray[Any]) -> None:
        self._rows = rows
        self._columns: Any
        if name == "NumPy":
            self._columns = {field: np.load(path / f"{field}.npy", mmap_mode="r") for field in ("image", "label")}
        elif name == "HDF5":
            import h5py

            # Datasets are looked up once; by name for every sample it would be many times slower still.
            file = h5py.File(path)
            self._columns = {field: file[field] for field in ("image", "label")}
        else:
            import pyarrow.parquet as pq

            table = pq.read_table(path)
            self._columns = {"image": _ImageColumn(table["image"]), "label": table["label"].to_numpy()}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = int(self._rows[index])
        return {"image": np.array(self._columns["image"][row]), "label": self._columns["label"][row]}


class _ImageColumn:
    """A Parquet column of the bytes of images."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __getitem__(self, row: int) -> npt.NDArray[Any]:
        return np.frombuffer(self._column[row].as_py(), np.uint8).reshape(8, 8)


class TimedLoader:
    """Notes how long its user waits for each batch, and how long a step takes with its wait."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.forget()

    def forget(self) -> None:
        """Start afresh."""
        self.waits_s: list[float] = []
        self.steps_s: list[float] = []

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        asked = perf_counter()
        for batch in batches:
            self.waits_s.append(perf_counter() - asked)
            yield batch
            self.steps_s.append(perf_counter() - asked)
            asked = perf_counter()
