"""Decoded rows of one field, and how a few of them are gathered into a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from lightning_fastio.errors import CorruptFileError
from lightning_fastio.formats.blocks import Int64Array


@dataclass(frozen=True)
class Dense:
    """Rows of one shape."""

    rows: npt.NDArray[Any]
    """Shape ``(num_rows, *sample_shape)``, contiguous. bfloat16 is held as uint16."""

    def gather(self, indices: Int64Array, target: torch.Tensor, positions: Int64Array) -> None:
        """Copy ``rows[indices]`` to ``target[positions]``; the positions ascend."""
        if not self.rows.size:
            return
        source = _items(self.rows.reshape(-1).view(np.uint8), len(self.rows))
        items = _items(target.reshape(-1).view(torch.uint8).numpy(), len(target))
        first, last = int(positions[0]), int(positions[-1])
        if last - first + 1 == len(positions):
            np.take(source, indices, out=items[first : last + 1], mode="clip")  # "raise" would copy through a buffer.
        else:
            items[positions] = source[indices]


@dataclass(frozen=True)
class Ragged:
    """Rows of varying length, end to end."""

    elements: npt.NDArray[Any]
    """Shape ``(num_elements, *shape)``."""
    offsets: Int64Array
    """Row ``i`` is ``elements[offsets[i] : offsets[i + 1]]``."""

    def take(self, indices: Int64Array) -> list[torch.Tensor]:
        """A tensor of its own for each row."""
        starts, stops = self.offsets[indices].tolist(), self.offsets[indices + 1].tolist()
        return [torch.from_numpy(self.elements[start:stop].copy()) for start, stop in zip(starts, stops, strict=True)]


@dataclass(frozen=True)
class Text:
    """Strings or bytes, as Arrow holds them: offsets and characters."""

    array: pa.Array
    where: str
    """File, for the message about text that is not UTF-8."""

    def take(self, indices: Int64Array) -> list[Any]:
        """A str or bytes object for each row."""
        try:
            return list(self.array.take(pa.array(indices)).to_pylist())
        except UnicodeDecodeError as error:
            raise CorruptFileError(
                f"{self.where}: a string is not valid UTF-8 ({error.reason}: {error.object!r:.60}); "
                "store such data as binary instead of string"
            ) from error


Values: TypeAlias = Dense | Ragged | Text


def offsets_of(lengths: npt.NDArray[Any]) -> Int64Array:
    """Where each row begins, and the end."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _items(data: npt.NDArray[np.uint8], num_rows: int) -> npt.NDArray[Any]:
    """Bytes as one item for each row, which NumPy moves in one piece: three times as fast as rows of many elements."""
    width = data.size // num_rows
    return data.view(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}")


def pad(rows: Sequence[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    """Rows of varying length in one tensor of shape ``(len(rows), longest, *shape)``, zeros behind their ends."""
    longest = max((len(row) for row in rows), default=0)
    padded = torch.zeros((len(rows), longest, *shape), dtype=dtype)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded
