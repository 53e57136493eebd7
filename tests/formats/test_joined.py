"""Readers joined by rows or by fields, over readers of every kind."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fastio import open_reader, open_writer
from lightning_fastio.errors import ConfigError, RowIndexError, SchemaError
from lightning_fastio.formats.base import Reader
from lightning_fastio.formats.joined import Concatenated, SideBySide
from lightning_fastio.formats.selection import Selection
from tests.memory import MemoryReader


def parts(*lengths: int, blocks: dict[int, list[int]] | None = None) -> tuple[Concatenated, list[MemoryReader], Any]:
    """Readers of these lengths, joined, and the array that they hold together."""
    whole = np.arange(2 * sum(lengths)).reshape(-1, 2)
    arrays = np.split(whole, np.cumsum(lengths)[:-1])
    readers = [
        MemoryReader({"x": array, "y": array[:, 0] * 10}, (blocks or {}).get(index), 1000 * (index + 1))
        for index, array in enumerate(arrays)
    ]
    return Concatenated(readers, [f"part {index}" for index in range(len(readers))]), readers, whole


@pytest.mark.parametrize(
    "rows", [[0], [11], [0, 11], [4, 5, 6], [11, 0, 4, 5, 3, 3, -1], list(range(12)), list(range(12))[::-1], [], [5, 6]]
)
@pytest.mark.parametrize("with_out", [False, True])
def test_rows_follow_one_another(rows, with_out):
    reader, _, whole = parts(4, 1, 7)
    out = reader.schema.allocate(len(rows)) if with_out else None
    batch = reader.read(rows, out)
    assert isinstance(reader, Reader)
    assert len(reader) == 12
    assert list(batch) == ["x", "y"]
    assert batch["x"].tolist() == whole[np.asarray(rows, int)].tolist()
    assert batch["y"].tolist() == (whole[np.asarray(rows, int), 0] * 10).tolist()
    if out is not None:
        assert batch["x"].data_ptr() == out["x"].data_ptr()


def test_rows_out_of_range():
    reader, _, _ = parts(4, 1, 7)
    for row in (12, -13):
        with pytest.raises(RowIndexError, match="12 rows"):
            reader.read([row])


def test_hints_reach_the_readers_that_have_the_rows():
    reader, members, _ = parts(4, 1, 7)
    reader.will_need([11, 0, -1, 3])
    assert [member.announced for member in members] == [[[0, 3]], [], [[6, 6]]]
    reader.will_need([99])


def test_blocks_of_all_readers():
    assert parts(4, 1, 7)[0].blocks is None
    reader, _, _ = parts(4, 1, 7, blocks={0: [0, 3, 4], 2: [0, 5, 7]})
    assert reader.blocks.tolist() == [0, 3, 4, 5, 10, 12]
    assert reader.cache_bytes == 3000


def test_metadata_of_the_first_reader_counts():
    reader, members, _ = parts(1, 1, 1)
    for index, member in enumerate(members[1:]):
        member.metadata = {"classes": f"{index}", f"own{index}": "x"}
    assert reader.metadata == {"classes": "0", "own0": "x", "own1": "x"}


def test_what_a_joined_reader_says_of_itself():
    reader, members, _ = parts(4, 1)
    beside = SideBySide({"a": members[0]})
    assert repr(reader) == "Concatenated(5 rows of 2 readers, Schema(x: int64[2], y: int64))"
    assert repr(beside) == "SideBySide(4 rows, Schema(x: int64[2], y: int64))"
    assert len({reader.fingerprint, beside.fingerprint, parts(1, 4)[0].fingerprint, parts(4, 1)[0].fingerprint}) == 3
    assert [layout.stored for layout in reader.layout()] == [
        f"{layout.stored}; first of 2 parts" for layout in members[0].layout()
    ]
    members[0].metadata = {"a": "b"}
    assert reader.metadata == beside.metadata == {"a": "b"}
    assert beside.blocks is None
    selected = Selection.of(beside, {"z": "y"})
    assert repr(selected) == f"Selection({beside!r}, Schema(z: int64))"
    assert selected.fingerprint not in (beside.fingerprint, Selection.of(beside, {"z": "x"}).fingerprint)
    assert (selected.metadata, selected.blocks, selected.cache_bytes) == ({"a": "b"}, None, 1000)
    selected.will_need([2])
    selected.close()
    assert members[0].announced == [[2]]
    assert members[0].closed == 1


def test_copies_and_close():
    reader, members, whole = parts(4, 1, 7)
    for clone in (
        pickle.loads(pickle.dumps(Concatenated([Unlocked(whole), Unlocked(whole)], "ab"))),
        copy.copy(reader),
    ):
        assert clone.read([1, 0])["x"].tolist() == whole[[1, 0]].tolist()
    reader.close()
    assert [member.closed for member in members] == [1, 1, 1]


class Unlocked(MemoryReader):
    """A memory reader that can be pickled."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        super().__init__({"x": array})

    def __reduce__(self) -> Any:
        return Unlocked, (self.columns["x"],)


def test_readers_of_different_fields_are_named():
    x, y = np.zeros((3, 2)), np.zeros(3)
    first = MemoryReader({"x": x, "y": y})
    with pytest.raises(SchemaError, match=r"a\.h5 has the field 'y', but b\.h5 has not"):
        Concatenated([first, MemoryReader({"x": x})], ["a.h5", "b.h5"])
    with pytest.raises(SchemaError, match=r"c\.h5 has the field 'z', but a\.h5 has not"):
        Concatenated([first, first, MemoryReader({"x": x, "y": y, "z": y})], ["a.h5", "b.h5", "c.h5"])
    with pytest.raises(SchemaError, match=r"'y' is float64 in a\.h5, but int64 in b\.h5"):
        Concatenated([first, MemoryReader({"x": x, "y": y.astype(int)})], ["a.h5", "b.h5"])


def test_fields_side_by_side():
    x, y, z = np.arange(10.0).reshape(5, 2), np.arange(5), np.arange(5) * 2
    first, second = MemoryReader({"x": x, "y": y}), MemoryReader({"z": z}, [0, 2, 5], 500)
    reader = SideBySide({"a": first, "b": second})
    batch = reader.read([4, -5])
    assert {name: values.tolist() for name, values in batch.items()} == {
        "x": [[8, 9], [0, 1]],
        "y": [4, 0],
        "z": [8, 0],
    }
    out = reader.schema.allocate(2)
    assert reader.read([1, 2], out)["z"].data_ptr() == out["z"].data_ptr()
    assert reader.blocks.tolist() == [0, 2, 5]
    assert reader.cache_bytes == 500
    assert [layout.name for layout in reader.layout()] == ["x", "y", "z"]
    reader.will_need([1])
    assert first.announced == second.announced == [[1]]
    with pytest.raises(RowIndexError):
        reader.read([5])
    reader.close()
    assert (first.closed, second.closed) == (1, 1)


def test_fields_side_by_side_must_fit():
    first = MemoryReader({"x": np.zeros(5)})
    with pytest.raises(SchemaError, match=r"(?s)'images' has 5, but 'labels' has 4"):
        SideBySide({"images": first, "labels": MemoryReader({"y": np.zeros(4)})})
    with pytest.raises(SchemaError, match=r"'x' occurs twice; the second time in 'labels'"):
        SideBySide({"images": first, "labels": first})


def test_blocks_of_the_field_with_the_most_bytes():
    small, large = MemoryReader({"y": np.zeros(6)}, [0, 3, 6], 10), MemoryReader({"x": np.zeros((6, 9))}, [0, 2, 6], 10)
    assert SideBySide({"y": small, "x": large}).blocks.tolist() == [0, 2, 6]


def test_selection_renames_stacks_and_fills_buffers():
    columns = {"a": np.arange(4), "b": np.arange(4) * 0.5, "c": np.arange(8).reshape(4, 2)}
    reader = Selection.of(MemoryReader(columns), {"m": ["b", "a"], "c2": "c", "again": "c"})
    assert reader.schema["m"].dtype == torch.float64  # int64 and float64 in one matrix
    out = reader.schema.allocate(2)
    batch = reader.read([3, 1], out)
    assert batch["m"].tolist() == [[1.5, 3], [0.5, 1]]
    assert batch["c2"].tolist() == batch["again"].tolist() == [[6, 7], [2, 3]]
    assert all(batch[name].data_ptr() == out[name].data_ptr() for name in ("m", "c2", "again"))
    assert [layout.name for layout in reader.layout()] == ["m", "c2", "again"]
    assert reader.layout()[0].stored.startswith("2 fields of")


def test_selection_of_the_same_fields_is_the_reader_itself():
    reader = MemoryReader({"a": np.arange(4), "b": np.arange(4)})
    assert Selection.of(reader, None) is reader
    assert Selection.of(reader, ["a", "b"]) is reader
    assert Selection.of(reader, ["b", "a"]) is not reader


def test_text_under_two_names(tmp_path):
    with open_writer(tmp_path / "a.npz") as writer:
        writer.write({"text": ["a", "b"]})
    batch = open_reader(tmp_path / "a.npz", {"one": "text", "two": "text"}).read([1])
    assert batch["one"] == batch["two"] == ["b"]
    assert batch["one"] is not batch["two"]


def test_selection_that_does_not_fit():
    reader = MemoryReader({"a": np.arange(4), "c": np.arange(8).reshape(4, 2)})
    with pytest.raises(SchemaError, match=r"(?s)'m' stacks 'a' \(int64\) and 'c' \(int64\[2\]\)"):
        Selection.of(reader, {"m": ["a", "c"]})
    with pytest.raises(SchemaError, match="no field 'q'"):
        Selection.of(reader, ["q"])
    with pytest.raises(ConfigError, match="no field"):
        Selection.of(reader, [])
