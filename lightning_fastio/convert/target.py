"""What is written where: format, one file or a folder of shards, compression."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lightning_fastio.convert.source import RowBatch
from lightning_fastio.errors import ConfigError

FORMAT_OF_SUFFIX = {
    ".npy": "numpy",
    ".npz": "numpy",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".parquet": "parquet",
}
SHARD_SUFFIX = {"numpy": ".npz", "hdf5": ".h5", "parquet": ".parquet"}

_DEFAULT_SHARD_BYTES = 1 << 30
_SAMPLE_BYTES = 1 << 20
_SAMPLE_PIECES = 16
_WORTHWHILE = 2 / 3


@dataclass(frozen=True)
class Target:
    """Where and how to write."""

    destination: Path
    """The final file or folder."""
    format: str
    """``numpy``, ``hdf5`` or ``parquet``."""
    is_folder: bool
    """Whether the destination is a folder of shards, or one file."""
    shard_bytes: int | None
    """A shard ends after the task that reaches this many bytes; None puts each split into one."""
    compression: str | None
    """``auto``, a name that the format knows, or None."""

    @property
    def staging(self) -> Path:
        """Folder beside the destination in which everything lies while the conversion runs."""
        return self.destination.with_name(f".{self.destination.name}.partial")

    def shard_name(self, split: str, number: int) -> str:
        """Path of a shard below the staged data; for a NumPy folder, that of the folder itself."""
        if not self.is_folder:
            return self.destination.name
        if self.shard_bytes is None and self.format == "numpy":
            return split
        return os.path.join(split, f"part-{number:05d}{SHARD_SUFFIX[self.format]}")


@dataclass(frozen=True)
class Compression:
    """How the data is compressed, and why."""

    name: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.name or 'none'}: {self.reason}"


def choose_target(
    destination: Path, format: str | None, *, shard_bytes: int | None, compression: str | None, overwrite: bool
) -> Target:
    """Read off the destination what to write.

    Raises:
        ConfigError: The format is open, contradicts the suffix, or the destination may not be replaced.
    """
    by_suffix = FORMAT_OF_SUFFIX.get(destination.suffix.lower())
    if destination.is_dir():
        by_suffix = None
    if format is None and by_suffix is None:
        raise ConfigError(
            f"{destination}: which format? End the name in .npy, .npz, .h5 or .parquet, or for a folder give "
            f"format='numpy', 'hdf5' or 'parquet'"
        )
    if format is not None and format not in SHARD_SUFFIX:
        raise ConfigError(f"format={format!r}: expected 'numpy', 'hdf5' or 'parquet'")
    if format is not None and by_suffix not in (None, format):
        raise ConfigError(f"{destination}: the suffix says {by_suffix}, format= says {format}")
    if destination.exists() and not overwrite:
        raise ConfigError(
            f"{destination} exists already; overwrite=True (--overwrite) replaces it once the new data is whole"
        )
    if by_suffix is not None and shard_bytes is not None:
        raise ConfigError(f"{destination}: shard_bytes= needs a folder, and the suffix makes this one file")
    chosen = format or by_suffix or ""
    if by_suffix is None and chosen != "numpy" and shard_bytes is None:
        shard_bytes = _DEFAULT_SHARD_BYTES
    return Target(destination.absolute(), chosen, by_suffix is None, shard_bytes, compression)


def choose_compression(target: Target, rows: RowBatch) -> Compression:
    """Decide how to compress, by the first rows, and say why."""
    if target.compression != "auto":
        return Compression(target.compression, "as asked for")
    if target.format == "numpy":
        return Compression(None, "NumPy files are mapped into memory, which needs them uncompressed")
    sample = _sample(rows)
    if not sample:
        return Compression(None, "there is nothing to measure")
    share = len(zlib.compress(sample, 1)) / len(sample)
    measured = f"a sample of {len(sample):,} bytes shrinks to {share:.0%}"
    if share > _WORTHWHILE:
        return Compression(None, f"{measured}, which is not worth the time to decode it")
    return Compression("zstd" if target.format == "parquet" else "gzip", measured)


def _sample(rows: RowBatch) -> bytes:
    """Pieces from all over the largest array."""
    arrays = [values for values in rows.values() if isinstance(values, np.ndarray) and values.size]
    if not arrays:
        return b""
    data = np.ascontiguousarray(max(arrays, key=lambda values: values.nbytes)).reshape(-1).view(np.uint8)
    if len(data) <= _SAMPLE_BYTES:
        return data.tobytes()
    size = _SAMPLE_BYTES // _SAMPLE_PIECES
    starts = np.linspace(0, len(data) - size, _SAMPLE_PIECES).astype(np.int64)
    return b"".join(data[start : start + size].tobytes() for start in starts)
