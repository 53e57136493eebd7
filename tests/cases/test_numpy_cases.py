"""Failure cases of people who train from NumPy files, each with its right value."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_fastio import NumpyDataModule, open_reader, open_writer
from lightning_fastio.errors import CorruptFileError, FormatError, SchemaError
from lightning_fastio.formats.numpy import stored


def test_n3_compressed_archives_are_decoded_once(tmp_path, caplog, monkeypatch):
    array = np.random.default_rng(0).integers(0, 9, (5000, 1000)).astype(np.float32)  # 20 MB
    np.savez_compressed(tmp_path / "a.npz", x=array)
    decoded = []
    decode = stored.DecodedMember._decode
    monkeypatch.setattr(stored.DecodedMember, "_decode", lambda self: decoded.append(1) or decode(self))
    with caplog.at_level(logging.WARNING):
        reader = open_reader(tmp_path / "a.npz")
    assert "compressed" in caplog.text
    assert "20 MB" in caplog.text
    assert decoded == []  # Opening reads headers only.
    with ThreadPoolExecutor(8) as threads:  # Also where many threads ask for the first row at once.
        assert all(batch["x"].shape == (1, 1000) for batch in threads.map(reader.read, [[0]] * 8))
    for row in np.random.default_rng(1).integers(0, 5000, 300):
        np.testing.assert_array_equal(reader.read([row])["x"][0].numpy(), array[row])
    assert decoded == [1]


def test_n3_large_compressed_archives_go_to_a_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    array = np.random.default_rng(0).integers(0, 9, (500, 1000))
    np.savez_compressed(tmp_path / "a.npz", x=array, y=np.arange(500))
    reader = open_reader(tmp_path / "a.npz", cache_bytes=1 << 20)
    batch = reader.read([499, 3])
    np.testing.assert_array_equal(batch["x"].numpy(), array[[499, 3]])
    assert batch["y"].tolist() == [499, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]  # Nothing is left, even of a killed process.


def test_n4_private_memory_stays_flat(tmp_path):
    """Mapped pages are shared with the page cache; anonymous memory is what a process takes for itself."""
    np.save(tmp_path / "x.npy", np.zeros((25_000, 1000), np.float32))  # 100 MB
    script = f"""
import numpy as np
from lightning_fastio import open_reader

def anonymous_kb():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous"))

reader = open_reader({str(tmp_path / "x.npy")!r})
reader.read(range(250))
before = anonymous_kb()
for start in range(0, 25_000, 250):
    reader.read(np.arange(start, start + 250))
print(anonymous_kb() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert int(done.stdout) < 30_000


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("kind", ["npy", "npz", "compressed"])
def test_n6_objects_are_never_unpickled(tmp_path, kind):
    marker, path = tmp_path / "marker", tmp_path / f"a.{kind.replace('compressed', 'npz')}"
    array = np.array([Trap(marker)] * 3, object)
    save = {"npy": np.save, "npz": np.savez, "compressed": np.savez_compressed}[kind]
    save(path, array, allow_pickle=True)
    with pytest.raises(FormatError, match=r"(?s)could run code.*never loaded"):
        open_reader(path)
    path.write_bytes(pickle.dumps({"x": Trap(marker)}))
    with pytest.raises((FormatError, CorruptFileError), match=r"(?s)pickle"):
        open_reader(path)
    assert not marker.exists()


def test_n6_objects_beside_numbers_are_left_out_by_name(tmp_path, caplog):
    marker = tmp_path / "marker"
    np.savez(tmp_path / "a.npz", allow_pickle=True, x=np.arange(6.0).reshape(3, 2), meta=np.array([Trap(marker)] * 3))
    with caplog.at_level(logging.WARNING):
        reader = open_reader(tmp_path / "a.npz")
    assert list(reader.schema) == ["x"]
    assert "'meta'" in caplog.text
    assert "fields=['x']" in caplog.text
    with pytest.raises(FormatError, match="'meta'"):
        open_reader(tmp_path / "a.npz", ["x", "meta"])
    assert not marker.exists()


def test_n7_fortran_order(tmp_path, caplog):
    array = np.random.default_rng(0).standard_normal((1000, 64)).astype(np.float32)
    np.save(tmp_path / "x.npy", np.asfortranarray(array))
    with caplog.at_level(logging.WARNING):
        reader = open_reader(tmp_path / "x.npy")
    assert caplog.text.count("Fortran") == 1
    batch = reader.read([999, 0, 5, 5])["x"]
    np.testing.assert_array_equal(batch.numpy(), array[[999, 0, 5, 5]])
    assert batch.is_contiguous()


def test_n8_empty_shards_and_single_values(tmp_path, caplog):
    for index, num_rows in enumerate([0, 5, 0]):
        np.save(tmp_path / f"x-{index}.npy", np.ones((num_rows, 3)) * index)
    with caplog.at_level(logging.WARNING):
        reader = open_reader(tmp_path)
    assert len(reader) == 5
    assert (reader.read(range(5))["x"] == 1).all()
    assert "x-0.npy" in caplog.text
    assert "x-2.npy" in caplog.text

    np.save(tmp_path / "value.npy", np.float32(3))
    with pytest.raises(FormatError, match=r"(?s)value.*single value"):
        open_reader(tmp_path / "value.npy")
    np.save(tmp_path / "none.npy", np.ones((0, 3)))
    with pytest.raises(SchemaError, match=r"none\.npy.*no row"):
        open_reader(tmp_path / "none.npy")


def test_n9_incomplete_file(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((100, 100)))
    os.truncate(tmp_path / "x.npy", 5000)
    with pytest.raises(CorruptFileError, match=r"x\.npy is incomplete.*80000 bytes, but 4872"):
        open_reader(tmp_path / "x.npy")
    module = NumpyDataModule(str(tmp_path / "x.npy"))
    with pytest.raises(CorruptFileError, match="incomplete"):
        module.setup("fit")


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    np.savez(
        tmp_path / "mixed.npz",
        x=np.arange(8, dtype=np.float32).reshape(4, 2),
        t=np.array(["2024-01-01", "2024-01-02", "NaT", "2024-01-04"], "datetime64[ns]"),
        name=np.array(["a", "bé", "", "ninechars"], "U8"),
        tag=np.array([b"a", "é".encode(), b"", b"xyz"], "S4"),
        rec=np.zeros(4, [("a", "f4"), ("b", "i8")]),
        wide=np.zeros(4, np.longdouble),
    )
    return tmp_path / "mixed.npz"


def test_n10_types_that_torch_has_not(mixed, caplog):
    assert open_reader(mixed, ["x"]).read([3])["x"].tolist() == [[6, 7]]
    for name, remedy in {"t": "astype('int64')", "rec": "array['a']", "wide": "astype('float64')"}.items():
        with pytest.raises(FormatError) as caught:
            open_reader(mixed, ["x", name])
        assert f"{name!r}" in str(caught.value)
        assert str(np.load(mixed)[name].dtype) in str(caught.value)
        assert remedy in str(caught.value)
    with caplog.at_level(logging.WARNING):
        reader = open_reader(mixed)
    assert list(reader.schema) == ["x", "name", "tag"]
    assert len(caplog.records) == 1
    assert all(name in caplog.text for name in ("'t'", "'rec'", "'wide'", "fields=['x', 'name', 'tag']"))
    batch = reader.read([1, 3, 2])
    assert batch["name"] == ["bé", "ninechar", ""]
    assert batch["tag"] == ["é", "xyz", ""]


def test_n12_file_replaced_while_open(tmp_path):
    def write(value: float) -> None:
        with open_writer(tmp_path / "x.npy") as writer:
            writer.write({"x": np.full((1000, 100), value)})

    write(1.0)
    reader = open_reader(tmp_path / "x.npy")
    assert (reader.read([0])["x"] == 1).all()
    write(2.0)
    assert (reader.read(range(1000))["x"] == 1).all()
    for other in (pickle.loads(pickle.dumps(reader)), reader):
        other.close()
        with pytest.raises(CorruptFileError, match="changed"):
            other.read([0])


def test_n12_file_written_in_place_while_open(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((1000, 100)))
    os.utime(tmp_path / "x.npy", ns=(0, 0))
    reader = open_reader(tmp_path / "x.npy")
    assert (reader.read([0])["x"] == 1).all()
    np.save(tmp_path / "x.npy", np.ones((1000, 100)) * 2)
    with pytest.raises(CorruptFileError, match=r"x\.npy was changed while it was in use"):
        reader.read([0])


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
def test_n13_readers_travel_as_paths(tmp_path, name):
    array = np.random.default_rng(0).random((6250, 1000))  # 50 MB
    if name == "x.npy":
        np.save(tmp_path / name, array)
    else:
        np.savez_compressed(tmp_path / name, x=array[:500])
    reader = open_reader(tmp_path / name)
    reader.read(range(256))
    assert len(pickle.dumps(reader)) < 10_000


@pytest.mark.filterwarnings("error")
def test_n14_batches_are_writable(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12.0).reshape(6, 2))
    before = (tmp_path / "x.npy").read_bytes()
    os.chmod(tmp_path / "x.npy", 0o444)
    reader = open_reader(tmp_path / "x.npy")
    batch = reader.read([1, 1, 3])
    batch["x"] += 1
    array = batch["x"].numpy()
    array += 1
    assert array.tolist() == [[4, 5], [4, 5], [8, 9]]
    assert reader.read([1])["x"].tolist() == [[2, 3]]
    assert (tmp_path / "x.npy").read_bytes() == before


def test_n15_no_list_with_an_entry_for_each_row(tmp_path):
    for index in range(100):
        np.save(tmp_path / f"x-{index:04d}.npy", np.arange(2000) + 2000 * index)
    reader = open_reader(tmp_path)
    assert len(reader) == 200_000
    assert reader.read([199_999, 5])["x"].tolist() == [199_999, 5]
    assert len(pickle.dumps(reader)) < 100 * 2000
    assert _longest_list(reader) <= 100


def _longest_list(value: object, depth: int = 0) -> int:
    if depth > 8 or isinstance(value, str | bytes | np.ndarray | torch.Tensor):
        return 0
    items = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list | tuple) else []
    inner = items or list(getattr(value, "__dict__", {}).values())
    return max([len(items), *(_longest_list(item, depth + 1) for item in inner)])


def test_n16_batches_do_not_copy_the_file(tmp_path):
    """A take that copies its source would need 55 MB for each batch."""
    np.save(tmp_path / "x.npy", np.zeros((70_000, 784), np.uint8))
    reader = open_reader(tmp_path / "x.npy")
    rows = np.random.default_rng(0).integers(0, 70_000, 200)
    reader.read(rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        reader.read(rows)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 20 * 100


def test_d2_more_files_than_may_be_open(tmp_path):
    for index in range(100):
        np.save(tmp_path / f"x-{index:03d}.npy", np.full((10, 3), index))
    script = f"""
import resource
import numpy as np
from lightning_fastio import open_reader
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
reader = open_reader({str(tmp_path)!r})
print(len(reader), reader.read(np.arange(0, 1000, 10))["x"][:, 0].tolist() == list(range(100)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.split() == ["1000", "True"], done.stderr


@pytest.mark.parametrize("name", ["x.npy", "x.npz"])
@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">c8", ">f2"])
def test_h15_big_endian(tmp_path, name, dtype):
    array = np.arange(24).reshape(6, 4).astype(dtype)
    if name == "x.npy":
        np.save(tmp_path / name, array)
    else:
        np.savez(tmp_path / name, x=array)
    batch = open_reader(tmp_path / name).read([5, 0])["x"]
    assert batch.tolist() == array[[5, 0]].tolist()
    expected = {">f4": torch.float32, ">i8": torch.int64, ">u2": torch.int32, ">c8": torch.complex64}
    assert batch.dtype == expected.get(dtype, torch.float16)


def test_billion_rows_open_at_once_in_little_memory(tmp_path):
    """A file with holes: 256 GB that take no room."""
    num_rows = 10**9
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (num_rows, 256)})
        start = file.tell()
        file.truncate(start + num_rows * 256)
        file.seek(start + 256 * (num_rows - 1))
        file.write(bytes(range(256)))
    script = f"""
import resource
from lightning_fastio import open_reader
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
reader = open_reader({str(tmp_path / "x.npy")!r})
batch = reader.read([0, 10**9 - 1, 5 * 10**8])["x"]
assert batch[1].tolist() == list(range(256)) and not batch[[0, 2]].any()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100_000  # kilobytes


def test_small_archive_that_inflates_to_much_opens_without_inflating(tmp_path):
    np.savez_compressed(tmp_path / "bomb.npz", x=np.zeros((30_000, 1000), np.uint8))
    assert (tmp_path / "bomb.npz").stat().st_size < 100_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    reader = open_reader(tmp_path / "bomb.npz")
    assert len(reader) == 30_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 3000  # Inflated it takes 7,300 pages.


def test_boolean_bytes_other_than_0_and_1(tmp_path):
    for shape in ((4,), (4, 1)):
        np.save(tmp_path / "mask.npy", np.zeros(shape, bool))
        with (tmp_path / "mask.npy").open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(bytes([0, 1, 2, 255]))
        mask = open_reader(tmp_path / "mask.npy").read([0, 1, 2, 3])["mask"]
        assert mask.flatten().tolist() == [False, True, True, True]
        assert mask.view(torch.uint8).flatten().tolist() == [0, 1, 1, 1]


def test_archive_of_several_data_sets_takes_the_largest(tmp_path, caplog):
    """As mnist.npz: training and test data in one archive."""
    np.savez(
        tmp_path / "mnist.npz",
        x_test=np.ones((10, 28, 28), np.uint8),
        x_train=np.zeros((60, 28, 28), np.uint8),
        y_train=np.arange(60, dtype=np.uint8),
        y_test=np.arange(10, dtype=np.uint8),
        classes=np.array(["zero", "one"]),
        scale=np.float64(255),
    )
    with caplog.at_level(logging.WARNING):
        reader = open_reader(tmp_path / "mnist.npz")
    assert list(reader.schema) == ["x_train", "y_train"]
    assert len(caplog.records) == 1
    for part in ("'x_test' (10 rows instead of 60)", "'scale'", "single value", "fields=['x_train', 'y_train']"):
        assert part in caplog.text
    assert len(open_reader(tmp_path / "mnist.npz", {"x": "x_test", "y": "y_test"})) == 10
    with pytest.raises(SchemaError, match=r"(?s)'x_train' has 60 rows, but 'y_test' has 10"):
        open_reader(tmp_path / "mnist.npz", ["x_train", "y_test"])
