"""Which files a source means, in which format, and which options it takes."""

from __future__ import annotations

import logging
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lightning_fastio import HDF5DataModule, NumpyDataModule, open_reader, open_writer
from lightning_fastio.errors import ConfigError, CorruptFileError, FileAccessError, FormatError
from lightning_fastio.formats.files import format_of, format_of_source, natural_order, resolve


@pytest.fixture
def folder(tmp_path):
    """One good file of each format, under a name that says nothing."""
    with (tmp_path / "one").open("wb") as file:
        np.save(file, np.arange(3))
    with (tmp_path / "two").open("wb") as file:
        np.savez(file, x=np.arange(3))
    with h5py.File(tmp_path / "three", "w") as file:
        file["x"] = np.arange(3)
    with h5py.File(tmp_path / "four", "w", userblock_size=2048) as file:
        file["x"] = np.arange(3)
    pq.write_table(pa.table({"x": [0, 1, 2]}), tmp_path / "five")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [("one", "numpy"), ("two", "numpy"), ("three", "hdf5"), ("four", "hdf5"), ("five", "parquet")],
)
@pytest.mark.parametrize("suffix", ["", ".nc", ".mat", ".h5", ".PARQUET", ".npy"])
def test_formats_are_told_by_contents(folder, name, expected, suffix):
    path = (folder / name).rename(folder / f"{name}{suffix}")
    assert format_of(path).name == expected
    reader = open_reader(path)
    assert next(iter(reader.read([2, 0]).values())).tolist() == [2, 0]
    reader.close()


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b"CDF\x01", "nccopy -k nc4"),
        (b"CDF\x05", "nccopy -k nc4"),
        (b"MATLAB 5.0 MAT-file", "-v7.3"),
        (b"ARROW1\0\0", "Parquet"),
        (b"\x80\x04\x95", "pickle"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"\x89PNG\r\n", "fastio convert"),
        (b"SIMPLE  =", "FITS"),
        (b"a,b,c\n1,2,3", "unknown format"),
    ],
)
def test_what_people_try_is_named_with_a_remedy(tmp_path, start, part):
    (tmp_path / "data.nc").write_bytes(start + bytes(1000))
    with pytest.raises(FormatError, match=r"data\.nc is") as caught:
        open_reader(tmp_path / "data.nc")
    assert part in str(caught.value)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".h5", ".parquet"])
def test_a_suffix_that_the_contents_do_not_show(tmp_path, suffix):
    path = tmp_path / f"data{suffix}"
    path.write_bytes(b"")
    with pytest.raises(CorruptFileError, match="empty"):
        open_reader(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CorruptFileError, match="version"):
        open_reader(path)


def test_natural_order():
    names = ["a10", "a9", "a-2-10", "a-2-9", "b1", "a", "10", "9"]
    assert sorted(names, key=natural_order) == ["9", "10", "a", "a9", "a10", "a-2-9", "a-2-10", "b1"]


def test_folders_are_searched_once_and_say_what_they_pass_over(tmp_path, caplog):
    for name in ("part-10.parquet", "part-9.parquet"):
        pq.write_table(pa.table({"x": [0]}), tmp_path / name)
    for name in (
        "_SUCCESS",
        ".part-1.parquet.crc",
        "schema.json",
        "part-3.parquet.tmp",
        "notes.csv",
        "part-4.parquet~",
    ):
        (tmp_path / name).write_bytes(b"1,2\n" if name.endswith((".csv", ".json")) else b"PAR1")
    with caplog.at_level(logging.WARNING):
        paths = resolve(tmp_path, "parquet")
    assert [path.name for path in paths] == ["part-9.parquet", "part-10.parquet"]
    assert len(caplog.records) == 1
    assert "passed over notes.csv, part-3.parquet.tmp, part-4.parquet~, which" in caplog.text


def test_empty_data_files_are_not_passed_over(tmp_path):
    np.save(tmp_path / "x-0.npy", np.arange(3))
    (tmp_path / "x-1.npy").write_bytes(b"")
    with pytest.raises(CorruptFileError, match=r"x-1\.npy"):
        open_reader(tmp_path)


def test_folder_with_several_formats_is_of_the_one_with_the_most_bytes(folder, caplog):
    np.save(folder / "big.npy", np.zeros(100_000))
    assert format_of_source(folder).name == "numpy"
    with caplog.at_level(logging.WARNING):
        assert [path.name for path in resolve(folder, "hdf5")] == ["four", "three"]
    assert "big.npy" in caplog.text


def test_folder_without_data_names_its_subfolders(tmp_path):
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.arange(3))
    with pytest.raises(FormatError, match=r"subfolders \(train, val\)"):
        open_reader(tmp_path)
    assert len(open_reader(tmp_path / "train")) == 3


def test_partition_folders_are_searched(tmp_path):
    for year in (10, 9):
        (tmp_path / f"year={year}").mkdir()
        pq.write_table(pa.table({"x": [year]}), tmp_path / f"year={year}" / "a.parquet")
    assert [path.parent.name for path in resolve(tmp_path, "parquet")] == ["year=9", "year=10"]


@pytest.mark.parametrize("source", ["nothing.npy", "nothing/*.npy", ["nothing.h5"]])
def test_missing_files(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileAccessError, match="nothing"):
        open_reader(source)


def test_a_list_must_not_be_empty():
    with pytest.raises(ConfigError, match="empty list"):
        open_reader([])
    with pytest.raises(ConfigError, match="empty mapping"):
        open_reader({})


def test_a_mapping_joins_formats(folder):
    """A file with one field gives it whatever its name; one with several gives that of the name."""
    with h5py.File(folder / "many.h5", "w") as file:
        file["x"], file["y"] = np.arange(3) * 10, np.arange(3) * 20
    reader = open_reader({"a": folder / "three", "b": folder / "five", "y": folder / "many.h5", "c": folder / "one"})
    batch = reader.read([2, 1])
    assert {name: values.tolist() for name, values in batch.items()} == {
        "a": [2, 1],
        "b": [2, 1],
        "y": [40, 20],
        "c": [2, 1],
    }
    with pytest.raises(ConfigError, match=r"no field 'z' but x, y.*fields=\{'z': 'x'\}"):
        open_reader({"z": folder / "many.h5"})
    reader.close()


def test_file_of_another_format_in_a_list_is_not_passed_over(folder):
    with pytest.raises(FormatError, match=r"three is HDF5, but NumPy was expected"):
        open_reader([folder / "two", folder / "three"])


def test_brackets_and_homes(tmp_path, monkeypatch):
    np.save(tmp_path / "x[1].npy", np.arange(3))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(open_reader(tmp_path / "x[1].npy")) == 3
    assert len(open_reader("~/x[1].npy")) == 3
    with open_writer("~/y.npy") as writer:
        writer.write({"y": np.arange(2)})
    assert (tmp_path / "y.npy").exists()


@pytest.mark.filterwarnings("error")
def test_names_that_are_not_utf8(tmp_path):
    name = b"caf\xe9.npy".decode("utf-8", "surrogateescape")
    np.save(tmp_path / name, np.arange(3))
    reader = open_reader(tmp_path / name)
    assert next(iter(reader.read([1]).values())).tolist() == [1]
    assert len(reader.fingerprint) == 24


def test_options_of_other_formats(folder):
    one, five = folder / "one", folder / "five"
    assert len(open_reader(one, locking=None, null_fill=None, sparse=False, window=None)) == 3
    assert len(open_reader(five, window=None, sparse=False, locking=None)) == 3
    with pytest.raises(ConfigError, match=r"window=4 is an option of NumPy and HDF5, but this is Parquet"):
        open_reader(five, window=4)
    with pytest.raises(ConfigError, match=r"null_fill=0 is an option of Parquet, but this is NumPy"):
        open_reader({"x": one}, null_fill=0)
    with pytest.raises(ConfigError, match=r"no option 'windw'; NumPy knows window, stride"):
        open_reader(one, windw=4)
    with pytest.raises(ConfigError, match=r"compression='gzip' is an option of"):
        open_writer(folder / "x.npz", compression="gzip")
    with pytest.raises(ConfigError, match=r"suffix \.csv"):
        open_writer(folder / "x.csv")


def test_fields_that_make_no_sense(folder):
    with pytest.raises(ConfigError, match=r"fields=\['x'\]"):
        open_reader(folder / "two", "x")
    with pytest.raises(ConfigError, match="twice"):
        open_reader(folder / "two", ["x", "x"])
    for empty in ([], {}, {"x": []}):
        with pytest.raises(ConfigError, match="no field"):
            open_reader(folder / "two", empty)


def test_a_data_module_reads_its_own_format(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(3))
    with open_writer(tmp_path / "x.parquet") as writer:
        writer.write({"y": np.arange(1000)})
    assert list(open_reader(tmp_path).schema) == ["y"]
    assert list(open_reader(tmp_path, format="numpy").schema) == ["x"]
    with pytest.raises(ConfigError, match=r"x.parquet holds Parquet, not NumPy: use the data module of that format"):
        open_reader(tmp_path / "x.parquet", format="numpy")
    with pytest.raises(ConfigError, match="holds Parquet and NumPy, not HDF5"):
        HDF5DataModule(train=tmp_path).setup("fit")
    module = NumpyDataModule(train=tmp_path)
    module.setup("fit")
    assert list(module.stages.reader("train").schema) == ["x"]
