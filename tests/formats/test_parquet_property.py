"""Random tables in random layouts, read in random batches, against the values in memory."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from lightning_fastio.formats.parquet import open_source, open_target

relaxed = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
TYPES = st.sampled_from([*INTEGERS, "float32", "float64", "bool"])


@dataclass
class Column:
    """A stored column, and what is expected of it."""

    array: pa.Array
    rows: list[Any]
    """Python value of each row as delivered, nulls filled."""
    fill: Any


@st.composite
def elements(draw: st.DrawFn, dtype: str) -> Any:
    if dtype == "bool":
        return draw(st.booleans())
    if dtype.startswith("float"):
        return draw(st.floats(width=32, allow_nan=False))
    return draw(st.integers(np.iinfo(dtype).min, np.iinfo(dtype).max))


@st.composite
def columns(draw: st.DrawFn, num_rows: int) -> Column:
    """A column of any shape that can be loaded, some of it null, cut out of a longer array."""
    dtype = draw(TYPES)
    arrow = pa.bool_() if dtype == "bool" else pa.from_numpy_dtype(dtype)
    fill: Any = {"b": True, "f": 0.5}.get(dtype[0], 7)
    value = elements(dtype)
    kind = draw(st.sampled_from(["number", "text", "bytes", "category", "fixed", "list", "nested", "ragged"]))
    size = draw(st.integers(1, 3))
    if kind in ("text", "category"):
        arrow, value, fill = pa.string(), st.text(max_size=5), "-"
    elif kind == "bytes":
        arrow, value, fill = pa.binary(), st.binary(max_size=5), b"-"
    elif kind == "ragged":
        arrow, value = pa.list_(arrow), st.lists(value, max_size=3)
    elif kind != "number":
        arrow, value = pa.list_(arrow, size if kind == "fixed" else -1), st.lists(value, min_size=size, max_size=size)
    if kind == "nested":
        arrow, value = pa.list_(arrow), st.lists(value, min_size=2, max_size=2)
    before = draw(st.integers(0, 3))
    value = st.none() | value if draw(st.booleans()) else value
    drawn = draw(st.lists(value, min_size=before + num_rows, max_size=before + num_rows))
    rows = drawn[before:]
    array = pa.array(drawn, arrow).slice(before)
    if kind == "category":
        array = array.dictionary_encode()
    present = [row for row in rows if row is not None]
    instead = fill
    if pa.types.is_list(arrow) or kind == "fixed":
        assume(present)
        lengths = {len(row) for row in present}
        instead = [[fill] * size] * 2 if kind == "nested" else [fill] * lengths.pop() if len(lengths) == 1 else []
    return Column(array, [instead if row is None else row for row in rows], fill)


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Options of `pyarrow.parquet.write_table`."""
    return {
        "row_group_size": draw(st.integers(1, 9)),
        "compression": draw(st.sampled_from(["none", "snappy", "zstd", "lz4", "gzip"])),
        "use_dictionary": draw(st.booleans()),
        "write_statistics": draw(st.booleans()),
        "data_page_version": draw(st.sampled_from(["1.0", "2.0"])),
        # At 1 byte, pyarrow loses rows of its own lists.
        "data_page_size": draw(st.sampled_from([100, 1 << 20])),
        "write_page_checksum": draw(st.booleans()),
        "write_page_index": draw(st.booleans()),
    }


def plain(values: Any, categories: tuple[str, ...]) -> list[Any]:
    """Delivered values as Python objects."""
    if categories:
        return [categories[code] for code in values.tolist()]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]


@relaxed
@given(st.data())
def test_files_of_other_writers(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 25))
    table = {f"c{i}": data.draw(columns(num_rows)) for i in range(data.draw(st.integers(1, 3)))}
    cuts = sorted(data.draw(st.lists(st.integers(0, num_rows), max_size=2)))
    bounds = [0, *cuts, num_rows]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(len(bounds) - 1):
            part = {
                name: column.array.slice(bounds[number], bounds[number + 1] - bounds[number])
                for name, column in table.items()
            }
            names = data.draw(st.permutations(list(part)))
            path = Path(folder) / f"part-{number}.parquet"
            pq.write_table(pa.table({name: part[name] for name in names}), path, **data.draw(layouts()))
        fills = {name: column.fill for name, column in table.items()}
        with closing(
            open_source(folder, list(table), null_fill=fills, cache_bytes=data.draw(st.sampled_from([1, 1 << 20])))
        ) as reader:
            assert len(reader) == num_rows
            for _ in range(3):
                rows = data.draw(st.lists(st.integers(-num_rows, num_rows - 1), max_size=12))
                reader.will_need(rows)
                batch = reader.read(rows)
                for name, column in table.items():
                    found = plain(batch[name], reader.schema[name].categories)
                    assert found == [column.rows[row] for row in rows], name


@st.composite
def arrays(draw: st.DrawFn, num_rows: int) -> Any:
    """Values of one field as a user hands them to the writer."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    kind = draw(st.sampled_from(["array", "tensor", "bfloat16", "text", "bytes", "ragged"]))
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    if kind == "text":
        return [str(number) * (number % 3) for number in range(num_rows)]
    if kind == "bytes":
        return [rng.bytes(number % 4) for number in range(num_rows)]
    if kind == "bfloat16":
        return torch.from_numpy(rng.standard_normal((num_rows, *shape))).bfloat16()
    dtype = draw(st.sampled_from([*INTEGERS, "float16", "float32", "float64", "bool"]))
    if kind == "ragged":
        return [rng.integers(0, 2, (rng.integers(0, 4), *shape)).astype(dtype) for _ in range(num_rows)]
    array = rng.integers(0, 100, (num_rows, *shape)).astype(dtype)
    if kind == "tensor":
        return torch.from_numpy(array)
    return array.astype(array.dtype.newbyteorder(draw(st.sampled_from("<>"))))


@relaxed
@given(st.data())
def test_files_of_this_writer(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 40))
    fields = {f"f{i}": data.draw(arrays(num_rows)) for i in range(data.draw(st.integers(1, 3)))}
    cuts = sorted(data.draw(st.lists(st.integers(0, num_rows), max_size=3)))
    bounds = [0, *cuts, num_rows]
    options = {
        "compression": data.draw(st.sampled_from([None, "zstd", "lz4"])),
        "rows_per_block": data.draw(st.none() | st.integers(1, 10)),
        "block_bytes": data.draw(st.sampled_from([1, 100, 1 << 20])),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.parquet"
        with open_target(path, **options) as writer:
            for start, stop in pairwise(bounds):
                if start < stop:
                    writer.write({name: values[start:stop] for name, values in fields.items()})
        with closing(open_source(path, widen_unsigned=False, ragged="list")) as reader:
            rows = data.draw(st.lists(st.integers(-num_rows, num_rows - 1), max_size=12))
            batch = reader.read(rows)
    for name, values in fields.items():
        if isinstance(values, list):
            expected = [values[row].tolist() if isinstance(values[row], np.ndarray) else values[row] for row in rows]
            assert plain(batch[name], ()) == expected
            continue
        if isinstance(values, np.ndarray):
            values = torch.from_numpy(values.astype(values.dtype.newbyteorder("=")))
        found = batch[name]
        assert isinstance(found, torch.Tensor)
        assert found.dtype == values.dtype
        assert found.tolist() == [values[row].tolist() for row in rows]
