"""Memory maps: rows out of them, hints about them, and files that change under them."""

from __future__ import annotations

import ctypes
import os
import pickle
import time

import numpy as np
import pytest

from lightning_fastio.errors import CorruptFileError, FileAccessError, FormatError
from lightning_fastio.formats import mapped, pages, spans
from lightning_fastio.formats.mapped import MappedArray, MappedFile
from lightning_fastio.formats.spans import JoinedArrays


@pytest.fixture
def path(tmp_path):
    (tmp_path / "bytes").write_bytes(np.arange(1 << 16, dtype=np.uint16).tobytes())
    return tmp_path / "bytes"


@pytest.fixture
def announced(monkeypatch):
    """Ranges that hints announce, as (address, length), while nothing counts as in memory."""
    ranges: list[tuple[int, int]] = []

    def record(addresses, num_bytes):
        lengths = np.broadcast_to(num_bytes, addresses.shape)
        ranges.extend(zip(addresses.tolist(), lengths.tolist(), strict=True))

    for module in (mapped, spans):
        monkeypatch.setattr(module, "announce", record)
    monkeypatch.setattr(mapped, "are_in_memory", lambda path, offsets: False)
    return ranges


def test_bytes_are_read_only(path):
    view = MappedFile(path).view()
    assert len(view) == 1 << 17
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_memory_stays_mapped_while_an_array_refers_to_it(path):
    file = MappedFile(path)
    part = file.view()[2:4]
    file.close()
    file.close()
    assert part.tolist() == [1, 0]
    assert file.view()[4] == 2


def test_no_file_stays_open(path):
    before = os.listdir("/proc/self/fd")
    file = MappedFile(path)
    file.view()
    assert os.listdir("/proc/self/fd") == before


def test_offset_that_is_not_aligned(path):
    data = path.read_bytes()
    array = MappedArray(MappedFile(path), 3, ">i4", (100, 7))
    out = np.empty((3, 7), np.int32)
    array.read(np.array([99, 0, 50]), out)
    np.testing.assert_array_equal(out, np.frombuffer(data, ">i4", 700, 3).reshape(100, 7)[[99, 0, 50]])


def test_positions(path):
    for dtype in ("<u2", ">u2"):
        array = MappedArray(MappedFile(path), 0, dtype, (100, 4))
        out = np.zeros((5, 4), np.uint16)
        array.read(np.array([7, 9]), out, np.array([4, 1]))
        expected = np.frombuffer(path.read_bytes(), dtype, 400).reshape(100, 4)
        np.testing.assert_array_equal(out[[4, 1]], expected[[7, 9]])
        assert not out[[0, 2, 3]].any()


def test_row_that_is_too_large(path):
    with pytest.raises(FormatError, match=r"2\.0 GiB is too large"):
        MappedArray(MappedFile(path), 0, "u1", (1, 1 << 31))


def test_missing_file(tmp_path):
    with pytest.raises(FileAccessError, match="nothing"):
        MappedFile(tmp_path / "nothing")


@pytest.mark.parametrize("change", ["truncate", "append", "rewrite"])
def test_changes_in_place_are_noticed_before_a_byte_is_touched(path, change):
    os.utime(path, ns=(0, 0))
    file = MappedFile(path)
    file.view()
    if change == "truncate":
        os.truncate(path, 1000)
    elif change == "append":
        with path.open("ab") as stream:
            stream.write(b"x")
    else:
        path.write_bytes(bytes(1 << 17))
    with pytest.raises(CorruptFileError, match="changed while it was in use"):
        file.view()
    with pytest.raises(CorruptFileError, match="changed while it was in use"):
        pickle.loads(pickle.dumps(file)).view()


def test_removed_or_replaced_files_stay_readable(path):
    file = MappedFile(path)
    file.view()
    path.unlink()
    assert file.view()[4] == 2
    path.write_bytes(b"new")
    assert file.view()[4] == 2
    file.close()
    with pytest.raises(CorruptFileError, match="changed"):
        file.view()


def test_hints_name_the_bytes_of_the_rows(path, announced):
    file = MappedFile(path)
    array = MappedArray(file, 10, "u1", (100, 50))
    start = file.view().__array_interface__["data"][0] + 10
    array.will_need(np.array([7, 0]))
    array.will_need(np.array([3, 9]), np.array([2, 4]))
    array.will_need(np.array([], np.int64))
    assert announced == [(start + 350, 50), (start, 50), (start + 150, 100), (start + 450, 200)]


@pytest.mark.parametrize("large", [1, 1 << 20], ids=["one by one", "together"])
@pytest.mark.parametrize("positions", [None, np.array([2, 0, 1])])
def test_windows_that_overlap(path, monkeypatch, large, positions):
    monkeypatch.setattr(mapped, "_LARGE_ITEM_BYTES", large)
    array = MappedArray(MappedFile(path), 6, "<u2", (100, 2), window=10, stride=3)
    rows = np.array([29, 0, 29])
    out = np.zeros((3, 10, 2), np.uint16)
    array.read(rows, out, positions)
    stored = np.frombuffer(path.read_bytes(), "<u2", 200, 6).reshape(100, 2)
    expected = np.stack([stored[3 * row : 3 * row + 10] for row in rows])
    np.testing.assert_array_equal(out[slice(None) if positions is None else positions], expected)


def test_hints_of_windows_and_of_fortran_order(path, announced):
    file = MappedFile(path)
    start = file.view().__array_interface__["data"][0]
    MappedArray(file, 0, "u1", (100,), window=10, stride=3).will_need(np.array([4]))
    MappedArray(file, 0, "u1", (100, 4), order="F").will_need(np.array([4]))
    assert announced == [(start + 12, 10)]


def test_what_is_in_memory_is_not_announced(path, announced, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(mapped, "are_in_memory", lambda path, offsets: asked.append(len(offsets)) or True)
    MappedArray(MappedFile(path), 0, "u1", (1000, 50)).will_need(np.arange(1000))
    assert (announced, asked) == ([], [8])  # A few rows stand for all.


def test_pages_of_a_file_that_was_just_written_are_in_memory(path):
    file = MappedFile(path)
    if not file.has_in_memory(np.array([0, 5000])):
        pytest.skip("this file system cannot tell")
    assert file.has_in_memory(np.array([100_000]))


def test_announced_pages_come_into_memory(tmp_path):
    path = tmp_path / "bytes"
    with path.open("wb") as stream:
        stream.write(bytes(4 << 20))
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file = MappedFile(path)
    address = pages.address_of(file.view())
    rows = np.array([100, 3, 101, 900])
    if resident(address)[rows].any():
        pytest.skip("this file system keeps all files in memory")
    MappedArray(file, 0, "u1", (1024, 4096)).will_need(rows)
    deadline = time.monotonic() + 60
    while not resident(address)[rows].all():
        assert time.monotonic() < deadline
    assert resident(address).sum() < 512  # The others were left where they are.


def resident(address: int) -> np.ndarray:
    """Which of 1,024 pages are in memory."""
    found = np.empty(1024, np.uint8)
    libc = ctypes.CDLL(None)
    libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(4 << 20), ctypes.c_void_p(found.ctypes.data))
    return found % 2 == 1


def test_empty_file(tmp_path):
    (tmp_path / "nothing").write_bytes(b"")
    assert len(MappedFile(tmp_path / "nothing").view()) == 0


def test_page_ranges_are_merged_sorted_cut_and_bounded():
    def ranges(starts, num_bytes):
        starts = np.asarray(starts)
        return list(pages._page_ranges(starts // 4096, -(-(starts + num_bytes) // 4096)))

    assert ranges([], 10) == []
    assert ranges([8192, 0, 100, 4096], 50) == [(0, 3)]
    assert ranges([40960, 0], 5000) == [(0, 2), (10, 2)]
    assert ranges([0], 70 * 4096) == [(0, 32), (32, 32), (64, 6)]
    assert len(ranges(np.arange(10_000) * 3 * 4096, 10)) == pages.MAX_HINTS


def make_shards(tmp_path, lengths, dtype="<i4"):
    whole = np.arange(3 * sum(lengths)).reshape(-1, 3).astype(dtype)
    arrays = []
    for index, part in enumerate(np.split(whole, np.cumsum(lengths)[:-1])):
        (tmp_path / f"{index}").write_bytes(b"head" + part.tobytes())
        arrays.append(MappedArray(MappedFile(tmp_path / f"{index}"), 4, dtype, part.shape))
    return arrays, whole


def test_joined_arrays(tmp_path, announced):
    arrays, whole = make_shards(tmp_path, [5, 1, 8])
    joined = JoinedArrays(arrays)
    numbers, rows, expected = np.array([2, 0, 1, 2]), np.array([7, 4, 0, 0]), whole[[13, 4, 5, 6]]
    for each in (joined, pickle.loads(pickle.dumps(joined))):
        out = np.empty((4, 3), np.int32)
        each.read(numbers, rows, out)
        np.testing.assert_array_equal(out, expected)
        each.read(numbers[:0], rows[:0], out[:0])
        each.will_need(numbers, rows)
        each.close()
        each.read(numbers, rows, out)
        np.testing.assert_array_equal(out, expected)
    assert len(announced) == 8
    os.truncate(tmp_path / "1", 10)
    joined.read(numbers[:2], rows[:2], out[:2])
    with pytest.raises(CorruptFileError, match="changed"):
        joined.read(numbers, rows, out)


def test_arrays_that_cannot_be_joined(tmp_path):
    plain, _ = make_shards(tmp_path, [5, 1])
    swapped, _ = make_shards(tmp_path, [5, 1], ">i4")
    assert JoinedArrays.can_join(plain, "int32")
    assert not JoinedArrays.can_join(plain, "int64")
    assert not JoinedArrays.can_join([plain[0], swapped[1]], "int32")
    assert not JoinedArrays.can_join([MappedArray(MappedFile(tmp_path / "0"), 0, "u1", (1, 40_000))], "u1")
