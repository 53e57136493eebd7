"""HDF5 keeps what every storage format keeps, plain and compressed."""

from __future__ import annotations

import pytest

from tests.formats.conformance import ReaderConformance


class TestHDF5(ReaderConformance):
    target = "data.h5"
    shapes = (*ReaderConformance.shapes, (0, 3))


class TestCompressedHDF5(ReaderConformance):
    """In blocks that are decoded, several to a file."""

    target = "data.h5"
    writer_options = {"compression": "gzip", "rows_per_block": 7}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def small_blocks(self, monkeypatch):
        monkeypatch.setattr("lightning_fastio.formats.hdf5.blocks.SMALL_BYTES", 0)
        monkeypatch.setattr("lightning_fastio.formats.hdf5.blocks.BLOCK_BYTES", 0)
