"""Statistics of numeric fields, computed task by task and merged in order, so that equal data give equal numbers.

Means and variances are merged by the pairwise formula of Chan, Golub and LeVeque ("Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances", 1979).

Worker processes import this module, so it stays free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fastio.convert.source import Loaded, RowBatch

Floats = npt.NDArray[np.float64]

_MAX_FEATURES = 4096
_MAX_CHANNELS = 4
_MAX_CLASSES = 10_000
_CHUNK_VALUES = 1 << 18


@dataclass
class Moments:
    """Count, mean, spread and range of one field, for each of its features or channels."""

    count: Floats
    """Values that are not NaN."""
    mean: Floats
    squares: Floats
    """Sum of the squared distances from the mean."""
    low: Floats
    high: Floats
    nulls: int = 0
    """Values that are NaN."""

    def merged(self, other: Moments) -> Moments:
        """The moments of both data sets together."""
        count = self.count + other.count
        share = np.divide(other.count, count, out=np.zeros_like(count), where=count > 0)
        distance = np.where(other.count > 0, other.mean - self.mean, 0.0)
        mean = np.where(self.count > 0, self.mean + distance * share, other.mean)
        both = np.where(self.count > 0, distance**2 * self.count * share, 0.0)
        return Moments(
            count,
            mean,
            self.squares + other.squares + both,
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
            self.nulls + other.nulls,
        )


@dataclass
class FieldStatistics:
    """Statistics of one field."""

    num_values: int = 0
    """Values over all rows."""
    moments: Moments | None = None
    """None for fields that are not numbers or differ in length."""
    classes: dict[int, int] | None = None
    """Rows by value of an integer field without sample shape; None where there are too many values."""

    def merged(self, other: FieldStatistics) -> FieldStatistics:
        """The statistics of both data sets together."""
        moments = self.moments and other.moments and self.moments.merged(other.moments)
        classes = None
        if self.classes is not None and other.classes is not None:
            classes = {
                value: self.classes.get(value, 0) + other.classes.get(value, 0)
                for value in sorted({*self.classes, *other.classes})
            }
            classes = classes if len(classes) <= _MAX_CLASSES else None
        return FieldStatistics(self.num_values + other.num_values, moments, classes)

    def report(self) -> dict[str, Any]:
        """What the manifest says: plain numbers, or lists with one number a feature."""
        entry: dict[str, Any] = {"num_values": self.num_values}
        if self.moments is not None:
            deviation = np.sqrt(self.moments.squares / np.maximum(self.moments.count, 1))
            for name, values in (
                ("mean", self.moments.mean),
                ("std", deviation),
                ("min", self.moments.low),
                ("max", self.moments.high),
            ):
                # JSON has neither NaN nor infinity; a feature without any value has no mean and no range.
                known = np.isfinite(values) & (self.moments.count > 0)
                listed = [float(value) if is_known else None for value, is_known in zip(values, known, strict=True)]
                entry[name] = listed[0] if len(listed) == 1 else listed
            entry["nulls"] = self.moments.nulls
        if self.classes is not None:
            entry["counts"] = {str(value): count for value, count in self.classes.items()}
        return entry

    def dump(self) -> dict[str, Any]:
        """The state as JSON values, for the journal of an unfinished conversion."""
        moments = None
        if self.moments is not None:
            moments = {
                name: value.tolist() if isinstance(value, np.ndarray) else value
                for name, value in vars(self.moments).items()
            }
        classes = None if self.classes is None else list(self.classes.items())
        return {"num_values": self.num_values, "moments": moments, "classes": classes}

    @classmethod
    def load(cls, state: dict[str, Any]) -> FieldStatistics:
        """The inverse of `dump`; floats come back bit by bit."""
        moments = None
        if state["moments"] is not None:
            arrays = {name: np.array(value) for name, value in state["moments"].items() if name != "nulls"}
            moments = Moments(**arrays, nulls=state["moments"]["nulls"])
        classes = None if state["classes"] is None else dict(state["classes"])
        return cls(state["num_values"], moments, classes)


Statistics = dict[str, FieldStatistics]


@dataclass(frozen=True)
class WithStatistics:
    """A load function that measures what it loads, in the worker."""

    load: Callable[[Any], Loaded]

    def __call__(self, payload: Any) -> Loaded:
        loaded = self.load(payload)
        return replace(loaded, statistics=measure(loaded.rows))


def measure(rows: RowBatch) -> Statistics:
    """Statistics of the numeric fields of one batch."""
    return {name: _measure_field(values) for name, values in rows.items() if _is_numeric(values)}


def merge(parts: Iterable[Statistics]) -> Statistics:
    """Statistics of all parts together, merged from left to right."""
    total: Statistics = {}
    for part in parts:
        for name, entry in part.items():
            total[name] = total[name].merged(entry) if name in total else entry
    return total


def _is_numeric(values: Any) -> bool:
    if isinstance(values, list):
        return bool(values) and isinstance(values[0], np.ndarray)
    return isinstance(values, np.ndarray) and values.dtype.kind in "biuf"


def _measure_field(values: Any) -> FieldStatistics:
    if isinstance(values, list):
        return FieldStatistics(sum(array.size for array in values))
    columns = values.reshape(-1, _num_features(values.shape[1:]))
    if values.dtype == np.uint8 and values.ndim > 1 and values.size:
        lines = len(values) * (values.shape[1] if values.ndim > 2 else 1)
        moments = _bytes_moments(values.reshape(lines, -1), columns.shape[1])
    else:
        moments = _moments(columns)
    return FieldStatistics(values.size, moments, _count_classes(values))


def _num_features(shape: tuple[int, ...]) -> int:
    """Statistics are kept for each feature of a vector and each channel of an image, otherwise for the field."""
    if len(shape) == 1 and shape[0] <= _MAX_FEATURES:
        return max(1, shape[0])
    if len(shape) == 3 and shape[2] <= _MAX_CHANNELS:
        return max(1, shape[2])
    return 1


def _count_classes(values: npt.NDArray[Any]) -> dict[int, int] | None:
    if values.ndim > 1 or values.dtype.kind not in "biu":
        return None
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) > _MAX_CLASSES:
        return None
    return {int(value): int(count) for value, count in zip(distinct, counts, strict=True)}


def _moments(columns: npt.NDArray[Any]) -> Moments:
    """Moments of each column, in pieces that stay in the processor's cache."""
    step = max(1, _CHUNK_VALUES // columns.shape[1])
    pieces = [_piece_moments(columns[start : start + step]) for start in range(0, len(columns), step)]
    total = pieces[0] if pieces else _piece_moments(columns)
    for piece in pieces[1:]:
        total = total.merged(piece)
    return total


def _piece_moments(columns: npt.NDArray[Any]) -> Moments:
    values = columns.astype(np.float64)
    known = ~np.isnan(values)
    count = known.sum(axis=0, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        mean = np.sum(values, axis=0, where=known) / np.maximum(count, 1)
        squares = np.sum((values - mean) ** 2, axis=0, where=known)
    return Moments(
        count,
        mean,
        squares,
        np.min(values, axis=0, where=known, initial=np.inf),
        np.max(values, axis=0, where=known, initial=-np.inf),
        int(values.size - count.sum()),
    )


def _bytes_moments(rows: npt.NDArray[np.uint8], num_features: int) -> Moments:
    """Exact moments of bytes out of integer sums; several times as fast as going through floats.

    Args:
        rows: Shape ``(rows, width * num_features)``, the features innermost.
        num_features: Features or channels.
    """
    sums = np.zeros(num_features, np.uint64)
    squares = np.zeros(num_features, np.uint64)
    low = np.full(rows.shape[1], 255, np.uint8)
    high = np.zeros(rows.shape[1], np.uint8)
    # Pieces stay in the processor's cache, and 255 ** 2 times their rows fits into 32 bits.
    step = max(1, min(1 << 16, _CHUNK_VALUES // max(1, rows.shape[1])))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step]
        sums += _by_feature(np.add.reduce(piece, axis=0, dtype=np.uint32), num_features)
        squares += _by_feature(np.einsum("ij,ij->j", piece, piece, dtype=np.uint32, casting="unsafe"), num_features)
        np.minimum(low, piece.min(axis=0), out=low)
        np.maximum(high, piece.max(axis=0), out=high)
    num_values = rows.size // num_features
    mean = sums / max(1, num_values)
    return Moments(
        np.full(num_features, float(num_values)),
        mean,
        np.maximum(squares - mean * sums, 0.0),
        low.reshape(-1, num_features).min(axis=0, initial=255).astype(np.float64),
        high.reshape(-1, num_features).max(axis=0, initial=0).astype(np.float64),
    )


def _by_feature(sums: npt.NDArray[np.uint32], num_features: int) -> npt.NDArray[np.uint64]:
    folded: npt.NDArray[np.uint64] = sums.reshape(-1, num_features).sum(axis=0, dtype=np.uint64)
    return folded
