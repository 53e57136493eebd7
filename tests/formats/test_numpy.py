"""The NumPy format: conformance, and what is its own."""

from __future__ import annotations

import errno
import io
import logging
import os
import pickle
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch

from lightning_fastio import open_reader, open_writer
from lightning_fastio.errors import (
    ConfigError,
    CorruptFileError,
    FastIOError,
    FileAccessError,
    FormatError,
    SchemaError,
)
from lightning_fastio.formats.numpy.writer import _crc_before_zeros
from tests.formats.conformance import ReaderConformance, assert_rows, example, numbers


class TestFolder(ReaderConformance):
    target = "data"
    dtypes = (*ReaderConformance.dtypes, "complex128")
    shapes = (*ReaderConformance.shapes, (0,))


class TestArchive(ReaderConformance):
    target = "data.npz"
    dtypes = (*ReaderConformance.dtypes, "complex128")
    shapes = (*ReaderConformance.shapes, (0,))


# Single files


def test_a_file_is_a_field_named_after_it(tmp_path):
    x = numbers("float32", (9, 4))
    with open_writer(tmp_path / "images.npy") as writer:
        writer.write({"whatever": x[:5]})
        writer.write({"whatever": x[5:]})
    np.testing.assert_array_equal(np.load(tmp_path / "images.npy"), x)
    assert_rows(open_reader(tmp_path / "images.npy").read([8, 0]), {"images": x}, [8, 0])


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_header_versions(tmp_path, version):
    x = numbers("int16", (5, 3))
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, x, version)
    assert_rows(open_reader(tmp_path / "x.npy").read([4, 1]), {"x": x}, [4, 1])


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 4), (6,), (6, 1), (1, 6)])
@pytest.mark.parametrize("dtype", ["float32", ">i4", "bool", "uint16"])
def test_fortran_order(tmp_path, shape, dtype):
    x = numbers(np.dtype(dtype).newbyteorder("=").name, shape).astype(dtype)
    np.save(tmp_path / "x.npy", np.asfortranarray(x))
    rows = [0, -1] if shape[0] == 1 else [5, 0, 3, 3]
    batch = open_reader(tmp_path / "x.npy").read(rows)["x"]
    np.testing.assert_array_equal(batch.numpy(), x[rows])
    assert batch.is_contiguous()


def test_a_single_file_has_no_room_for_much(tmp_path):
    with pytest.raises(ConfigError, match="metadata"):
        open_writer(tmp_path / "x.npy", metadata={"a": "b"})
    for batch in ({"x": np.zeros(3), "y": np.zeros(3)}, {"x": ["a", "b"]}):
        writer = open_writer(tmp_path / "x.npy")
        with pytest.raises(SchemaError, match="one field"):
            writer.write(batch)
        writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_several_arrays_in_one_file_are_not_passed_over(tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        np.save(file, np.zeros(3))
        np.save(file, np.ones(3))
    with pytest.raises(CorruptFileError, match="several arrays"):
        open_reader(tmp_path / "x.npy")


def test_bfloat16_is_refused_with_a_remedy(tmp_path):
    writer = open_writer(tmp_path / "x.npy")
    with pytest.raises(SchemaError, match=r"half\(\)"):
        writer.write({"x": torch.zeros(3, dtype=torch.bfloat16)})
    writer.abort()


# Folders, shards, lists


def test_each_name_of_a_folder_is_a_field(tmp_path, caplog):
    columns = example(8)
    for name, values in columns.items():
        np.save(tmp_path / f"{name}.npy", values)
    (tmp_path / "README.md").write_text("about")
    (tmp_path / ".hidden.npy").write_bytes(b"")
    (tmp_path / "_old.npy").write_bytes(b"")
    np.save(tmp_path / "classes.npy", np.array(["a", "b"]))
    with caplog.at_level(logging.WARNING):
        reader = open_reader(tmp_path)
    assert sorted(reader.schema) == sorted(columns)
    assert [record.getMessage() for record in caplog.records if "'classes' (2 rows" in record.getMessage()]
    assert len(caplog.records) == 1
    chosen = {name: columns[name] for name in ("image", "label")}
    assert_rows(open_reader(str(tmp_path / "[il]*.npy")).read([3]), chosen, [3])


@pytest.mark.parametrize("pattern", ["x-{}.npy", "x_{}.npy", "x.{:05d}.npy", "x-{:03d}-of-012.npy"])
def test_shards_join_in_natural_order(tmp_path, pattern):
    for index in range(12):
        np.save(tmp_path / pattern.format(index), np.arange(3) + 3 * index)
    for source in (tmp_path, str(tmp_path / "x*.npy"), [tmp_path / pattern.format(index) for index in range(12)]):
        reader = open_reader(source)
        assert list(reader.schema) == ["x"]
        assert reader.read(range(36))["x"].tolist() == list(range(36))


def test_shards_of_several_fields(tmp_path):
    for index in range(3):
        np.save(tmp_path / f"x-{index}.npy", numbers("float32", (4 + index, 2), index))
        np.save(tmp_path / f"y-{index}.npy", np.arange(4 + index) + 10 * index)
    reader = open_reader(tmp_path)
    expected = {
        "x": np.concatenate([numbers("float32", (4 + index, 2), index) for index in range(3)]),
        "y": np.concatenate([np.arange(4 + index) + 10 * index for index in range(3)]),
    }
    assert_rows(reader.read([14, 0, 4, 5, -2]), expected, [14, 0, 4, 5, -2])
    os.remove(tmp_path / "y-1.npy")
    with pytest.raises(SchemaError, match=r"(?s)'x' has 15 rows, but 'y' has 10"):
        open_reader(tmp_path, ["x", "y"])


def test_numbers_at_the_end_of_names(tmp_path):
    for name in ("x1", "x2", "year-2020"):
        np.save(tmp_path / f"{name}.npy", np.arange(3))
    assert list(open_reader(tmp_path).schema) == ["x1", "x2", "year-2020"]
    (tmp_path / "only").mkdir()
    np.save(tmp_path / "only" / "x-000.npy", np.arange(3))
    assert list(open_reader(tmp_path / "only").schema) == ["x"]
    assert list(open_reader(tmp_path / "only" / "x-000.npy").schema) == ["x"]
    (tmp_path / "frames").mkdir()
    for index in (10, 9):
        np.save(tmp_path / "frames" / f"{index}.npy", np.full(2, index))
    assert open_reader(tmp_path / "frames").read(range(4))["frames"].tolist() == [9, 9, 10, 10]


def test_a_list_of_different_names_must_say_what_it_means(tmp_path):
    for name in ("images", "labels"):
        np.save(tmp_path / f"{name}.npy", np.arange(3))
    paths = [tmp_path / "images.npy", tmp_path / "labels.npy"]
    with pytest.raises(ConfigError, match=r"(?s)'images' and 'labels'.*side by side"):
        open_reader(paths)
    assert open_reader({"x": paths}).read([0, 5])["x"].tolist() == [0, 2]
    assert list(open_reader({"x": paths[0], "y": str(paths[1])}).schema) == ["x", "y"]


def test_shards_that_differ_name_both_files_and_the_field(tmp_path):
    np.save(tmp_path / "x-0.npy", np.zeros((3, 4)))
    np.save(tmp_path / "x-1.npy", np.zeros((3, 5)))
    with pytest.raises(SchemaError, match=r"(?s)'x' is float64\[4\].*x-0\.npy.*float64\[5\].*x-1\.npy"):
        open_reader(tmp_path)


def test_a_mapping_takes_what_it_names(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(5), y=np.arange(5) * 2, z=np.arange(3))
    np.savez(tmp_path / "one.npz", values=np.arange(5) * 3)
    np.save(tmp_path / "b.npy", np.arange(5) * 4)
    source = {"y": tmp_path / "a.npz", "v": str(tmp_path / "one.npz"), "w": [tmp_path / "b.npy"]}
    reader = open_reader(source)
    assert {name: values.tolist() for name, values in reader.read([4]).items()} == {"y": [8], "v": [12], "w": [16]}
    assert list(open_reader(source, ["w"]).schema) == ["w"]
    assert open_reader(source, {"both": ["y", "w"], "y": "y"}).read([1])["both"].tolist() == [[2, 4]]
    with pytest.raises(SchemaError, match="'q'"):
        open_reader({"q": tmp_path / "a.npz"})
    with pytest.raises(SchemaError, match="'ww'"):
        open_reader(source, ["ww"])
    with pytest.raises(ConfigError, match="mapping inside a mapping"):
        open_reader({"a": {"b": tmp_path / "b.npy"}})


def test_one_field_under_two_names(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(5))
    batch = open_reader(tmp_path / "x.npy", {"input": "x", "target": "x"}).read([3, 1])
    batch["input"] += 1
    assert (batch["input"].tolist(), batch["target"].tolist()) == ([4, 2], [3, 1])


# Archives


def test_archive_members_are_mapped_where_they_lie(tmp_path):
    """Also where the local header is longer than the central one says, as Zip64 writers make it."""
    x, y = numbers("float32", (50, 7)), numbers("int64", (50,), 1)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    reader = open_reader(tmp_path / "a.npz")
    assert_rows(reader.read([49, 0, 7]), {"x": x, "y": y}, [49, 0, 7])
    assert {layout.read_path for layout in reader.layout()} == {"memory map"}


def test_archives_of_several_files(tmp_path):
    for index in range(12):
        columns = {"x": np.arange(4) + 4 * index, "name": np.array([f"{index}"] * 4)}
        np.savez(tmp_path / f"part-{index}.npz", **columns)
    for source in (tmp_path, str(tmp_path / "*.npz")):
        reader = open_reader(source)
        batch = reader.read([47, 0, 13])
        assert (batch["x"].tolist(), batch["name"]) == ([47, 0, 13], ["11", "0", "3"])
    assert list(open_reader(tmp_path, ["name"]).read([5])) == ["name"]


def test_archives_and_arrays_are_not_mixed_by_guess(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    np.savez(tmp_path / "y.npz", y=np.zeros(3))
    with pytest.raises(ConfigError, match="two kinds"):
        open_reader(tmp_path)


def test_archives_with_other_compressions(tmp_path):
    x = numbers("int32", (40, 3))
    stream = io.BytesIO()
    np.save(stream, x)
    for method in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA, zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED):
        with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
            archive.writestr("x.npy", stream.getvalue())
            archive.writestr("readme.txt", "about")
        assert_rows(open_reader(tmp_path / "a.npz").read([39, 2]), {"x": x}, [39, 2])


def test_other_zip_files_are_named(tmp_path):
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.npz")
    with pytest.raises(FormatError, match=r"torch\.save"):
        open_reader(tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("a.csv", "1,2")
    with pytest.raises(FormatError, match=r"without \.npy members"):
        open_reader(tmp_path / "b.npz")


def test_damaged_members_are_noticed_by_their_checksum(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(5000))
    np.savez_compressed(tmp_path / "b.npz", x=np.random.default_rng(0).random(5000))
    for name in ("a.npz", "b.npz"):
        data = bytearray((tmp_path / name).read_bytes())
        data[20_000] ^= 1
        (tmp_path / name).write_bytes(data)
        with pytest.raises(CorruptFileError, match=name):
            open_reader(tmp_path / name).read([0])


# Windows


@pytest.mark.parametrize("shape", [(50,), (50, 3)])
@pytest.mark.parametrize(("window", "stride"), [(8, None), (8, 1), (8, 8), (5, 7), (50, 3), (9, 8)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_windows(tmp_path, shape, window, stride, order):
    x = numbers("int32", shape)
    np.save(tmp_path / "x.npy", np.asarray(x, order=order))
    reader = open_reader(tmp_path / "x.npy", window=window, stride=stride)
    step = stride or window
    expected = np.stack([x[start : start + window] for start in range(0, 50 - window + 1, step)])
    rows = [len(expected) - 1, 0, -1, len(expected) // 2]
    assert len(reader) == len(expected)
    assert_rows(reader.read(rows), {"x": expected}, rows)


def test_windows_never_reach_from_one_file_into_the_next(tmp_path):
    for index, length in enumerate([10, 3, 11]):  # The second is shorter than a window.
        np.save(tmp_path / f"t-{index}.npy", np.arange(length) + 100 * index)
    reader = open_reader(tmp_path, window=5, stride=2)
    values = reader.read(range(len(reader)))["t"]
    assert values[:, 0].tolist() == [0, 2, 4, 200, 202, 204, 206]
    assert (values.diff(dim=1) == 1).all()


def test_windows_of_several_fields(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(20.0).reshape(20, 1), y=np.arange(20))
    batch = open_reader(tmp_path / "a.npz", window=4, stride=3).read([5, 0])
    assert batch["y"].tolist() == [[15, 16, 17, 18], [0, 1, 2, 3]]
    assert batch["x"].shape == (2, 4, 1)


@pytest.mark.parametrize(
    "options", [{"window": 0}, {"window": 3, "stride": 0}, {"stride": 2}, {"window": -1}, {"ragged": "maybe"}], ids=str
)
def test_options_that_make_no_sense(tmp_path, options):
    np.save(tmp_path / "x.npy", np.arange(10))
    with pytest.raises(ConfigError, match="|".join(options)):
        open_reader(tmp_path / "x.npy", **options)


def test_window_longer_than_the_data(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(10))
    with pytest.raises(SchemaError, match="window"):
        open_reader(tmp_path / "x.npy", window=11)


def test_text_has_no_windows(tmp_path, caplog):
    np.savez(tmp_path / "a.npz", x=np.arange(10), name=np.array(["a"] * 10))
    with caplog.at_level(logging.WARNING):
        assert list(open_reader(tmp_path / "a.npz", window=5).schema) == ["x"]
    assert "no windows" in caplog.text
    with pytest.raises(FormatError, match="no windows"):
        open_reader(tmp_path / "a.npz", ["name"], window=5)


# Sparse matrices


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "int64", "float64"])
def test_sparse_matrices(tmp_path, compressed, dtype):
    matrix = scipy.sparse.random(30, 12, 0.2, "csr", random_state=0)
    matrix.data = np.arange(1, matrix.nnz + 1).astype(dtype)
    scipy.sparse.save_npz(tmp_path / "counts.npz", matrix.astype(dtype), compressed=compressed)
    dense, rows = matrix.toarray().astype(dtype), [29, 0, 5, 5, -1]
    reader = open_reader(tmp_path / "counts.npz")
    assert_rows(reader.read(rows), {"counts": dense}, rows)
    sparse = open_reader(tmp_path / "counts.npz", sparse=True)
    assert sparse.schema["counts"].kind == "sparse"
    for each in (sparse, pickle.loads(pickle.dumps(sparse))):
        batch = each.read(rows)["counts"]
        assert batch.layout == torch.sparse_csr
        np.testing.assert_array_equal(batch.to_dense().numpy(), dense[rows])
        assert each.read([])["counts"].shape == (0, 12)


def test_sparse_matrices_of_several_files(tmp_path):
    parts = [scipy.sparse.random(size, 6, 0.4, "csr", random_state=size) for size in (5, 7)]
    for index, part in enumerate(parts):
        scipy.sparse.save_npz(tmp_path / f"part-{index}.npz", part)
    paths = [tmp_path / "part-0.npz", tmp_path / "part-1.npz"]
    dense, rows = np.concatenate([part.toarray() for part in parts]), [11, 0, 5, 4, 4]
    batch = open_reader({"x": paths}, sparse=True).read(rows)["x"]
    np.testing.assert_array_equal(batch.to_dense().numpy(), dense[rows])
    assert_rows(open_reader({"x": paths}).read(rows), {"x": dense}, rows)
    assert_rows(open_reader(tmp_path).read(rows), {"part": dense}, rows)


def test_sparse_matrices_in_other_orders_are_named(tmp_path):
    scipy.sparse.save_npz(tmp_path / "a.npz", scipy.sparse.random(5, 5, 0.5, "csc"))
    with pytest.raises(FormatError, match=r"(?s)csc.*tocsr\(\)"):
        open_reader(tmp_path / "a.npz")


@pytest.mark.parametrize("damage", ["columns", "starts", "short"])
def test_damaged_sparse_matrices(tmp_path, damage):
    parts = {
        "format": np.array(b"csr"),
        "shape": np.array([3, 4]),
        "data": np.ones(3),
        "indices": np.array([0, 9 if damage == "columns" else 1, 2]),
        "indptr": np.array([0, 5 if damage == "starts" else 1, 2, 3])[: 3 if damage == "short" else 4],
    }
    np.savez(tmp_path / "a.npz", **parts)
    with pytest.raises(CorruptFileError, match=r"a\.npz"):
        open_reader(tmp_path / "a.npz").read([0, 1, 2])


# Rows of varying length


def test_offsets_of_others_are_read(tmp_path):
    np.savez(tmp_path / "a.npz", **{"words": np.arange(6), "words.offsets": np.array([0, 2, 2, 6], np.int32)})
    reader = open_reader(tmp_path / "a.npz")
    assert [row.tolist() for row in reader.read([2, 1, 0])["words"]] == [[2, 3, 4, 5], [], [0, 1]]


@pytest.mark.parametrize("offsets", [[0, 2, 1, 6], [0, 2, 7], [1, 6], [0, 3], [], [0.0, 6.0]], ids=str)
def test_wrong_offsets(tmp_path, offsets):
    np.savez(tmp_path / "a.npz", **{"words": np.arange(6), "words.offsets": np.array(offsets)})
    with pytest.raises(CorruptFileError, match=r"words\.offsets"):
        open_reader(tmp_path / "a.npz")


def test_names_that_cannot_be_files(tmp_path):
    for name in ("a/b", "x.offsets", ".x"):
        writer = open_writer(tmp_path / "data")
        with pytest.raises(SchemaError, match="rename"):
            writer.write({name: np.zeros(3)})
        writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_folder_replaces_folder_but_not_a_file(tmp_path):
    (tmp_path / "data").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        open_writer(tmp_path / "data")
    assert (tmp_path / "data").read_text() == "mine"


def test_files_that_numpy_reads(tmp_path: Path):
    """Everything that is written can be read without this package."""
    columns = {
        "x": numbers("float32", (9, 4)),
        "rows": [np.arange(i) for i in range(9)],
        "text": ["é" * i for i in range(9)],
    }
    with open_writer(tmp_path / "a.npz") as writer:
        writer.write(columns)
    loaded = np.load(tmp_path / "a.npz")
    np.testing.assert_array_equal(loaded["x"], columns["x"])
    pieces = np.split(loaded["rows"], loaded["rows.offsets"][1:-1])
    assert [piece.tolist() for piece in pieces] == [row.tolist() for row in columns["rows"]]
    start, stop = loaded["text.offsets"][3:5]
    assert loaded["text"][start:stop].tobytes().decode() == "ééé"


def test_unsigned_rows_above_int64_name_the_row(tmp_path):
    np.save(tmp_path / "x.npy", np.array([0, 1, 2**63], np.uint64))
    with pytest.raises(FastIOError, match=r"x\.npy, row 2: 9223372036854775808.*widen_unsigned=False"):
        open_reader(tmp_path / "x.npy").read([0, 2])


def test_every_kind_of_field_can_be_announced_described_and_closed(tmp_path):
    with open_writer(tmp_path / "a.npz") as writer:
        writer.write({"rows": [np.arange(2), np.arange(3)], "text": ["a", "bc"]})
    np.savez(tmp_path / "b.npz", name=np.array(["x", "y"]))
    scipy.sparse.save_npz(tmp_path / "c.npz", scipy.sparse.eye(2, format="csr"))
    for name, expected in {"a": {"text": ["bc"]}, "b": {"name": ["y"]}, "c": {"c": [[0, 1]]}}.items():
        reader = open_reader(tmp_path / f"{name}.npz")
        reader.will_need([1])
        reader.close()
        batch = reader.read([1])
        for field, values in expected.items():
            found = batch[field]
            assert (found.tolist() if isinstance(found, torch.Tensor) else found) == values
        assert [layout.name for layout in reader.layout()] == list(reader.schema)
        reader.close()
    assert repr(open_reader(tmp_path / "b.npz")) == "NumpyReader(2 rows, Schema(name: string))"


def test_sparse_matrices_have_no_windows(tmp_path):
    scipy.sparse.save_npz(tmp_path / "a.npz", scipy.sparse.eye(4, format="csr"))
    with pytest.raises(FormatError, match="no windows"):
        open_reader(tmp_path / "a.npz", window=2)


def test_text_that_is_not_unicode(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([b"fine", b"\xff\xfe"]))
    reader = open_reader(tmp_path / "a.npz")
    assert reader.read([0])["x"] == ["fine"]
    with pytest.raises(FormatError, match=r"a\.npz: field 'x' holds text that is not Unicode"):
        reader.read([0, 1])
    np.savez(tmp_path / "b.npz", **{"x": np.array([65, 255], np.uint8), "x.offsets": np.array([0, 1, 2])})
    with zipfile.ZipFile(tmp_path / "b.npz", "a") as archive:
        archive.writestr("metadata.json", '{"fastio": {"fields": {"x": "string"}, "metadata": {}}}')
    reader = open_reader(tmp_path / "b.npz")
    assert reader.read([0])["x"] == ["A"]
    with pytest.raises(CorruptFileError, match="not UTF-8"):
        reader.read([1])


@pytest.mark.parametrize("text", [b"", b"[1]", b'{"fastio": 3}', b"\xff", b'{"classes": ["a"]}'])
def test_notes_of_somebody_else_do_no_harm(tmp_path, text):
    np.save(tmp_path / "x.npy", np.arange(3))
    np.save(tmp_path / "y.npy", np.arange(3))
    (tmp_path / "metadata.json").write_bytes(text)
    reader = open_reader(tmp_path)
    assert list(reader.schema) == ["x", "y"]
    assert reader.metadata == {}


def test_what_a_writer_refuses(tmp_path):
    writer = open_writer(tmp_path / "data")
    for values in (np.float32(3), np.zeros(2, "datetime64[s]"), np.array([None]), [np.zeros(2), np.zeros(3, int)]):
        with pytest.raises(SchemaError, match="'x'"):
            writer.write({"x": values})
    writer.write({"x": np.array(["a", "é"]), "y": np.array([b"a", b"b"])})
    writer.write({"x": [], "y": []})
    writer.close()
    writer.close()
    with pytest.raises(SchemaError, match="closed"):
        writer.write({"x": ["a"], "y": ["b"]})
    assert open_reader(tmp_path / "data").read([1, 0]) == {"x": ["é", "a"], "y": ["b", "a"]}


def test_writer_makes_folders_and_says_where_it_cannot(tmp_path):
    with open_writer(tmp_path / "new" / "folder" / "x.npy") as writer:
        writer.write({"x": np.arange(3, dtype=">i4")})
        writer.write({"x": np.arange(3, dtype="<i4")})
    assert np.load(tmp_path / "new" / "folder" / "x.npy").tolist() == [0, 1, 2, 0, 1, 2]
    (tmp_path / "file").write_text("")
    writer = open_writer(tmp_path / "file" / "x.npz")
    with pytest.raises(FileAccessError, match=r"file/x\.npz cannot be written"):
        writer.write({"x": np.arange(3)})
    writer.abort()


def test_a_folder_with_one_field_keeps_its_notes(tmp_path):
    with open_writer(tmp_path / "data", metadata={"classes": "[]"}) as writer:
        writer.write({"x": np.arange(3)})
    assert open_reader(tmp_path / "data").metadata == {"classes": "[]"}
    with open_writer(tmp_path / "text") as writer:
        writer.write({"x": ["a", "bc"]})
    assert open_reader(tmp_path / "text").read([1])["x"] == ["bc"]


def test_files_of_other_fields_are_not_looked_into(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(3))
    (tmp_path / "y.npy").write_bytes(b"\x93NUMPY damaged")
    assert open_reader(tmp_path, ["x"]).read([2])["x"].tolist() == [2]
    with pytest.raises(CorruptFileError, match=r"y\.npy"):
        open_reader(tmp_path)
    with pytest.raises(SchemaError, match=r"no field 'z'; it has 'x', 'y'"):
        open_reader(tmp_path, ["z"])


def test_no_room_for_a_temporary_file(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(100_000))
    reader = open_reader(tmp_path / "a.npz", cache_bytes=1000)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    with pytest.raises(FileAccessError, match=r"a\.npz: there is no room.*TMPDIR"):
        reader.read([0])


def test_a_folder_of_others_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("precious")
    with pytest.raises(ConfigError, match="holds files that no writer of this package made"):
        open_writer(tmp_path / "thesis")
    assert (tmp_path / "thesis/chapter.tex").read_text() == "precious"


@pytest.mark.parametrize("name", ["x-0", "x_01", "_hidden", ".x", ""])
def test_names_that_a_folder_would_read_otherwise_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SchemaError, match="cannot be the name"), open_writer(tmp_path / "data") as writer:
        writer.write({name: np.arange(3)})


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 4096, 1_000_003])
def test_checksum_of_a_beginning_that_changes(num_bytes: int) -> None:
    before, after, rest = b"first", b"other", np.random.default_rng(0).bytes(num_bytes)
    change = zlib.crc32(before) ^ zlib.crc32(after)
    assert zlib.crc32(before + rest) ^ _crc_before_zeros(change, num_bytes) == zlib.crc32(after + rest)


def test_an_npz_is_whole_to_every_tool_whichever_array_grew_in_it(tmp_path: Path) -> None:
    pixels, labels = np.random.default_rng(0).integers(0, 255, (300, 1000), np.uint8), np.arange(300)
    with open_writer(tmp_path / "a.npz", metadata={"classes": "[]"}) as writer:
        for start in range(0, 300, 70):
            rows = slice(start, start + 70)
            writer.write(
                {"label": labels[rows], "image": pixels[rows], "name": [f"n{label}" for label in labels[rows]]}
            )
            partial = next(path for path in tmp_path.iterdir() if path.is_dir())
            assert sorted(path.name for path in partial.iterdir()) == [
                *("a.npz", "label.npy", "name.npy", "name.offsets.npy")
            ]
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        assert archive.testzip() is None
        assert archive.namelist()[0] == "image.npy"
    with np.load(tmp_path / "a.npz") as loaded:
        np.testing.assert_array_equal(loaded["image"], pixels)
        np.testing.assert_array_equal(loaded["label"], labels)
    assert list(open_reader(tmp_path / "a.npz").schema) == ["label", "image", "name"]
