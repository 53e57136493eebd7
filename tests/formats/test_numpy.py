"""The NumPy format: conformance, and what is its own."""

from __future__ import annotations

from tests.formats.conformance import ReaderConformance


class TestFolder(ReaderConformance):
    target = "data"


class TestArchive(ReaderConformance):
    target = "data.npz"
