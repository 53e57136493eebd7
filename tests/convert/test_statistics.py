"""Statistics equal NumPy's over all rows, however the rows were cut into tasks and shards."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_fastio.convert.statistics import FieldStatistics, measure, merge

SHAPES = st.sampled_from([(), (1,), (7,), (5000,), (3, 4), (6, 5, 3), (6, 5, 8), (0,), (2, 0, 3)])
DTYPES = st.sampled_from([np.uint8, np.int16, np.uint32, np.int64, np.float16, np.float32, np.float64, np.bool_])


def features(values: np.ndarray) -> np.ndarray:
    """Values with one column for each number that is reported."""
    shape = values.shape[1:]
    by_feature = len(shape) == 1 and 0 < shape[0] <= 4096
    by_channel = len(shape) == 3 and shape[2] <= 4
    return values.reshape(-1, shape[-1] if by_feature or by_channel else 1).astype(np.float64)


@settings(max_examples=80, deadline=None)
@given(
    shape=SHAPES,
    dtype=DTYPES,
    cuts=st.lists(st.integers(0, 12), max_size=4),
    with_nan=st.booleans(),
    seed=st.integers(0, 99),
)
def test_merged_parts_equal_numpy_over_all(shape, dtype, cuts, with_nan, seed):
    values = (np.random.default_rng(seed).normal(0, 50, (12, *shape))).astype(np.float64)
    values = np.abs(values).astype(dtype) if np.dtype(dtype).kind in "bu" else values.astype(dtype)
    if with_nan and values.dtype.kind == "f" and values.size:
        values.reshape(-1)[::3] = np.nan
    parts = [measure({"x": part}) for part in np.split(values, sorted(cuts)) if len(part)]
    # The journal of an unfinished conversion keeps the state as JSON.
    stored = [FieldStatistics.load(json.loads(json.dumps(part["x"].dump()))) for part in parts]
    found = merge({"x": part} for part in stored)["x"].report()
    assert found == merge(parts)["x"].report()
    assert found["num_values"] == values.size
    assert found["nulls"] == np.isnan(values.astype(np.float64)).sum()
    if values.size:
        with warnings.catch_warnings():
            # A feature of NaN alone has no mean.
            warnings.simplefilter("ignore")
            columns = features(values)
            expected = {
                "mean": np.nanmean(columns, axis=0),
                "std": np.nanstd(columns, axis=0),
                "min": np.nanmin(columns, axis=0),
                "max": np.nanmax(columns, axis=0),
            }
        for name, numbers in expected.items():
            reported = np.atleast_1d(np.array(found[name], dtype=np.float64))
            known = ~np.isnan(numbers)
            np.testing.assert_allclose(reported[known], numbers[known], rtol=1e-9, atol=1e-9, err_msg=name)


def test_classes_are_counted_up_to_a_limit():
    few = measure({"label": np.array([1, 1, 3]), "flag": np.array([True, False, True])})
    more = measure({"label": np.array([3, -2]), "flag": np.array([True, True])})
    assert merge([few, more])["label"].report()["counts"] == {"-2": 1, "1": 2, "3": 2}
    assert merge([few, more])["flag"].report()["counts"] == {"0": 1, "1": 4}
    many = measure({"label": np.arange(20_000)})
    assert "counts" not in many["label"].report()
    assert "counts" not in merge([few, many])["label"].report()


def test_a_feature_without_any_value_has_no_mean_and_no_range():
    entry = measure({"x": np.array([[1.0, np.nan], [3.0, np.nan]])})["x"].report()
    assert entry == {
        "num_values": 4,
        "mean": [2.0, None],
        "std": [1.0, None],
        "min": [1.0, None],
        "max": [3.0, None],
        "nulls": 2,
    }


def test_only_numbers_have_statistics():
    rows = {"word": ["a"], "raw": [b"b"], "bag": [np.arange(3), np.arange(4)], "x": np.zeros(1)}
    found = measure(rows)
    assert set(found) == {"bag", "x"}
    assert found["bag"].report() == {"num_values": 7}


def test_bytes_are_exact_at_any_size():
    values = np.full((300, 64, 64, 3), 255, np.uint8)
    values[..., 1] = 254
    entry = measure({"x": values})["x"].report()
    assert entry["mean"] == [255.0, 254.0, 255.0]
    assert entry["std"] == pytest.approx([0.0, 0.0, 0.0], abs=1e-6)
    assert entry["min"] == [255.0, 254.0, 255.0]
