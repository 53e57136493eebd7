"""The usual way: a dataset that reads one sample, under torch's DataLoader, which puts samples together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_fastio.errors import FastIOError
from lightning_fastio.formats.base import Reader
from lightning_fastio.formats.files import format_of


def plain_loader(source: Any, reader: Reader, batch_size: int, num_rows: int) -> tuple[DataLoader[Any], str]:
    """A shuffled DataLoader over single samples, and in words how it reads one.

    Args:
        source: What the reader was opened with. Of several files the first is read.
        reader: Names the fields, and reads the samples where no library does so by itself.
        batch_size: Rows of a batch.
        num_rows: Rows to use at most.
    """
    columns, how = _open_columns(source, list(reader.schema)), "each library's own indexing"
    if columns is None:
        columns, how = {"": _ReaderColumn(reader)}, "this package's reader, row by row"
    dataset = _Samples(columns, num_rows)
    # Its own generator, so that the global one stays as it is.
    generator = torch.Generator().manual_seed(0)
    return DataLoader(dataset, batch_size, shuffle=True, collate_fn=_collate, generator=generator), how


class _Samples(Dataset[dict[str, Any]]):
    """One sample at a time."""

    def __init__(self, columns: Mapping[str, Any], num_rows: int) -> None:
        self._columns = columns
        self._num_rows = min(num_rows, *(len(column) for column in columns.values()))

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}


class _ArrayColumn:
    """Rows of an array or a dataset as arrays of their own."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int) -> Any:
        value = self._array[index]
        return np.array(value) if isinstance(value, np.ndarray) else value


class _ArrowColumn:
    """Rows of an Arrow column as Python values, lists as arrays."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> Any:
        value = self._column[index].as_py()
        return np.array(value) if isinstance(value, list) else value


class _ReaderColumn:
    """Rows of a reader."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> Any:
        return self._reader.read([index])


def _open_columns(source: Any, names: Sequence[str]) -> dict[str, Any] | None:
    """Columns of a file or a folder of .npy, as their libraries open them; None for sources that take more."""
    try:
        if isinstance(source, Mapping):
            return {name: _ArrayColumn(np.load(path, mmap_mode="r")) for name, path in source.items() if name in names}
        path = Path(source[0] if isinstance(source, list | tuple) else source).expanduser()
        if path.is_dir():
            return {name: _ArrayColumn(np.load(path / f"{name}.npy", mmap_mode="r")) for name in names}
        return _open_file(path, format_of(path).name, names)
    except (FastIOError, OSError, KeyError, ValueError, TypeError):
        return None


def _open_file(path: Path, name_of_format: str, names: Sequence[str]) -> dict[str, Any]:
    if name_of_format == "numpy":
        content = np.load(path, mmap_mode="r")
        arrays = {names[0]: content} if isinstance(content, np.ndarray) else {name: content[name] for name in names}
        return {name: _ArrayColumn(array) for name, array in arrays.items()}
    if name_of_format == "hdf5":
        import h5py

        file = h5py.File(path)
        return {name: _ArrayColumn(file[name]) for name in names}
    import pyarrow.parquet as pq

    table = pq.read_table(path, columns=list(names))
    return {name: _ArrowColumn(table[name]) for name in names}


def _collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Samples to a batch; what cannot be stacked stays a list."""
    batch: dict[str, Any] = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        try:
            batch[name] = default_collate(values)
        except (RuntimeError, TypeError):
            batch[name] = values
    return batch
