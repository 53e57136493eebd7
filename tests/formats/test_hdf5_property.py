"""Any HDF5 dataset against the in-memory array, whatever its type, layout, chunks and filters."""

from __future__ import annotations

import h5py
import hdf5plugin
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_fastio.errors import SchemaError
from lightning_fastio.formats import open_reader

DTYPES = ["<f4", ">f4", "<f8", ">i8", "<i4", "<u1", "<i2", ">u2", "<u4", "<u8", "<f2", "?", "<c8"]
FILTERS = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "gzip-shuffle": {"compression": "gzip", "shuffle": True},
    "shuffle": {"shuffle": True},
    "fletcher32": {"fletcher32": True},
    "gzip-shuffle-fletcher32": {"compression": "gzip", "shuffle": True, "fletcher32": True},
    "lzf": {"compression": "lzf", "shuffle": True},
    "zstd": {"compression": hdf5plugin.Zstd()},
    "lz4": {"compression": hdf5plugin.LZ4()},
    "blosc": {"compression": hdf5plugin.Blosc()},
    "bitshuffle": {"compression": hdf5plugin.Bitshuffle()},
}


@st.composite
def datasets(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    shape = (draw(st.integers(1, 40)), *shape[1:])
    is_chunked = draw(st.booleans())
    chunks = tuple(draw(st.integers(1, length)) for length in shape) if is_chunked else None
    return {
        "dtype": draw(st.sampled_from(DTYPES)),
        "shape": shape,
        "chunks": chunks,
        "filters": draw(st.sampled_from(sorted(FILTERS))) if is_chunked else "none",
        "unlimited": [is_chunked and draw(st.booleans()) for _ in shape],
        "growth": [draw(st.integers(0, 3)) for _ in shape],
        "libver": draw(st.sampled_from(["earliest", "v110", "latest"])),
        "written": draw(st.floats(0, 1)) if draw(st.booleans()) else 1.0,
        "fill": draw(st.sampled_from([None, 3])),
        "userblock": draw(st.sampled_from([0, 0, 512])),
        "seed": draw(st.integers(0, 2**31)),
    }


def write(path, case, name="x"):
    """Write the dataset, and give the array that it holds."""
    rng = np.random.default_rng(case["seed"])
    dtype, shape = np.dtype(case["dtype"]), case["shape"]
    data = rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    fill = None if case["fill"] is None else np.ones((), dtype)[()] * np.ones((), dtype)[()]
    num_written = int(shape[0] * case["written"])
    with h5py.File(path, "w", libver=case["libver"], userblock_size=case["userblock"]) as file:
        grown = tuple(n + (g if u else 0) for n, g, u in zip(shape, case["growth"], case["unlimited"], strict=True))
        maxshape = tuple(None if u else n for n, u in zip(shape, case["unlimited"], strict=True))
        dataset = file.create_dataset(
            name,
            grown,
            dtype,
            chunks=case["chunks"],
            maxshape=maxshape if case["chunks"] else None,
            fillvalue=fill,
            **FILTERS[case["filters"]],
        )
        if num_written:
            dataset[(slice(0, num_written), *(slice(0, n) for n in shape[1:]))] = data[:num_written]
        if case["chunks"]:
            dataset.resize(shape)
    expected = data.copy()
    expected[num_written:] = 0 if fill is None else fill
    return expected


def delivered(array):
    """The array as a batch holds it."""
    array = array.astype(array.dtype.newbyteorder("="))
    wider = {"u2": np.int32, "u4": np.int64, "u8": np.int64}.get(array.dtype.str[1:])
    return array if wider is None else array.astype(wider)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=datasets(), data=st.data())
def test_any_dataset(tmp_path, case, data):
    path = tmp_path / "any.h5"
    expected = delivered(write(path, case))
    reader = open_reader(path)
    try:
        assert len(reader) == len(expected)
        assert reader.schema["x"].shape == expected.shape[1:]
        if reader.blocks is not None:
            assert reader.blocks[0] == 0
            assert reader.blocks[-1] == len(reader)
            assert (np.diff(reader.blocks) > 0).all()
        for _ in range(2):
            rows = data.draw(st.lists(st.integers(-len(expected), len(expected) - 1), max_size=30))
            reader.will_need(rows)
            batch = reader.read(rows)["x"].numpy()
            np.testing.assert_array_equal(batch, expected[np.array(rows, np.int64)], strict=True)
    finally:
        reader.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=datasets(), window=st.integers(1, 12), stride=st.none() | st.integers(1, 7), seed=st.integers(0, 1000))
def test_any_windows(tmp_path, case, window, stride, seed):
    path = tmp_path / "any.h5"
    expected = delivered(write(path, case))
    step = stride or window
    starts = list(range(0, len(expected) - window + 1, step))
    if not starts:
        with pytest.raises(SchemaError, match="no window of"):
            open_reader(path, window=window, stride=stride)
        return
    reader = open_reader(path, window=window, stride=stride)
    assert len(reader) == len(starts)
    rows = np.random.default_rng(seed).integers(0, len(starts), 20)
    windows = np.stack([expected[start : start + window] for start in starts])
    np.testing.assert_array_equal(reader.read(rows)["x"].numpy(), windows[rows], strict=True)
    reader.close()


@pytest.mark.parametrize("libver", ["earliest", "v110", "latest"])
@pytest.mark.parametrize(
    "maxshape", [(8, 6), (None, 6), (8, None), (None, None)], ids=["fixed", "rows", "columns", "both"]
)
@pytest.mark.parametrize("chunks", [(8, 6), (2, 6), (3, 4)], ids=["single", "rows", "split"])
@pytest.mark.parametrize("filters", ["none", "gzip-shuffle"])
def test_every_kind_of_chunk_index(tmp_path, libver, maxshape, chunks, filters):
    data = np.arange(48.0).reshape(8, 6)
    with h5py.File(tmp_path / "x.h5", "w", libver=libver) as file:
        file.create_dataset("x", data=data, chunks=chunks, maxshape=maxshape, **FILTERS[filters])
    reader = open_reader(tmp_path / "x.h5")
    rows = [7, 0, 3, 3, -1, 5]
    np.testing.assert_array_equal(reader.read(rows)["x"], data[rows])
    reader.close()
