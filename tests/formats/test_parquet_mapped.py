"""Parquet columns whose rows are copied straight out of mapped pages: which are, and that their rows are right."""

from __future__ import annotations

import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_fastio.errors import CorruptFileError
from lightning_fastio.formats.parquet import mapped, open_source, open_target

NUM_ROWS = 100
IMAGES = np.random.default_rng(0).integers(0, 255, (NUM_ROWS, 4, 6), dtype=np.uint8)


def image_column(*, nullable: bool) -> tuple[pa.Array, pa.Schema]:
    array = pa.array([image.tobytes() for image in IMAGES], pa.binary(24))
    return array, pa.schema([pa.field("x", pa.binary(24), nullable=nullable)])


def write(path: Path, *, nullable: bool = False, **options: Any) -> Path:
    array, schema = image_column(nullable=nullable)
    plain: dict[str, Any] = {
        "compression": "none",
        "use_dictionary": False,
        "write_page_index": True,
        "row_group_size": 30,
        "write_batch_size": 7,
        "data_page_size": 1,
    }
    pq.write_table(pa.table([array], schema=schema), path, **plain | options)
    return path


def is_mapped(path: Path, **options: Any) -> bool:
    """Whether the rows come out of a map; checks them on the way."""
    rows = np.random.default_rng(1).integers(-NUM_ROWS, NUM_ROWS, 300)
    with closing(open_source(path, **options)) as reader:
        reader.will_need(rows)
        torch.testing.assert_close(reader.read(rows)["x"], torch.from_numpy(IMAGES.reshape(NUM_ROWS, 24)[rows]))
        return reader.layout()[0].read_path.startswith("memory map")


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("nullable", [False, True])
@pytest.mark.parametrize("checksum", [False, True])
def test_plain_pages_of_any_writer(tmp_path: Path, version: str, nullable: bool, checksum: bool) -> None:
    path = tmp_path / "a.parquet"
    assert is_mapped(
        write(path, data_page_version=version, nullable=nullable, write_page_checksum=checksum, write_statistics=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"write_page_index": False},
        {"compression": "zstd"},
        {"use_dictionary": True},
        {"use_dictionary": False, "column_encoding": "BYTE_STREAM_SPLIT"},
        {"nullable": True, "write_statistics": False},
    ],
    ids=["no page index", "compressed", "dictionary", "another encoding", "nulls are possible"],
)
def test_what_has_to_be_decoded(tmp_path: Path, options: dict[str, Any]) -> None:
    assert not is_mapped(write(tmp_path / "a.parquet", **options))


def test_filters_decode(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with open_target(path) as writer:
        writer.write({"x": IMAGES, "y": np.arange(NUM_ROWS)})
    with closing(open_source(path, filters=[("y", ">=", 90)])) as reader:
        assert not reader.layout()[0].read_path.startswith("memory map")
        assert torch.equal(reader.read(range(10))["x"], torch.from_numpy(IMAGES[90:]))  # type: ignore[arg-type]


def test_beside_columns_that_decode_in_several_files(tmp_path: Path) -> None:
    for number in range(3):
        with open_target(tmp_path / f"part-{number}.parquet", rows_per_block=9) as writer:
            some = slice(number * 30, number * 30 + 30)
            writer.write({"x": IMAGES[some], "y": np.arange(NUM_ROWS)[some], "s": list(map(str, range(30)))})
    pq.write_table(
        pq.read_table(tmp_path / "part-0.parquet").slice(0, 0), tmp_path / "part-1b.parquet", write_page_index=True
    )
    rows = np.random.default_rng(2).permutation(90)
    with closing(open_source(tmp_path)) as reader:
        for _ in range(2):
            batch = reader.read(rows)
            assert torch.equal(batch["x"], torch.from_numpy(IMAGES[rows]))  # type: ignore[arg-type]
            assert batch["y"].tolist() == rows.tolist()  # type: ignore[union-attr]
            assert batch["s"] == [str(row % 30) for row in rows]
            reader.close()
        again = pickle.loads(pickle.dumps(reader))
        assert torch.equal(again.read([89, 0])["x"], torch.from_numpy(IMAGES[[89, 0]]))
        again.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_types(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(NUM_ROWS * 3).view(NUM_ROWS, 3).to(dtype)
    path = tmp_path / "a.parquet"
    with open_target(path) as writer:
        writer.write({"x": values})
    with closing(open_source(path)) as reader:
        assert reader.layout()[0].read_path.startswith("memory map")
        assert torch.equal(reader.read([5, 99, 5])["x"], values[[5, 99, 5]])  # type: ignore[arg-type]


def test_each_page_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.parquet", write_page_checksum=True)
    seen: list[int] = []
    monkeypatch.setattr(mapped, "crc32", lambda data: seen.append(len(data)) or CRC(data))
    with closing(open_source(path)) as reader:
        reader.read([0, 1, 99])
        assert len(seen) == 2
        reader.read(range(NUM_ROWS))
        reader.read(range(NUM_ROWS))
    assert sum(seen) == IMAGES.nbytes


CRC = mapped.crc32


def test_an_index_that_lies_about_rows(tmp_path: Path) -> None:
    """The first row of the second page stands in the index as a zigzag number: 14 for row 7."""
    path = write(tmp_path / "a.parquet", row_group_size=NUM_ROWS)
    data = bytearray(path.read_bytes())
    pages, length = mapped.page_locations, []
    with closing(open_source(path)) as reader:
        index = reader._files.chunks(0)
        start, stop = int(index.index_offsets[0, 0]), int(index.index_offsets[0, 0] + index.index_bytes[0, 0])
    for position in range(start, stop):
        damaged = bytearray(data)
        damaged[position] ^= 2
        path.write_bytes(damaged)
        try:
            assert is_mapped(path) in (True, False)
        except CorruptFileError as error:
            length.append(str(error))
    assert pages(bytes(data[start:stop])) is not None
    assert any("contradicts the page index" in message for message in length)


def test_a_file_that_is_cut_while_in_use(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet")
    with closing(open_source(path)) as reader:
        reader.read([0])
        path.write_bytes(path.read_bytes()[:1000])
        with pytest.raises(CorruptFileError, match="was changed while it was in use"):
            reader.read([NUM_ROWS - 1])
