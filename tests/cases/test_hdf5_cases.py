"""What went wrong for people who trained from HDF5 with other tools, and what is right."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading

import h5py
import numpy as np
import pytest
import torch

from lightning_fastio import BatchLoader
from lightning_fastio.errors import CorruptFileError, FileAccessError, FormatError, MissingDependencyError
from lightning_fastio.formats import open_reader, open_writer
from lightning_fastio.formats.hdf5 import library as hdf5_library
from lightning_fastio.formats.hdf5 import paths as hdf5_paths
from lightning_fastio.formats.hdf5.types import elements_of


@pytest.fixture
def make(tmp_path):
    """Write a file of datasets and filter arguments, and give its path."""

    def make(name="data.h5", filters=None, **datasets):
        with h5py.File(tmp_path / name, "w") as file:
            for field, data in datasets.items():
                file.create_dataset(field, data=data, **(filters or {}))
        return tmp_path / name

    return make


@pytest.fixture
def count_opens(monkeypatch):
    """Names of the files that the HDF5 library opens, with the process that opens them."""
    opened = []
    original = h5py.File

    class Counted(original):
        def __init__(self, name, *args, **kwargs):
            opened.append((str(name), os.getpid()))
            super().__init__(name, *args, **kwargs)

    monkeypatch.setattr(hdf5_library.h5py, "File", Counted)
    return opened


def test_h2_scattered_rows_read_no_chunk_twice(make, monkeypatch):
    data = np.arange(20_000.0)[:, None]
    path = make(filters={"chunks": (100, 1), "compression": "gzip"}, x=data)
    decoded = []
    original = hdf5_paths.BlockDataset.decode
    monkeypatch.setattr(
        hdf5_paths.BlockDataset, "decode", lambda self, block: decoded.append(block) or original(self, block)
    )
    reader = open_reader(path)
    rows = np.random.default_rng(0).integers(0, 20_000, 5_000)
    np.testing.assert_array_equal(reader.read(rows)["x"], data[rows])
    assert len(decoded) == len(set(decoded)) <= len(reader.blocks) - 1
    reader.close()


def test_h4_rows_never_written_are_told(tmp_path, caplog):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (10, 4), "f4", chunks=(1, 4))[:6] = 1
    assert open_reader(path).read(range(10))["x"][:, 0].tolist() == [1] * 6 + [0] * 4
    assert caplog.messages == [f"{path}: 4 of 10 chunks of 'x' were never written and read as the fill value"]
    with h5py.File(path, "w") as file:
        file.create_dataset("x", (10, 4), "f4", fillvalue=3)
    assert open_reader(path).read([9])["x"].tolist() == [[3.0] * 4]
    assert caplog.messages[1:] == [f"{path}: all values of 'x' were never written and read as the fill value"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_h5_each_process_opens_the_file_itself(make, method):
    x, y = np.arange(4000).reshape(1000, 4), [f"row {index}" for index in range(1000)]
    path = make(x=x, y=y, z=np.arange(1000))
    reader = open_reader(path)
    reader.read([0])
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        parts = pool.map(_read_part, [(reader, range(start, start + 100)) for start in range(0, 1000, 100)])
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), x)
    assert [text for part in parts for text in part[1]] == y
    for _, _, opened_by, pid in parts:
        assert set(opened_by) <= {pid}
    reader.close()


def _read_part(task):
    reader, rows = task
    batch = reader.read(rows)
    opened_by = [pid for pid, files in hdf5_library._opened.items() if files and pid == os.getpid()]
    return batch["x"].numpy(), batch["y"], opened_by, os.getpid()


def test_h7_fork_while_a_thread_is_reading(make):
    path = make(filters={"chunks": (10,), "compression": "lzf"}, x=np.arange(2000.0))
    reader = open_reader(path, cache_bytes=1)
    stop = threading.Event()

    def read_on():
        while not stop.is_set():
            reader.read(np.random.default_rng(0).integers(0, 2000, 50))

    thread = threading.Thread(target=read_on)
    thread.start()
    try:
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if reader.read([7, 1999])["x"].tolist() == [7.0, 1999.0] else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()
        reader.close()


def test_h8_a_file_is_opened_twice_at_most(make, count_opens):
    path = make(x=[f"{index}" for index in range(500)], y=np.arange(500))
    count_opens.clear()
    reader = open_reader(path)
    for row in range(500):
        assert reader.read([row])["x"] == [f"{row}"]
    assert len(count_opens) <= 2
    reader.close()


def test_h9_a_file_that_a_writer_has_locked(make):
    path = make(x=np.arange(3.0))
    code = "import h5py, sys; file = h5py.File(sys.argv[1], 'r+', locking=True); print('open', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(
            FileAccessError, match=r"data.h5: HDF5 cannot lock .* locking=False .*HDF5_USE_FILE_LOCKING"
        ):
            open_reader(path, locking=True)
        assert open_reader(path, locking=False).read([2])["x"].item() == 2.0
        writer.communicate("done\n")


def test_h10_truncated_and_foreign_files(make, tmp_path):
    path = make(x=np.zeros((100, 100)))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptFileError, match=r"data.h5: the file is incomplete: it has \d+ bytes"):
        open_reader(path)
    text = tmp_path / "text.h5"
    text.write_text("hello, this is no data\n" * 100)
    with pytest.raises((FormatError, CorruptFileError), match=r"text.h5 .*not HDF5"):
        open_reader(text)


def test_h11_a_missing_filter_is_named(make, monkeypatch):
    import hdf5plugin

    path = make(filters={"compression": hdf5plugin.Blosc()}, x=np.zeros(100))
    monkeypatch.setattr(hdf5_paths.h5py.h5z, "filter_avail", lambda number: number != 32001)
    with pytest.raises(
        MissingDependencyError, match=r"dataset '/x' .* filter 32001 \(blosc\).* pip install hdf5plugin"
    ):
        open_reader(path, ["x"])


def test_h13_text_is_str(make):
    path = make(v=["a", "bé", "c"], s=np.array([b"a", "bé".encode(), b"c"], "S4"))
    assert open_reader(path).read([0, 1, 2]) == {"s": ["a", "bé", "c"], "v": ["a", "bé", "c"]}


def test_h14_ragged_rows_do_not_leak(tmp_path):
    with open_writer(tmp_path / "x.h5") as writer:
        writer.write({"x": [np.array([1, 2], np.int32), np.array([3], np.int32), np.array([], np.int32)]})
    reader = open_reader(tmp_path / "x.h5")
    for _ in range(50):
        reader.read([0, 1, 2])
    before = _resident_bytes()
    for _ in range(2000):
        reader.read([0, 1, 2] * 10)
    assert _resident_bytes() - before < 20 << 20
    assert [row.tolist() for row in reader.read([0, 1, 2])["x"]] == [[1, 2], [3], []]
    assert all(row.dtype == torch.int32 for row in reader.read([0, 1, 2])["x"])
    reader.close()


def _resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_h15_big_endian(make):
    data = np.array([1, -2, 300])
    batch = open_reader(make(f=data.astype(">f4"), i=data.astype(">i8"))).read([2, 1])
    assert (batch["f"].dtype, batch["f"].tolist()) == (torch.float32, [300.0, -2.0])
    assert (batch["i"].dtype, batch["i"].tolist()) == (torch.int64, [300, -2])


def test_h16_booleans_and_enums(make, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["mask"] = np.array([True, False])
        file.create_dataset("lower", data=[0, 1], dtype=h5py.enum_dtype({"false": 0, "true": 1}, "i1"))
        file.create_dataset("animal", data=[2, 0], dtype=h5py.enum_dtype({"cat": 0, "dog": 1, "owl": 2}, "i1"))
        assert elements_of(file["lower"], ragged="auto", widen_unsigned=True)[""].spec.dtype == torch.bool
    reader = open_reader(tmp_path / "x.h5")
    batch = reader.read([0, 1])
    assert batch["mask"].dtype == batch["lower"].dtype == torch.bool
    assert (batch["mask"].tolist(), batch["lower"].tolist()) == ([True, False], [False, True])
    assert [reader.schema["animal"].categories[code] for code in batch["animal"].tolist()] == ["owl", "cat"]


def test_h17_chunks_hold_whole_samples(tmp_path):
    with open_writer(tmp_path / "x.h5", compression="gzip") as writer:
        writer.write({"image": np.zeros((64, 32, 32, 3), np.uint8)})
    with h5py.File(tmp_path / "x.h5") as file:
        assert file["image"].chunks[1:] == (32, 32, 3)


def test_h17_samples_cut_into_chunks_are_told(make):
    path = make(filters={"chunks": (4, 8, 8), "compression": "gzip"}, x=np.zeros((16, 32, 32)))
    (layout,) = open_reader(path).layout()
    assert layout.hint == "each row is spread over 16 chunks: fastio convert data.h5 fast.h5"


def test_h18_a_chunk_above_the_chunk_cache_decodes_once(make, monkeypatch):
    data = np.random.default_rng(0).normal(size=(128, 8192))
    path = make(filters={"chunks": (64, 8192), "compression": "gzip"}, x=data)
    decoded = []
    original = hdf5_paths.ChunkRows.__call__
    monkeypatch.setattr(
        hdf5_paths.ChunkRows, "__call__", lambda self, *rows: decoded.append(rows) or original(self, *rows)
    )
    reader = open_reader(path)
    for row in range(64):
        np.testing.assert_array_equal(reader.read([row])["x"][0], data[row])
    assert decoded == [(0, 64)]
    reader.close()


def test_h19_an_external_link_to_a_file_that_is_gone(make, tmp_path):
    target = make("target.h5", x=np.arange(3.0))
    with h5py.File(tmp_path / "main.h5", "w") as file:
        file["x"] = h5py.ExternalLink("target.h5", "/x")
    assert open_reader(tmp_path / "main.h5").read([2])["x"].item() == 2.0
    target.unlink()
    for fields in (None, ["x"]):
        with pytest.raises(
            FormatError, match=r"'x' is an external link to '/x' in 'target.h5', a file that is missing"
        ):
            open_reader(tmp_path / "main.h5", fields)


def test_h20_scalar_null_and_zero_rows(make):
    path = make(scalar=3.0, null=h5py.Empty("f4"), none=np.zeros((0, 4)))
    with pytest.raises(FormatError, match="field 'scalar' cannot be loaded: it is a single value without rows"):
        open_reader(path, ["scalar"])
    with pytest.raises(FormatError, match="field 'null' cannot be loaded: it is empty: it has a type but no values"):
        open_reader(path, ["null"])
    reader = open_reader(path, ["none"])
    assert len(reader) == 0
    assert reader.read([])["none"].shape == (0, 4)


def test_h21_half_floats_are_rounded_as_numpy_does(tmp_path):
    data = np.random.default_rng(0).normal(size=1000)
    with open_writer(tmp_path / "x.h5") as writer:
        writer.write({"x": data.astype(np.float16)})
    read = open_reader(tmp_path / "x.h5").read(range(1000))["x"].numpy()
    np.testing.assert_array_equal(read.view(np.uint16), data.astype(np.float16).view(np.uint16))


def test_a_file_that_is_replaced_while_in_use(make, tmp_path):
    path = make(filters={"chunks": (100_000,), "compression": "gzip"}, x=np.arange(1_000_000.0))
    reader = open_reader(path, cache_bytes=1)
    assert reader.read([5])["x"].item() == 5.0
    make("new.h5", x=np.zeros(7)).rename(path)
    with pytest.raises(CorruptFileError, match="was changed or replaced after it was opened"):
        reader.read([999_999])
    reader.close()


def test_a_mapped_file_that_is_cut_short_while_in_use(make):
    path = make(x=np.arange(100_000.0))
    reader = open_reader(path)
    assert reader.read([99_999])["x"].item() == 99_999.0
    os.truncate(path, 5000)
    with pytest.raises(CorruptFileError, match="changed while it was in use"):
        reader.read([99_999])


def test_hundred_files_under_a_small_limit_of_open_files(tmp_path):
    for number in range(100):
        with open_writer(tmp_path / f"part-{number}.h5") as writer:
            writer.write({"x": np.full(3, number), "t": [str(number)] * 3})
    code = (
        "import resource, sys; import lightning_fastio.formats as formats; import h5py, torch\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\n"
        "reader = formats.open_reader(sys.argv[1])\n"
        "batch = reader.read(range(300))\n"
        "assert batch['x'].tolist() == [row // 3 for row in range(300)]\n"
        "assert batch['t'] == [str(row // 3) for row in range(300)]\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)


def test_an_epoch_through_the_loader_holds_each_row_once(make):
    data = np.arange(5000.0)[:, None] + np.zeros(40)
    path = make(filters={"chunks": (50, 40), "compression": "gzip", "shuffle": True}, x=data)
    others = _decode_threads()
    reader = open_reader(path, cache_bytes=400_000)
    loader = BatchLoader(reader, batch_size=64, shuffle="block", num_workers=2)
    rows = torch.cat([batch["x"] for batch in loader])
    assert rows[:, 0].sort().values.tolist() == list(range(5000))
    assert torch.equal(rows[:, 0], rows[:, 39])
    reader.close()
    assert _decode_threads() <= others


def _decode_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("fastio-decode")}
