"""Tables and arrays: whatever `open_reader` reads, and what Arrow reads, in ranges of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch

from lightning_fastio.convert.arrow import class_names, is_arrow, spill
from lightning_fastio.convert.source import TASK_BYTES, Loaded, RowBatch, Source, Task
from lightning_fastio.errors import ConfigError, FastIOError, FormatError
from lightning_fastio.formats import open_reader
from lightning_fastio.formats.base import Reader
from lightning_fastio.plan.order import BlockShuffle, GlobalShuffle, Order, Sequential

_MAX_TASK_ROWS = 1 << 16


@dataclass(frozen=True)
class ReadRows:
    """Reads a range of an order of rows, and casts."""

    reader: Reader
    order: Order
    dtypes: Mapping[str, str]

    def __call__(self, span: tuple[int, int]) -> Loaded:
        rows: RowBatch = {}
        for name, values in self.reader.read(self.order.take(*span)).items():
            array = as_array(values)
            rows[name] = cast(array, np.dtype(self.dtypes[name]), name) if name in self.dtypes else array
        return Loaded(rows)


@dataclass(kw_only=True)
class Table(Source):
    """Rows of a reader; see `open_table`."""

    reader: Reader
    task_rows: int
    spilled: Path | None = None

    def tasks(self) -> Iterator[Task]:
        """Ranges of rows."""
        row_bytes = self.reader.schema.row_bytes
        for start in range(0, len(self.reader), self.task_rows):
            stop = min(start + self.task_rows, len(self.reader))
            yield Task((start, stop), stop - start, (stop - start) * row_bytes)

    def close(self) -> None:
        """Close the reader and remove the copy that a CSV or Arrow file was read through."""
        self.reader.close()
        if self.spilled is not None:
            _remove(self.spilled)


def open_table(
    source: Any,
    *,
    fields: Any = None,
    dtypes: Mapping[str, str] | None = None,
    null_fill: Any = None,
    shuffle_seed: int | None = None,
    workspace: Path,
) -> Table:
    """Open a table or arrays.

    Args:
        source: Anything that `open_reader` opens, CSV or TSV, Arrow or Feather files, or a folder written by
            ``save_to_disk`` of Hugging Face datasets.
        fields: Fields to take, rename or stack.
        dtypes: Field to NumPy dtype; checked for loss.
        null_fill: Value in place of nulls.
        shuffle_seed: Mix the rows by this seed: over all rows, or inside windows of blocks for formats that decode
            whole blocks.
        workspace: Folder for the copy of a CSV or Arrow file in a form whose rows can be found.

    Raises:
        ConfigError: A dtype is unknown or its field is missing.
        FormatError: The source has no rows.
    """
    spilled = spill(source, workspace) if is_arrow(source) else None
    try:
        reader = _open(source if spilled is None else spilled, fields, null_fill, strict=spilled is not None)
        for name, dtype in (dtypes or {}).items():
            _check_dtype(name, dtype, reader)
    except BaseException:
        if spilled is not None:
            _remove(spilled)
        raise
    task_rows = max(1, min(_MAX_TASK_ROWS, TASK_BYTES // max(1, reader.schema.row_bytes)))
    return Table(
        load=ReadRows(reader, _order_of(reader, shuffle_seed), dict(dtypes or {})),
        fingerprint=reader.fingerprint,
        num_items=len(reader),
        metadata=_metadata_of(reader, source if spilled is None else spilled),
        engine="thread",
        reader=reader,
        task_rows=task_rows,
        spilled=spilled,
    )


def _open(source: Any, fields: Any, null_fill: Any, *, strict: bool) -> Reader:
    if strict and fields is None:
        # Named, a column that does not load is an error; unnamed, it would be left out with a notice.
        fields = pq.read_schema(source).names
    options = {} if null_fill is None else {"null_fill": null_fill}
    reader = open_reader(source, fields, widen_unsigned=False, **options)
    if not len(reader):
        raise FormatError(f"{source}: there are no rows")
    return reader


def _remove(spilled: Path) -> None:
    spilled.unlink(missing_ok=True)
    with suppress(OSError):
        spilled.parent.rmdir()


def as_array(values: Any) -> Any:
    """Tensors as NumPy arrays; what NumPy has no dtype for, and lists of text, as they are."""
    if isinstance(values, torch.Tensor):
        return values if values.dtype == torch.bfloat16 or values.layout != torch.strided else values.numpy()
    return [as_array(value) for value in values] if values and isinstance(values[0], torch.Tensor) else values


def cast(values: Any, dtype: np.dtype[Any], name: str) -> Any:
    """Cast, and make sure that nothing but the rounding of floats is lost.

    Raises:
        FormatError: A number does not fit; the message names field and value.
    """
    if not isinstance(values, np.ndarray):
        raise FormatError(f"field {name!r} is not one array of numbers and cannot be cast to {dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        result: npt.NDArray[Any] = values.astype(dtype)
        if values.dtype.kind == "f" and dtype.kind == "f":
            lost = np.isfinite(values) & ~np.isfinite(result)
        else:
            lost = result.astype(values.dtype) != values
            if values.dtype.kind in "iu" and dtype.kind in "iu":
                lost |= (result < 0) != (values < 0)
    if lost.any():
        value = values[lost].flat[0]
        raise FormatError(f"field {name!r}: {value} ({values.dtype}) does not survive the cast to {dtype}")
    return result


def _check_dtype(name: str, dtype: str, reader: Reader) -> None:
    if name not in reader.schema:
        raise ConfigError(f"dtypes: there is no field {name!r}; there are {list(reader.schema)}")
    try:
        np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"dtypes: {dtype!r} for field {name!r} is not a NumPy dtype") from error


def _order_of(reader: Reader, seed: int | None) -> Order:
    if seed is None:
        return Sequential(len(reader))
    if reader.blocks is None:
        return GlobalShuffle(len(reader), seed)
    window_rows = max(1, reader.cache_bytes // 2 // max(1, reader.schema.row_bytes))
    return BlockShuffle(reader.blocks, seed, window_rows=window_rows, num_parts=1)


def _stored_classes(source: Any) -> list[str] | None:
    if not isinstance(source, Path) or source.suffix != ".parquet" or not source.is_file():
        return None
    return class_names(pq.read_schema(source))


def _metadata_of(reader: Reader, source: Any) -> dict[str, str]:
    """What the source said of itself, and the names behind integer codes."""
    metadata = dict(reader.metadata)
    categories = {name: list(spec.categories) for name, spec in reader.schema.items() if spec.categories}
    categories.update(_anndata_categories(reader, source))
    classes = _stored_classes(source)
    if classes is None and len(categories) == 1:
        [classes] = categories.values()
    if classes is not None:
        metadata.setdefault("classes", json.dumps(classes, ensure_ascii=False))
    if categories:
        metadata.setdefault("categories", json.dumps(categories, ensure_ascii=False))
    return metadata


def _anndata_categories(reader: Reader, source: Any) -> dict[str, list[str]]:
    """Names of the categorical columns of AnnData, which keeps ``codes`` and ``categories`` side by side."""
    found = {}
    for name in reader.schema:
        folder, _, last = name.rpartition("/")
        if folder and last == "codes":
            # Without such a neighbour these codes are just numbers.
            with suppress(FastIOError):
                names = open_reader(source, [f"{folder}/categories"])
                values = next(iter(names.read(range(len(names))).values()))
                names.close()
                found[name] = [str(value) for value in values]
    return found
