"""Damaged Parquet files: an error that names the file or right data, never a crash or other rows."""

from __future__ import annotations

import multiprocessing
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_fastio.errors import CorruptFileError, FastIOError
from lightning_fastio.formats.parquet import open_source, open_target

NUM_ROWS = 24


def rows_of(path: Path) -> dict[str, list[Any]]:
    """All rows as Python objects, which compare well."""
    with closing(open_source(path)) as reader:
        batch = reader.read(range(len(reader)))
    return {name: [plain(value) for value in values] for name, values in batch.items()}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, torch.Tensor)) else value


@pytest.fixture(params=["of this writer", "of this writer, uncompressed", "of pyarrow"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small file with page checksums and a few kinds of columns."""
    path = tmp_path / "a.parquet"
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "x": rng.integers(0, 255, (NUM_ROWS, 3, 3), dtype=np.uint8),
        "f": rng.random(NUM_ROWS, dtype=np.float32),
        "s": [f"text {number % 5}" for number in range(NUM_ROWS)],
        "r": [np.arange(number % 3) for number in range(NUM_ROWS)],
    }
    if request.param.startswith("of this writer"):
        compression = None if request.param.endswith("uncompressed") else "zstd"
        with open_target(path, rows_per_block=10, compression=compression) as writer:
            writer.write(columns)
    else:
        lists = {"x": [value.ravel() for value in columns["x"]], "r": columns["r"]}
        table = pa.table(columns | {name: [plain(value) for value in values] for name, values in lists.items()})
        pq.write_table(table, path, row_group_size=10, write_page_checksum=True)
    return path


def test_every_truncation_is_refused_when_opening(path: Path) -> None:
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FastIOError, match=str(path)):
            open_source(path)


def read_damaged(path: Path, flips: list[tuple[int, int]], results: Path) -> None:
    """Flip one bit at a time and write down what reading gives; what comes last is where a crash happened."""
    whole = path.read_bytes()
    expected = rows_of(path)
    with results.open("w") as lines:
        for position, bit in flips:
            print(f"bit {bit} of byte {position}: ", end="", file=lines, flush=True)
            data = bytearray(whole)
            data[position] ^= 1 << bit
            path.write_bytes(data)
            try:
                print("same" if rows_of(path) == expected else "other", file=lines, flush=True)
            except FastIOError as error:
                print(f"refused: {error}".replace("\n", " "), file=lines, flush=True)


@pytest.mark.parametrize("part", ["pages", "footer"])
def test_flipped_bits(path: Path, tmp_path: Path, part: str) -> None:
    whole = path.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    first, stop = (4, footer) if part == "pages" else (footer, len(whole))
    chance = random.Random(0)
    flips = [(chance.randrange(first, stop), chance.randrange(8)) for _ in range(150)]
    # In a process of its own, so that a crash in C++ shows as an exit status.
    child = multiprocessing.get_context("spawn").Process(target=read_damaged, args=(path, flips, tmp_path / "results"))
    child.start()
    child.join(100)
    results = (tmp_path / "results").read_text().splitlines()
    assert child.exitcode == 0, results[-1]
    assert len(results) == len(flips)
    assert sum("refused" in result for result in results) > 60
    if part == "pages":  # The footer has no checksum: names and types may read differently there.
        assert [result for result in results if result.endswith("other")] == []


@pytest.mark.parametrize(("compression", "word"), [("zstd", "CRC"), (None, "checksum")])
def test_pages_are_compared_with_their_checksums(tmp_path: Path, compression: str | None, word: str) -> None:
    path = tmp_path / "a.parquet"
    with open_target(path, compression=compression) as writer:
        writer.write({"x": np.random.default_rng(0).integers(0, 255, (100, 64), dtype=np.uint8)})
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with closing(open_source(path)) as reader, pytest.raises(CorruptFileError, match=rf"a\.parquet.*{word}"):
        reader.read([0])


def test_row_counts_that_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pyarrow returns fewer rows than the footer says for some damaged files."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"y": np.arange(8)}), path)
    with closing(open_source(path)) as reader:
        read = pq.ParquetFile.read_row_groups
        monkeypatch.setattr(pq.ParquetFile, "read_row_groups", lambda *args, **options: read(*args, **options).slice(8))
        with pytest.raises(CorruptFileError, match="column 'y' holds 0 rows in row groups 0, but its footer says 8"):
            reader.read([0])
