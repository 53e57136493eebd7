"""Tables and arrays from and to every format, CSV, Arrow, and Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from lightning_fastio import HDF5DataModule, NumpyDataModule, ParquetDataModule, open_writer
from lightning_fastio.convert import convert
from lightning_fastio.convert.manifest import Manifest
from lightning_fastio.errors import ConfigError, CorruptFileError, FileAccessError, FormatError
from tests.convert.pictures import DESTINATIONS, classes_of, destination_options, read_all

MODULES = {"out": NumpyDataModule, "out.h5": HDF5DataModule, "out.parquet": ParquetDataModule}


def write_source(path: Path) -> dict[str, np.ndarray | list[str]]:
    """Rows of every kind, in the format of the path."""
    rng = np.random.default_rng(0)
    rows = {
        "image": rng.integers(0, 256, (50, 4, 5, 3), dtype=np.uint8),
        "weight": rng.normal(size=50).astype(np.float32),
        "label": np.arange(50) % 3,
        "flag": np.arange(50) % 2 == 0,
        "name": [f"row {number} é" for number in range(50)],
        "bag": [np.arange(number % 4, dtype=np.int32) for number in range(50)],
    }
    with open_writer(path, metadata={"classes": '["a", "b", "c"]'}) as writer:
        writer.write(rows)
    return rows


def assert_equal_rows(found, expected) -> None:
    assert list(found) == list(expected)
    for name, values in expected.items():
        if isinstance(values, np.ndarray):
            assert found[name].dtype == values.dtype
            np.testing.assert_array_equal(found[name], values)
        elif isinstance(values[0], str):
            assert found[name] == values
        else:
            for one, other in zip(found[name], values, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", DESTINATIONS)
@pytest.mark.parametrize("source", ["in", "in.h5", "in.parquet"])
def test_every_format_into_every_format(tmp_path, source, name):
    rows = write_source(tmp_path / source)
    manifest = convert(tmp_path / source, tmp_path / name, num_workers=1, **destination_options(name))
    assert_equal_rows(read_all(tmp_path / name), rows)
    assert classes_of(tmp_path / name) == '["a", "b", "c"]'
    assert manifest.classes == ["a", "b", "c"]


@pytest.mark.parametrize("name", DESTINATIONS)
def test_statistics_are_those_of_numpy(tmp_path, name):
    rows = write_source(tmp_path / "in.h5")
    manifest = convert(tmp_path / "in.h5", tmp_path / name, num_workers=0, **destination_options(name))
    image = rows["image"].reshape(-1, 3).astype(np.float64)
    entry = manifest.statistics["image"]
    np.testing.assert_allclose(entry["mean"], image.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(entry["std"], image.std(axis=0), rtol=1e-12)
    assert entry["min"] == image.min(axis=0).tolist()
    assert entry["max"] == image.max(axis=0).tolist()
    weight = rows["weight"].astype(np.float64)
    assert manifest.statistics["weight"]["mean"] == pytest.approx(weight.mean(), rel=1e-12)
    assert manifest.statistics["weight"]["std"] == pytest.approx(weight.std(), rel=1e-12)
    assert manifest.statistics["label"]["counts"] == {"0": 17, "1": 17, "2": 16}
    assert "name" not in manifest.statistics
    assert Manifest.load(tmp_path / name) == manifest
    without = convert(tmp_path / "in.h5", tmp_path / "plain.h5", num_workers=0, statistics=False)
    assert without.statistics == {}


@pytest.mark.parametrize("name", DESTINATIONS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st_numpy.arrays(
        dtype=st.sampled_from([np.uint8, np.int16, np.int64, np.float16, np.float32, np.float64, np.bool_]),
        shape=st_numpy.array_shapes(min_dims=1, max_dims=4, max_side=6),
        elements={"allow_nan": False, "allow_infinity": False},
    ),
    seed=st.none() | st.integers(0, 5),
)
def test_what_the_data_module_delivers_equals_the_source(tmp_path_factory, name, values, seed):
    folder = tmp_path_factory.mktemp("property")
    np.save(folder / "x.npy", values)
    convert(folder / "x.npy", folder / name, num_workers=0, shuffle_seed=seed, **destination_options(name))
    module = MODULES[name](train=folder / name, batch_size=3, shuffle="none", num_workers=1)
    module.setup("fit")
    found = torch.cat([batch["x"] for batch in module.train_dataloader()]).numpy()
    module.teardown("fit")
    assert found.dtype == values.dtype
    if seed is None:
        np.testing.assert_array_equal(found, values)
    else:
        order = lambda rows: np.sort(rows.reshape(len(rows), -1).view(np.uint8), axis=0)  # noqa: E731
        np.testing.assert_array_equal(order(np.ascontiguousarray(found)), order(values))


def test_shuffling_moves_whole_rows_and_repeats_by_seed(tmp_path):
    np.savez(tmp_path / "in.npz", x=np.arange(1000), y=np.arange(1000) * 3)
    orders = {}
    for name, seed in (("a.h5", 1), ("b.h5", 1), ("c.h5", 2)):
        convert(tmp_path / "in.npz", tmp_path / name, num_workers=0, shuffle_seed=seed)
        rows = read_all(tmp_path / name)
        np.testing.assert_array_equal(rows["y"], rows["x"] * 3)
        assert sorted(rows["x"].tolist()) == list(range(1000))
        orders[name] = rows["x"].tolist()
    assert orders["a.h5"] == orders["b.h5"] != orders["c.h5"]
    assert orders["a.h5"] != list(range(1000))


def test_fields_are_chosen_renamed_and_stacked(tmp_path):
    pq.write_table(pa.table({"a": [1.0, 2.0], "b": [3.0, 4.0], "y": [0, 1]}), tmp_path / "in.parquet")
    convert(tmp_path / "in.parquet", tmp_path / "out.h5", fields={"x": ["b", "a"], "label": "y"}, num_workers=0)
    rows = read_all(tmp_path / "out.h5")
    np.testing.assert_array_equal(rows["x"], np.array([[3, 1], [4, 2.0]]))
    assert rows["label"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("values", "dtype", "kept"),
    [
        (np.array([0, 255]), "uint8", True),
        (np.array([0, 256]), "uint8", False),
        (np.array([-1, 1]), "uint16", False),
        (np.array([-1, 1]), "uint64", False),
        (np.array([2**63], np.uint64), "int64", False),
        (np.array([1.0, 2.0]), "int32", True),
        (np.array([1.5]), "int32", False),
        (np.array([np.nan]), "int32", False),
        (np.array([2**24 + 1]), "float32", False),
        (np.array([2**24]), "float32", True),
        (np.array([0.1]), "float16", True),
        (np.array([1e30]), "float16", False),
        (np.array([np.inf, np.nan]), "float16", True),
        (np.array([2]), "bool", False),
    ],
)
def test_casts_are_checked_for_loss(tmp_path, values, dtype, kept):
    np.save(tmp_path / "x.npy", values)
    if kept:
        convert(tmp_path / "x.npy", tmp_path / "out.h5", dtypes={"x": dtype}, num_workers=0)
        np.testing.assert_array_equal(read_all(tmp_path / "out.h5")["x"], values.astype(dtype))
    else:
        with pytest.raises(FormatError, match=rf"'x'.*does not survive the cast to {dtype}"):
            convert(tmp_path / "x.npy", tmp_path / "out.h5", dtypes={"x": dtype}, num_workers=0)


@pytest.mark.parametrize(
    ("dtypes", "message"), [({"y": "int8"}, "no field 'y'"), ({"x": "int9"}, "'int9' for field 'x' is not")]
)
def test_casts_that_mean_nothing_are_refused(tmp_path, dtypes, message):
    np.save(tmp_path / "x.npy", np.zeros(3))
    with pytest.raises(ConfigError, match=message):
        convert(tmp_path / "x.npy", tmp_path / "out.h5", dtypes=dtypes, num_workers=0)


def test_a_slow_layout_becomes_a_fast_one(tmp_path):
    values = np.random.default_rng(0).normal(size=(200, 64, 8)).astype(np.float32)
    with h5py.File(tmp_path / "slow.h5", "w") as file:
        file.create_dataset("x", data=values, chunks=(200, 8, 1), compression="gzip")
    manifest = convert(tmp_path / "slow.h5", tmp_path / "fast.h5", num_workers=0)
    with h5py.File(tmp_path / "fast.h5") as file:
        assert file["x"].chunks is None or file["x"].chunks[1:] == (64, 8)
        assert file["x"].compression is None
        np.testing.assert_array_equal(file["x"][...], values)
    assert manifest.compression.startswith("none: a sample of")


def test_compression_is_chosen_by_a_sample_and_says_why(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((1000, 100), np.float32))
    manifest = convert(tmp_path / "x.npy", tmp_path / "out.parquet", num_workers=0)
    assert manifest.compression.startswith("zstd: a sample of 400,000 bytes shrinks to 0%")
    assert pq.read_metadata(tmp_path / "out.parquet").row_group(0).column(0).compression == "ZSTD"
    manifest = convert(tmp_path / "x.npy", tmp_path / "out.h5", num_workers=0, compression=None)
    assert manifest.compression == "none: as asked for"
    manifest = convert(tmp_path / "x.npy", tmp_path / "out", format="numpy", num_workers=0)
    assert "mapped into memory" in manifest.compression


@pytest.mark.parametrize("name", DESTINATIONS)
def test_csv_columns_take_the_type_of_all_rows(tmp_path, name):
    lines = ["id,x,late,code,flag,word,with space"]
    lines += [f"{number},{number / 2},{number},007,true,NA,a b" for number in range(3000)]
    lines += ['3000,1e3,2.5,008,false,"a ""quoted"", word",']
    (tmp_path / "in.csv").write_text("\n".join(lines))
    convert(tmp_path / "in.csv", tmp_path / name, num_workers=0, **destination_options(name))
    rows = read_all(tmp_path / name)
    np.testing.assert_array_equal(rows["id"], np.arange(3001))
    np.testing.assert_array_equal(rows["x"], np.append(np.arange(3000) / 2, 1000.0))
    np.testing.assert_array_equal(rows["late"], np.append(np.arange(3000), 2.5))
    assert rows["code"] == ["007"] * 3000 + ["008"]
    assert rows["flag"].tolist() == [True] * 3000 + [False]
    assert rows["word"] == ["NA"] * 3000 + ['a "quoted", word']
    assert rows["with space"] == ["a b"] * 3000 + [""]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_csv_numbers_that_are_missing_need_a_fill(tmp_path):
    (tmp_path / "in.csv").write_text("a,b\n1,2\n,3\n")
    with pytest.raises(FormatError, match="null"):
        convert(tmp_path / "in.csv", tmp_path / "out.h5", num_workers=0)
    assert not list(tmp_path.glob(".*"))
    convert(tmp_path / "in.csv", tmp_path / "out.h5", null_fill={"a": -1}, num_workers=0)
    assert read_all(tmp_path / "out.h5")["a"].tolist() == [1, -1]


def test_csv_with_a_row_too_short_is_damaged(tmp_path):
    (tmp_path / "in.csv").write_text("a,b\n1,2\n3\n")
    with pytest.raises(CorruptFileError, match=r"in\.csv: cannot be parsed"):
        convert(tmp_path / "in.csv", tmp_path / "out.h5", num_workers=0)


@pytest.mark.parametrize("name", DESTINATIONS)
@pytest.mark.parametrize("kind", ["file", "stream", "folder"])
def test_arrow_feather_and_dataset_folders(tmp_path, name, kind):
    features = {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}, "x": {"_type": "Value", "dtype": "float32"}}
    schema = pa.schema(
        [("x", pa.float32()), ("label", pa.int64()), ("vector", pa.list_(pa.float64())), ("word", pa.string())],
        {b"huggingface": json.dumps({"info": {"features": features}}).encode()},
    )
    tables = [
        pa.table({"x": [1.5, 2.5], "label": [0, 1], "vector": [[1, 2], [3, 4]], "word": ["a", "b"]}, schema),
        pa.table({"x": [3.5], "label": [1], "vector": [[5, 6]], "word": ["c"]}, schema),
    ]
    source = tmp_path / "in.arrow"
    if kind == "folder":
        source = tmp_path / "in"
        source.mkdir()
        names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
        for file, table in zip(names, tables, strict=True):
            with pa.ipc.new_stream(source / file, schema) as writer:
                writer.write_table(table)
        (source / "state.json").write_text(json.dumps({"_data_files": [{"filename": file} for file in names]}))
        (source / "dataset_info.json").write_text("{}")
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(source, schema) as writer:
            for table in tables:
                writer.write_table(table)
    manifest = convert(source, tmp_path / name, num_workers=0, **destination_options(name))
    rows = read_all(tmp_path / name)
    np.testing.assert_array_equal(rows["x"], np.array([1.5, 2.5, 3.5], np.float32))
    assert rows["label"].tolist() == [0, 1, 1]
    np.testing.assert_array_equal(rows["vector"], np.array([[1, 2], [3, 4], [5, 6.0]]))
    assert rows["word"] == ["a", "b", "c"]
    assert manifest.classes == ["no", "yes"]


def test_anndata_keeps_its_matrix_its_columns_and_the_names_of_its_categories(tmp_path):
    dense = np.random.default_rng(0).integers(0, 3, (600, 40)).astype(np.float32)
    rows, columns = np.nonzero(dense)
    with h5py.File(tmp_path / "in.h5ad", "w") as file:
        matrix = file.create_group("X")
        matrix.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": dense.shape})
        matrix["data"], matrix["indices"] = dense[rows, columns], columns.astype(np.int32)
        matrix["indptr"] = np.searchsorted(rows, np.arange(601)).astype(np.int32)
        file["obs/kind/codes"] = (np.arange(600) % 2).astype(np.int8)
        file["obs/kind/categories"] = ["B cell", "T cell"]
    manifest = convert(tmp_path / "in.h5ad", tmp_path / "out.parquet", num_workers=0)
    found = read_all(tmp_path / "out.parquet")
    np.testing.assert_array_equal(found["X"], dense)
    assert found["obs/kind/codes"].tolist() == [0, 1] * 300
    assert manifest.classes == ["B cell", "T cell"]


def test_a_folder_of_several_data_sets_is_refused(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(ConfigError, match="convert each of its folders"):
        convert(tmp_path, tmp_path / "out.h5")


def test_sources_that_do_not_exist_or_hold_nothing(tmp_path):
    with pytest.raises(FileAccessError, match="no such file"):
        convert(tmp_path / "missing.h5", tmp_path / "out.h5")
    with pytest.raises(FileAccessError, match="no such file"):
        convert(str(tmp_path / "*.h5"), tmp_path / "out.h5")
    (tmp_path / "empty.csv").write_text("a,b\n")
    with pytest.raises(FormatError, match="no rows"):
        convert(tmp_path / "empty.csv", tmp_path / "out.h5")
    with pytest.raises(ConfigError, match="source is a int"):
        convert(5, tmp_path / "out.h5")


def test_files_that_a_pattern_names_follow_one_another(tmp_path):
    for number in (10, 9, 1):
        np.savez(tmp_path / f"{number}.npz", x=np.full(2, number))
    convert(str(tmp_path / "*.npz"), tmp_path / "out.h5", num_workers=0)
    assert read_all(tmp_path / "out.h5")["x"].tolist() == [1, 1, 9, 9, 10, 10]
