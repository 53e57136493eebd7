"""What the Parquet writer puts into a file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_fastio.errors import ConfigError, FileAccessError, SchemaError
from lightning_fastio.formats.parquet import open_source, open_target


def test_tensors_have_no_dictionary_no_statistics_and_no_compression(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with open_target(path) as writer:
        writer.write({"x": np.zeros((100, 8), np.float32), "y": np.arange(100), "s": ["a"] * 100})
    x, y, s = (pq.ParquetFile(path).metadata.row_group(0).column(i) for i in range(3))
    assert (x.has_dictionary_page, x.is_stats_set, x.compression) == (False, False, "UNCOMPRESSED")
    assert x.total_uncompressed_size < 100 * 32 + 100, "values and nothing else"
    assert (y.has_dictionary_page, y.statistics.max) == (False, 99)
    assert s.has_dictionary_page


@pytest.mark.parametrize("codec", ["zstd", "lz4", "snappy"])
def test_compression(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a.parquet"
    with open_target(path, compression=codec) as writer:
        writer.write({"x": np.zeros((100, 800), np.uint8)})
    assert path.stat().st_size < 10_000
    with closing(open_source(path)) as reader:
        assert not reader.read([99])["x"].any()  # type: ignore[union-attr]


def test_row_groups_hold_the_bytes_asked_for_whatever_the_batches(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with open_target(path, block_bytes=1000) as writer:
        for size in (1, 250, 3, 46):
            writer.write({"x": np.zeros((size, 10), np.uint8)})
    metadata = pq.ParquetFile(path).metadata
    assert [metadata.row_group(group).num_rows for group in range(3)] == [100, 100, 100]


def test_rows_larger_than_a_row_group_get_one_each(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with open_target(path, block_bytes=10) as writer:
        writer.write({"x": [b"a" * 100, b"", b"b" * 5, b"c" * 5, b"d"]})
    metadata = pq.ParquetFile(path).metadata
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [1, 3, 1]


def test_rows_per_block(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with open_target(path, rows_per_block=7) as writer:
        writer.write({"x": np.arange(20)})
        writer.write({"x": np.arange(20, 25)})
    with closing(open_source(path)) as reader:
        assert reader.blocks.tolist() == [0, 7, 14, 21, 25]
        assert reader.read(range(25))["x"].tolist() == list(range(25))  # type: ignore[union-attr]


def test_fields_of_a_later_batch_in_another_order(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with open_target(path) as writer:
        writer.write({"a": [1], "b": [1.5]})
        writer.write({"b": [2.5], "a": [2]})
        writer.write({"a": [], "b": []})
    with closing(open_source(path)) as reader:
        batch = reader.read([0, 1])
    assert {name: values.tolist() for name, values in batch.items()} == {"a": [1, 2], "b": [1.5, 2.5]}  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.bool, torch.int8])
def test_every_torch_dtype(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    path = tmp_path / "a.parquet"
    values = torch.randint(0, 2, (5, *shape), generator=torch.Generator().manual_seed(0)).to(dtype)
    with open_target(path) as writer:
        writer.write({"x": values})
    with closing(open_source(path)) as reader:
        assert torch.equal(reader.read([4, 0])["x"], values[[4, 0]])  # type: ignore[arg-type]


def test_ragged_rows_are_plain_lists_to_others(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    rows = [np.ones((2, 2), np.float32), np.zeros((0, 2), np.float32)]
    with open_target(path) as writer:
        writer.write({"x": rows})
    assert pq.read_table(path)["x"].to_pylist() == [[[1, 1], [1, 1]], []]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((2, 0)), r"is tensor of float64 \[0\]; its rows hold no element"),
        (np.zeros(2, np.longdouble), "tensor of float128.*Parquet stores bool, int8"),
        ([np.zeros(2, "complex64"), np.zeros(1, "complex64")], "ragged of complex64.*no Parquet list holds"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path: Path, values: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=f"'x'.*{message}"), open_target(tmp_path / "a.parquet") as writer:
        writer.write({"x": values})


def test_ragged_rows_that_differ_in_more_than_length(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="'x': row 1 of this batch"), open_target(tmp_path / "a.parquet") as writer:
        writer.write({"x": [np.zeros((2, 2)), np.zeros((2, 3))]})


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compression='zip'"):
        open_target(tmp_path / "a.parquet", compression="zip")
    with pytest.raises(ConfigError, match="must be positive"):
        open_target(tmp_path / "a.parquet", rows_per_block=0)
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(FileAccessError, match="cannot be written"),
        open_target(tmp_path / "file" / "a.parquet") as writer,
    ):
        writer.write({"x": [1]})


def test_memory_is_bounded_by_a_row_group(tmp_path: Path) -> None:
    before, most = pa.total_allocated_bytes(), 0
    batch = {"x": np.zeros((100, 10_000), np.uint8)}
    with open_target(tmp_path / "a.parquet", block_bytes=2_000_000) as writer:
        for _ in range(20):
            writer.write(batch)
            most = max(most, pa.total_allocated_bytes() - before)
            assert writer._pending_bytes <= 2_000_000
    assert most < 6_000_000
