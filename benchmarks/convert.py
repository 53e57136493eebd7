"""Conversion: pictures against Pillow alone and litdata's ``optimize``, arrays against the disk's write rate."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.measure import Comparison, Contender, run_all
from benchmarks.pictures import SIZE, decode_chunk, decode_item, write_pictures
from lightning_fastio.convert import convert

_NUM_PICTURES = 5000
_NUM_WORKERS = 2
_ARRAY_BYTES = 2 << 30
_CHUNK_PICTURES = 64


def run(folder: Path, console: Console) -> list[dict[str, Any]]:
    """Measure both cases and print their tables."""
    return run_all(_comparisons(folder), console, num_rounds=3, round_s=0.0)


def _comparisons(folder: Path) -> Iterator[Comparison]:
    row_bytes = SIZE[0] * SIZE[1] * 3
    yield Comparison(
        f"{_NUM_PICTURES:,} JPEG of 500 x 375 to {SIZE[0]} x {SIZE[1]} uint8, {_NUM_WORKERS} processes",
        row_bytes,
        _NUM_PICTURES,
        list(_picture_contenders(folder, write_pictures(folder / "pictures", _NUM_PICTURES))),
        note="the start of the processes included, and for all but Pillow alone the bytes synced to disk",
        prepare=lambda: _remove(folder, "pictures.*", "litdata"),
    )
    source = folder / "array.npy"
    np.save(source, np.random.default_rng(0).integers(0, 255, (_ARRAY_BYTES // (1 << 20), 1 << 20), dtype=np.uint8))
    yield Comparison(
        f"{_ARRAY_BYTES >> 30} GiB of rows of 1 MiB, .npy to each format",
        1 << 20,
        _ARRAY_BYTES >> 20,
        [
            Contender(
                "write and sync zeros", "limit", _once(lambda: _write_plain(folder / "plain"), _ARRAY_BYTES >> 20)
            ),
            *(
                Contender(
                    f"convert to {name}",
                    "fastio",
                    _once(_conversion(source, folder / f"array.{name}"), _ARRAY_BYTES >> 20),
                )
                for name in ("npz", "h5", "parquet")
            ),
        ],
        prepare=lambda: _remove(folder, "array.npz*", "array.h5*", "array.parquet*"),
    )


def _picture_contenders(folder: Path, pictures: Path) -> Iterator[Contender]:
    files = sorted(str(file) for file in pictures.iterdir())
    yield Contender("Pillow alone", "limit", _once(lambda: _pillow_alone(files), _NUM_PICTURES))
    if find_spec("litdata") is not None:
        yield Contender("litdata optimize", "today", _once(lambda: _litdata(files, folder / "litdata"), _NUM_PICTURES))
    for name in ("npz", "h5", "parquet"):
        work = _conversion(pictures, folder / f"pictures.{name}", size=SIZE, resize="stretch")
        yield Contender(f"convert to {name}", "fastio", _once(work, _NUM_PICTURES))


def _once(work: Callable[[], object], num_rows: int) -> Callable[[], list[range]]:
    """The whole work as an epoch of one batch."""

    def batches() -> list[range]:
        work()
        return [range(num_rows)]

    return batches


def _conversion(source: Path, destination: Path, **options: Any) -> Callable[[], object]:
    return lambda: convert(source, destination, num_workers=_NUM_WORKERS, **options)


def _remove(folder: Path, *patterns: str) -> None:
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _pillow_alone(files: list[str]) -> None:
    chunks = [files[start : start + _CHUNK_PICTURES] for start in range(0, len(files), _CHUNK_PICTURES)]
    with ProcessPoolExecutor(_NUM_WORKERS, multiprocessing.get_context("spawn")) as pool:
        if sum(pool.map(decode_chunk, chunks)) != SIZE[0] * len(files):
            raise RuntimeError("Pillow gave other pictures than it was asked for")


def _litdata(files: list[str], destination: Path) -> None:
    import litdata

    litdata.optimize(decode_item, files, output_dir=str(destination), num_workers=_NUM_WORKERS, chunk_bytes="64MB")


def _write_plain(path: Path) -> None:
    block = bytes(8 << 20)
    with path.open("wb", buffering=0) as stream:
        for _ in range(_ARRAY_BYTES // len(block)):
            stream.write(block)
        os.fsync(stream.fileno())
    path.unlink()
