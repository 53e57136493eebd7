"""Shuffled rows out of every format, warm cache: what people do today, an expert's code, this package, the limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

from benchmarks.measure import Comparison, Contender, run_all
from lightning_fastio.datamodules import FastIODataModule, HDF5DataModule, NumpyDataModule, ParquetDataModule
from lightning_fastio.formats import open_writer

Bytes2D = npt.NDArray[np.uint8]

_DATA_BYTES = 1 << 30
_GZIP_BYTES = 48 << 20
_CACHE_BYTES = 32 << 20
"""Smaller than the data, so that blocks are decoded and not found in the cache."""


def run(folder: Path, console: Console) -> list[dict[str, Any]]:
    """Measure every case and print its table."""
    return run_all(_comparisons(folder), console)


def _comparisons(folder: Path) -> Iterator[Comparison]:
    """Write the data of one case after the other, and give its contenders."""
    for row_bytes, batch_size in ((12_288, 256), (256, 1024)):
        data = _random_rows(_DATA_BYTES, row_bytes)
        yield _numpy(folder, data, batch_size)
        yield _hdf5(folder, data, batch_size, "contiguous")
        yield _hdf5(folder, data, batch_size, "chunked", chunks=(max(1, (1 << 20) // row_bytes), row_bytes))
    for row_bytes, batch_size in ((12_288, 256), (256, 1024)):
        yield _hdf5_gzip(folder, _random_rows(_GZIP_BYTES, row_bytes), batch_size)
    yield _parquet_images(folder, _random_rows(_DATA_BYTES, 12_288), 256)
    yield _parquet_columns(folder, _random_rows(_DATA_BYTES, 256).view(np.float32), 1024)


def _random_rows(num_bytes: int, row_bytes: int) -> Bytes2D:
    """Rows that compress to about half, and that are finite numbers when seen as float32."""
    return np.random.default_rng(0).integers(0, 16, (num_bytes // row_bytes, row_bytes), dtype=np.uint8)


# What people do today


class PerSample(Dataset[torch.Tensor]):
    """Reads a sample when it is asked for."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(np.array(self._rows[index]))


class PerSampleArrow(Dataset[torch.Tensor]):
    """Reads a sample of an Arrow table as Python numbers."""

    def __init__(self, table: pa.Table) -> None:
        self._columns = table.columns

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: int) -> torch.Tensor:
        values = [column[index].as_py() for column in self._columns]
        return torch.tensor(values[0] if len(values) == 1 else values)


def _per_sample(dataset: Dataset[Any], batch_size: int) -> Contender:
    loader = DataLoader(dataset, batch_size, shuffle=True)
    return Contender("DataLoader, by sample", "today", lambda: loader)


# What an expert writes by hand


class GatherBatch(Dataset[torch.Tensor]):
    """Reads a batch with one gather from a memory map."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return torch.index_select(self._data, 0, torch.tensor(indices))


class H5Batch(Dataset[torch.Tensor]):
    """Reads a batch with one selection of sorted rows, the only order that h5py takes."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        rows, order = np.unique(indices, return_inverse=True)
        return torch.from_numpy(self._dataset[rows][order])


def _per_batch(dataset: Dataset[Any], batch_size: int, name: str) -> Contender:
    loader = DataLoader(dataset, batch_size, shuffle=True, collate_fn=lambda batch: batch)
    return Contender(name, "expert", lambda: loader)


# This package, and the limit


def _fastio(module: type[FastIODataModule], path: Path, batch_size: int, **options: Any) -> Contender:
    data = module(train=str(path), batch_size=batch_size, **options)
    data.setup("fit")
    loader = data.train_dataloader()
    return Contender(f"lightning_fastio ({loader.plan.shuffle})", "fastio", lambda: loader)


def _gather_in_ram(data: npt.NDArray[Any], batch_size: int, num_threads: int) -> Contender:
    source = torch.from_numpy(data)
    out = torch.empty((batch_size, *data.shape[1:]), dtype=source.dtype)

    def batches() -> Iterator[torch.Tensor]:
        default = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            for rows in torch.randperm(len(source)).split(batch_size):
                yield torch.index_select(source, 0, rows, out=out[: len(rows)])
        finally:
            torch.set_num_threads(default)

    return Contender(f"limit: RAM, threads: {num_threads}", "limit", batches)


def _limits(data: npt.NDArray[Any], batch_size: int) -> list[Contender]:
    """The better one counts: threads of OpenMP wait for each other, which a busy neighbour makes long."""
    return [_gather_in_ram(data, batch_size, num_threads) for num_threads in sorted({1, torch.get_num_threads()})]


# The cases


def _numpy(folder: Path, data: Bytes2D, batch_size: int) -> Comparison:
    path = folder / f"rows-{data.shape[1]}.npy"
    np.save(path, data)
    mapped = np.load(path, mmap_mode="c")
    contenders = [
        _per_sample(PerSample(mapped), batch_size),
        _per_batch(GatherBatch(torch.from_numpy(mapped)), batch_size, "DataLoader, by batch"),
        _fastio(NumpyDataModule, path, batch_size),
        *_limits(data, batch_size),
    ]
    return Comparison(_title(".npy", data, batch_size), data.shape[1], batch_size, contenders)


def _hdf5(
    folder: Path, data: Bytes2D, batch_size: int, layout: str, chunks: tuple[int, int] | None = None
) -> Comparison:
    path = folder / f"{layout}-{data.shape[1]}.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=data, chunks=chunks)
    dataset = h5py.File(path)["x"]
    contenders = [
        _per_sample(PerSample(dataset), batch_size),
        _per_batch(H5Batch(dataset), batch_size, "DataLoader, by batch"),
        _fastio(HDF5DataModule, path, batch_size),
        *_limits(data, batch_size),
    ]
    return Comparison(_title(f"HDF5 {layout}", data, batch_size), data.shape[1], batch_size, contenders)


def _hdf5_gzip(folder: Path, data: Bytes2D, batch_size: int) -> Comparison:
    path = folder / f"gzip-{data.shape[1]}.h5"
    chunk_rows = (1 << 20) // data.shape[1]
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=data, chunks=(chunk_rows, data.shape[1]), compression="gzip", shuffle=True)
    dataset = h5py.File(path)["x"]

    def whole_chunks() -> Iterator[npt.NDArray[Any]]:
        for start in range(0, len(dataset), chunk_rows):
            yield dataset[start : start + chunk_rows]

    contenders = [
        _per_sample(PerSample(dataset), 32),
        Contender("h5py, chunks in order", "expert", whole_chunks),
        _fastio(HDF5DataModule, path, batch_size, shuffle="block", cache_bytes=_CACHE_BYTES),
        *_limits(data, batch_size),
    ]
    return Comparison(_title("HDF5 gzip + shuffle", data, batch_size), data.shape[1], batch_size, contenders)


def _parquet_images(folder: Path, data: Bytes2D, batch_size: int) -> Comparison:
    path, lists = folder / "images.parquet", folder / "lists.parquet"
    with open_writer(path, block_bytes=4 << 20) as writer:
        writer.write({"x": data})
    # Reading lists is so slow that a part of them is enough.
    column = pa.FixedSizeListArray.from_arrays(pa.array(data[:2048].reshape(-1)), data.shape[1])
    pq.write_table(pa.table({"x": column.cast(pa.list_(pa.uint8()))}), lists)
    contenders = [
        _per_sample(PerSampleArrow(pq.read_table(lists)), batch_size),
        Contender("read_row_group in order", "expert", lambda: _row_groups(path)),
        _fastio(ParquetDataModule, path, batch_size, shuffle="block", cache_bytes=_CACHE_BYTES),
        *_limits(data, batch_size),
    ]
    return Comparison(
        _title("Parquet, image as fixed-size binary", data, batch_size),
        data.shape[1],
        batch_size,
        contenders,
        "today: the same image stored as a list",
    )


def _row_groups(path: Path) -> Iterator[npt.NDArray[Any]]:
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        column = file.read_row_group(group)["x"].chunk(0)
        width = column.type.byte_width
        start = column.offset * width
        data = np.frombuffer(column.buffers()[1], np.uint8)
        yield data[start : start + len(column) * width].reshape(len(column), width)


def _parquet_columns(folder: Path, data: npt.NDArray[np.float32], batch_size: int) -> Comparison:
    path = folder / "columns.parquet"
    names = [f"f{number}" for number in range(data.shape[1])]
    table = pa.table({name: np.ascontiguousarray(data[:, number]) for number, name in enumerate(names)})
    pq.write_table(table, path, row_group_size=16_384, compression=None)
    contenders = [
        _per_sample(PerSampleArrow(table), batch_size),
        Contender("read_row_group and stack", "expert", lambda: _stacked_groups(path, names)),
        _fastio(ParquetDataModule, path, batch_size, fields={"x": names}, shuffle="block", cache_bytes=_CACHE_BYTES),
        *_limits(data, batch_size),
    ]
    return Comparison(
        _title("Parquet, 64 columns stacked", data, batch_size), data.itemsize * data.shape[1], batch_size, contenders
    )


def _stacked_groups(path: Path, names: Sequence[str]) -> Iterator[npt.NDArray[Any]]:
    file = pq.ParquetFile(path)
    for group in range(file.num_row_groups):
        table = file.read_row_group(group)
        yield np.stack([table[name].to_numpy() for name in names], axis=1)


def _title(what: str, data: npt.NDArray[Any], batch_size: int) -> str:
    row_bytes = data.itemsize * data.shape[1]
    size = f"{row_bytes >> 10} KiB" if row_bytes >= 1024 else f"{row_bytes} B"
    return f"{what}: rows of {size}, batches of {batch_size}"
