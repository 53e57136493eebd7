"""Parquet keeps what every format keeps."""

from __future__ import annotations

from tests.formats.conformance import ReaderConformance


class TestParquet(ReaderConformance):
    target = "data.parquet"
    shapes = ((), (1,), (7,), (2, 3, 4))


class TestCompressedParquet(ReaderConformance):
    target = "data.parquet"
    shapes = ((), (1,), (7,), (2, 3, 4))
    writer_options = {"compression": "zstd", "rows_per_block": 7}  # noqa: RUF012
