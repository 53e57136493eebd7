"""Random arrays in random layouts against the arrays in memory, and damaged files."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fastio import open_reader
from lightning_fastio.errors import FastIOError
from tests.formats.conformance import WIDENED, numbers

DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
DTYPES += ["float16", "float32", "float64", "complex64", "complex128"]


@st.composite
def layouts(draw: st.DrawFn) -> dict[str, Any]:
    """An array, and how it is cut into files, stored and read."""
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any))
    window = draw(st.none() | st.integers(1, 4))
    return {
        "dtype": draw(st.sampled_from(DTYPES)),
        "byte_order": draw(st.sampled_from("<>")),
        "order": draw(st.sampled_from("CF")),
        "shape": draw(st.lists(st.integers(0, 4), max_size=3)),
        "lengths": lengths,
        "container": draw(st.sampled_from(["npy", "npz", "compressed"])),
        "window": window,
        "stride": draw(st.none() | st.integers(1, 5)) if window else None,
        "widen_unsigned": draw(st.booleans()),
        "seed": draw(st.integers(0, 999)),
    }


def write(folder: Path, layout: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """Write the parts and return them."""
    parts = []
    for index, length in enumerate(layout["lengths"]):
        part = numbers(layout["dtype"], (length, *layout["shape"]), layout["seed"] + index)
        stored = np.asarray(part, part.dtype.newbyteorder(layout["byte_order"]), order=layout["order"])
        if layout["container"] == "npy":
            np.save(folder / f"x-{index}.npy", stored)
        else:
            save = np.savez if layout["container"] == "npz" else np.savez_compressed
            save(folder / f"part-{index}.npz", x=stored)
        parts.append(part)
    return parts


def rows_of(parts: list[np.ndarray[Any, Any]], window: int | None, stride: int | None) -> np.ndarray[Any, Any]:
    """What the rows of all parts should be."""
    if window is None:
        return np.concatenate(parts)
    step = stride or window
    empty = np.empty((0, window, *parts[0].shape[1:]), parts[0].dtype)
    windows = [part[start : start + window] for part in parts for start in range(0, len(part) - window + 1, step)]
    return np.stack(windows) if windows else empty


@given(layout=layouts(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_layout(layout, data):
    with tempfile.TemporaryDirectory() as folder:
        parts = write(Path(folder), layout)
        expected = rows_of(parts, layout["window"], layout["stride"])
        options = {name: layout[name] for name in ("window", "stride", "widen_unsigned")}
        if len(expected) == 0:
            with pytest.raises(FastIOError, match="no row"):
                open_reader(folder, **options)
            return
        reader = open_reader(folder, **options)
        assert len(reader) == len(expected)
        for _ in range(3):
            rows = data.draw(st.lists(st.integers(-len(expected), len(expected) - 1), max_size=20))
            reader.will_need(rows)
            values = reader.read(rows)["x"]
            widened = WIDENED.get(layout["dtype"]) if layout["widen_unsigned"] else None
            assert str(values.dtype) == f"torch.{widened or layout['dtype']}"
            assert values.is_contiguous()
            np.testing.assert_array_equal(values.numpy(), expected[np.asarray(rows, int)])
        reader.close()


@pytest.fixture
def originals() -> list[np.ndarray[Any, Any]]:
    return [np.arange(15, dtype=np.int16).reshape(5, 3), np.arange(5, dtype=np.float64)]


def read_everything(path: Path) -> list[np.ndarray[Any, Any]] | None:
    """All rows of all fields, or None when the file is refused in so many words."""
    try:
        reader = open_reader(path)
        return [values.numpy() for values in reader.read(range(len(reader))).values() if not isinstance(values, list)]
    except FastIOError as error:
        if path.name not in str(error):
            raise
        return None


@pytest.mark.parametrize("save", [np.save, np.savez, np.savez_compressed])
def test_every_truncation_is_refused(tmp_path, originals, save):
    path = tmp_path / ("a.npy" if save is np.save else "a.npz")
    save(path, *originals[: 1 if save is np.save else 2])
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert read_everything(path) is None, size
    path.write_bytes(whole)
    assert read_everything(path) is not None


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_flipped_bits_of_archives_never_give_wrong_values(tmp_path, originals, save):
    """An archive has checksums: a file with a flipped bit is refused, or what it delivers is right."""
    save(tmp_path / "a.npz", *originals)
    whole = (tmp_path / "a.npz").read_bytes()
    num_refused = 0
    for position in np.random.default_rng(0).permutation(len(whole) * 8)[:1500].tolist():
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        (tmp_path / "a.npz").write_bytes(damaged)
        found = read_everything(tmp_path / "a.npz")
        num_refused += found is None
        for values in found or []:
            assert any(np.array_equal(values, original) for original in originals), position
    assert num_refused > 500


def test_flipped_bits_of_headers_are_refused_or_read_as_they_say(tmp_path, originals):
    """A .npy has no checksum; a damaged header never ends in anything but an error of this package."""
    np.save(tmp_path / "a.npy", originals[0])
    whole = (tmp_path / "a.npy").read_bytes()
    for position in range(128 * 8):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        (tmp_path / "a.npy").write_bytes(damaged)
        for values in read_everything(tmp_path / "a.npy") or []:
            assert values.nbytes in (30, 60)  # 15 numbers of two bytes, widened or not.
