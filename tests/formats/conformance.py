"""What every storage format keeps: one suite, inherited by each.

A format's test class derives from `ReaderConformance` and says how columns become files. The oracle is the arrays.
"""

from __future__ import annotations

import copy
import hashlib
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fastio import open_reader, open_writer
from lightning_fastio.errors import CorruptFileError, FastIOError, FileAccessError, RowIndexError, SchemaError
from lightning_fastio.formats.base import Reader, Writer

Columns = Mapping[str, Any]

WIDENED = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}


def numbers(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Random values of any type; integers over their whole range, but uint64 only as far as int64 goes."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return rng.random(shape) < 0.5
    if kind.kind in "iu":
        high = min(np.iinfo(kind).max, np.iinfo(np.int64).max)
        return rng.integers(np.iinfo(kind).min, high, shape, dtype=kind, endpoint=True)
    values = rng.standard_normal(shape)
    return (values + 1j * rng.standard_normal(shape) if kind.kind == "c" else values).astype(kind)


def example(num_rows: int = 40, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Pictures and labels."""
    return {
        "image": numbers("uint8", (num_rows, 5, 4), seed),
        "feature": numbers("float32", (num_rows, 3), seed),
        "label": np.arange(num_rows, dtype=np.int64) + 1000 * seed,
    }


def assert_rows(batch: Mapping[str, Any], columns: Columns, rows: Any) -> None:
    """A batch holds exactly these rows of the columns, bit by bit."""
    assert list(batch) == list(columns)
    for name, column in columns.items():
        expected, values = column[rows], batch[name]
        assert isinstance(values, torch.Tensor)
        assert str(values.dtype) == "torch." + WIDENED.get(expected.dtype.name, expected.dtype.name)
        assert values.shape == expected.shape
        assert values.is_contiguous()
        np.testing.assert_array_equal(values.numpy(), expected)


def read_in_process(reader: Reader, rows: list[int], queue: Any) -> None:
    """Read in another process and send the labels back."""
    queue.put(reader.read(rows)["label"].tolist())


class ReaderConformance:
    """Derive from this, name it ``Test...``, and give it ``target``."""

    target: str
    """File name with the suffix of the format, or a folder without one."""
    dtypes = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64")
    """Number types that the format holds."""
    unsigned = ("uint16", "uint32", "uint64")
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (7,), (2, 3, 4))
    """Sample shapes that the format holds."""
    writer_options: dict[str, Any] = {}  # noqa: RUF012

    def write(self, folder: Path, columns: Columns, name: str | None = None) -> Path:
        """Write columns and return the source to read."""
        path = folder / (name or self.target)
        num_rows = len(next(iter(columns.values())))
        with open_writer(path, **self.writer_options) as writer:
            for start in range(0, max(1, num_rows), 16):
                writer.write({field: values[start : start + 16] for field, values in columns.items()})
        return path

    @pytest.fixture
    def columns(self) -> dict[str, np.ndarray[Any, Any]]:
        return example()

    @pytest.fixture
    def source(self, tmp_path: Path, columns: Columns) -> Path:
        return self.write(tmp_path, columns)

    @pytest.fixture
    def reader(self, source: Path) -> Any:
        reader = open_reader(source)
        yield reader
        reader.close()

    # What comes out

    def test_dtypes(self, tmp_path):
        columns = {dtype: numbers(dtype, (20, 3)) for dtype in (*self.dtypes, *self.unsigned)}
        reader = open_reader(self.write(tmp_path, columns))
        assert_rows(reader.read([7, 0, 19]), columns, [7, 0, 19])
        reader.close()

    def test_unsigned_types_stay_on_request(self, tmp_path):
        columns = {dtype: numbers(dtype, (20, 3)) for dtype in self.unsigned}
        reader = open_reader(self.write(tmp_path, columns), widen_unsigned=False)
        batch = reader.read([7, 0, 19])
        for name, column in columns.items():
            assert str(batch[name].dtype) == f"torch.{name}"
            np.testing.assert_array_equal(batch[name].numpy(), column[[7, 0, 19]])
        reader.close()

    def test_uint64_above_int64_is_an_error_that_names_the_value(self, tmp_path):
        columns = {"x": np.array([1, 2**63 + 5, 3], np.uint64), "y": np.arange(3)}
        source = self.write(tmp_path, columns)
        with pytest.raises(FastIOError, match=str(2**63 + 5)):  # Some formats notice when they open the file.
            open_reader(source).read([0, 1])

    def test_shapes(self, tmp_path):
        columns = {f"x{index}": numbers("float32", (20, *shape)) for index, shape in enumerate(self.shapes)}
        reader = open_reader(self.write(tmp_path, columns))
        assert [spec.shape for spec in reader.schema.values()] == list(self.shapes)
        assert_rows(reader.read([19, 3]), columns, [19, 3])
        reader.close()

    def test_contract(self, reader, columns):
        assert isinstance(reader, Reader)
        assert len(reader) == 40
        assert [layout.name for layout in reader.layout()] == list(columns) == list(reader.schema)
        assert reader.fingerprint == str(reader.fingerprint) != ""
        blocks = reader.blocks
        if blocks is not None:
            assert blocks[0] == 0
            assert blocks[-1] == 40
            assert (np.diff(blocks) > 0).all()
            assert reader.cache_bytes > 0

    # Which rows

    @pytest.mark.parametrize(
        "rows",
        [
            [0],
            list(range(40)),
            [39, 0, 20, 20, 20, 1],
            [-1, -40, 39, 0],
            (3, 2, 1),
            np.array([5, 6, 38], np.int32),
            np.array([5, 6, 38], np.uint8),
            range(10, 30, 7),
            list(range(40))[::-1] * 3,
        ],
        ids=str,
    )
    def test_rows_in_any_order(self, reader, columns, rows):
        assert_rows(reader.read(rows), columns, np.asarray(rows, np.int64))

    def test_no_rows(self, reader, columns):
        assert_rows(reader.read([]), columns, np.array([], int))
        assert_rows(reader.read(np.array([], np.int64)), columns, np.array([], int))

    @pytest.mark.parametrize("rows", [[40], [-41], [0, 1, 1 << 40], [[0, 1]], [0.5], [True, False]], ids=str)
    def test_rows_that_are_none(self, reader, rows):
        with pytest.raises(IndexError) as caught:
            reader.read(rows)
        assert isinstance(caught.value, RowIndexError)

    def test_hints_never_fail(self, reader, columns):
        reader.will_need([0, 39, -1, 5, 5])
        reader.will_need([])
        reader.will_need([4000])
        assert_rows(reader.read([0, 39]), columns, [0, 39])

    # Whose memory

    def test_out_is_filled_and_returned(self, reader, columns):
        out = reader.schema.allocate(5)
        pointers = {name: values.data_ptr() for name, values in out.items()}
        for rows in ([4, 8, 15, 16, 23], [-1, 0, 0, 39, 7]):
            batch = reader.read(rows, out)
            assert {name: values.data_ptr() for name, values in batch.items()} == pointers
            assert_rows(batch, columns, rows)

    def test_slices_of_larger_buffers_are_filled(self, reader, columns):
        whole = {name: values.fill_(7) for name, values in reader.schema.allocate(9).items()}
        reader.read([3, 1, 2], {name: values[4:7] for name, values in whole.items()})
        assert_rows({name: values[4:7] for name, values in whole.items()}, columns, [3, 1, 2])
        assert all((values[:4] == 7).all() and (values[7:] == 7).all() for values in whole.values())

    def test_batches_are_private(self, reader, source, columns):
        before = digest(source)
        batch = reader.read([3, 3, 5])
        for values in batch.values():
            values.add_(1)
        assert (batch["label"] == torch.tensor([1004, 1004, 1006]) - 1000).all()
        assert_rows(reader.read([3, 3, 5]), columns, [3, 3, 5])
        reader.close()
        assert digest(source) == before

    # Where it runs

    @pytest.mark.parametrize("is_used", [False, True])
    @pytest.mark.parametrize("clone", [lambda reader: pickle.loads(pickle.dumps(reader)), copy.deepcopy])
    def test_copies(self, source, columns, clone, is_used):
        reader = open_reader(source)
        if is_used:
            reader.will_need([1, 2])
            reader.read([1, 2])
        copied = clone(reader)
        reader.close()
        assert copied.schema == reader.schema
        assert copied.fingerprint == reader.fingerprint
        assert len(pickle.dumps(copied)) < 100_000
        assert_rows(copied.read([9, 1]), columns, [9, 1])
        copied.close()

    def test_eight_threads(self, reader, columns):
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(20):
                    rows = rng.integers(-40, 40, 13)
                    reader.will_need(rows)
                    assert_rows(reader.read(rows), columns, rows)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_other_processes(self, reader, columns, method):
        assert_rows(reader.read([0, 1]), columns, [0, 1])
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        num_processes = 3 if method == "fork" else 1  # Each spawned one imports torch anew.
        processes = [
            context.Process(target=read_in_process, args=(reader, [i, 39], queue)) for i in range(num_processes)
        ]
        for process in processes:
            process.start()
        received = sorted(queue.get(timeout=60) for _ in processes)
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [0] * num_processes
        assert received == [[i, 39] for i in range(num_processes)]
        assert_rows(reader.read([5]), columns, [5])

    def test_close_gives_everything_back_and_reading_opens_again(self, source, columns):
        threads, descriptors = threading.active_count(), num_descriptors()
        reader = open_reader(source)
        for _ in range(2):
            reader.will_need(range(40))
            assert_rows(reader.read([2, 1]), columns, [2, 1])
            reader.close()
            reader.close()
            assert threading.active_count() == threads
            assert num_descriptors() == descriptors

    # Which fields, which files

    def test_fields_are_chosen_renamed_and_stacked(self, source, columns):
        reader = open_reader(source, ["label", "image"])
        assert_rows(reader.read([4]), {name: columns[name] for name in ("label", "image")}, [4])
        reader = open_reader(source, {"x": "image", "y": "label"})
        assert_rows(reader.read([4]), {"x": columns["image"], "y": columns["label"]}, [4])

    def test_fields_are_stacked(self, tmp_path):
        columns = {name: numbers("float32", (30,), seed) for seed, name in enumerate("abc")}
        reader = open_reader(self.write(tmp_path, columns), {"x": ["c", "a"], "b": "b"})
        expected = {"x": np.stack([columns["c"], columns["a"]], axis=1), "b": columns["b"]}
        assert_rows(reader.read([4, -1]), expected, [4, -1])
        assert reader.schema["x"].shape == (2,)

    def test_unknown_field_is_named_with_its_neighbours(self, source):
        with pytest.raises(SchemaError, match=r"(?s)'imag'.*'image'"):
            open_reader(source, ["imag"])

    def test_files_of_a_list_follow_one_another(self, tmp_path, columns):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        sources = [self.write(tmp_path / "a", columns), self.write(tmp_path / "b", example(7, seed=1))]
        joined = {name: np.concatenate([columns[name], values]) for name, values in example(7, seed=1).items()}
        reader = open_reader(sources)
        assert len(reader) == 47
        for rows in ([46, 0, 40, 39, -1], list(range(47)), [41, 42], []):
            assert_rows(reader.read(rows), joined, np.asarray(rows, int))
            assert_rows(reader.read(rows, reader.schema.allocate(len(rows))), joined, np.asarray(rows, int))
        reader.close()
        assert_rows(pickle.loads(pickle.dumps(reader)).read([40, 1]), joined, [40, 1])

    def test_files_that_differ_are_named(self, tmp_path, columns):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        first = self.write(tmp_path / "a", columns)
        second = self.write(tmp_path / "b", {**columns, "feature": columns["feature"].astype("float64")})
        with pytest.raises(SchemaError, match="feature") as caught:
            open_reader([first, second])
        assert f"{tmp_path}/a" in str(caught.value)
        assert f"{tmp_path}/b" in str(caught.value)

    def test_fields_side_by_side(self, tmp_path, columns):
        (tmp_path / "b").mkdir()
        first = self.write(tmp_path, {"x": columns["image"]})
        second = self.write(tmp_path / "b", {"y": columns["label"]})
        reader = open_reader({"x": first, "label": second})
        assert_rows(reader.read([5, -2]), {"x": columns["image"], "label": columns["label"]}, [5, -2])
        third = self.write(tmp_path / "b", {"y": columns["label"][:30]})
        with pytest.raises(SchemaError, match=r"(?s)'x'.*40.*'y'.*30"):
            open_reader({"x": first, "y": third})

    # What else a file says

    def test_metadata(self, tmp_path, columns):
        metadata = {"classes": '["Äpfel", "pears"]', "note": "made for a test"}
        with open_writer(tmp_path / self.target, metadata=metadata) as writer:
            writer.write(columns)
        assert dict(open_reader(tmp_path / self.target).metadata) == metadata

    def test_fingerprint_follows_the_data_not_the_folder(self, source, tmp_path, columns):
        fingerprint = open_reader(source).fingerprint
        moved = tmp_path / "moved"
        moved.mkdir()
        shutil.move(source, moved)
        assert open_reader(moved / source.name).fingerprint == fingerprint
        assert open_reader(moved / source.name, ["label"]).fingerprint != fingerprint
        fewer = {name: values[:39] for name, values in columns.items()}
        assert open_reader(self.write(tmp_path, fewer)).fingerprint != fingerprint

    # Text, bytes, rows of varying length

    def test_strings(self, tmp_path):
        texts = ["a", "", "bé", "日本語", "🙂" * 100, "end "]
        reader = open_reader(self.write(tmp_path, {"text": texts, "label": np.arange(6)}))
        assert str(reader.schema["text"]) == "string"
        assert reader.read([5, 3, 3, 0, 1])["text"] == ["end ", "日本語", "日本語", "a", ""]
        assert reader.read([])["text"] == []
        reader.close()

    def test_bytes(self, tmp_path):
        values = [b"\x00\xff", b"", b"jpeg\x00", bytes(range(256))]
        reader = open_reader(self.write(tmp_path, {"data": values, "label": np.arange(4)}))
        assert str(reader.schema["data"]) == "bytes"
        assert reader.read([2, 1, 0, 3])["data"] == [values[2], values[1], values[0], values[3]]
        reader.close()

    def test_ragged_rows(self, tmp_path):
        rows = [np.arange(length, dtype=np.int32) for length in (3, 0, 5, 1)]
        source = self.write(tmp_path, {"tokens": rows, "label": np.arange(4)})
        reader = open_reader(source)
        assert (reader.schema["tokens"].kind, reader.schema["tokens"].dtype) == ("ragged", torch.int32)
        values = reader.read([2, 1, -4])["tokens"]
        assert [value.tolist() for value in values] == [[0, 1, 2, 3, 4], [], [0, 1, 2]]
        assert all(value.dtype == torch.int32 for value in values)
        values[0].add_(1)
        assert reader.read([2])["tokens"][0].tolist() == [0, 1, 2, 3, 4]
        padded = open_reader(source, ragged="pad").read([3, 0, 1])["tokens"]
        assert padded.tolist() == [[0, 0, 0], [0, 1, 2], [0, 0, 0]]
        with pytest.raises(FastIOError, match="ragged"):
            open_reader(source, ["tokens"], ragged="error")

    def test_ragged_rows_of_several_files(self, tmp_path):
        sources = []
        for name, lengths in {"a": (3, 0), "b": (5, 1)}.items():
            (tmp_path / name).mkdir()
            rows = [np.arange(length, dtype=np.int64) for length in lengths]
            sources.append(self.write(tmp_path / name, {"tokens": rows, "text": [name] * 2, "label": np.arange(2)}))
        batch = open_reader(sources).read([3, 0, 2, 1])
        assert [value.tolist() for value in batch["tokens"]] == [[0], [0, 1, 2], [0, 1, 2, 3, 4], []]
        assert batch["text"] == ["b", "a", "b", "a"]
        padded = open_reader(sources, ragged="pad").read([1, 0, 2])["tokens"]
        assert padded.tolist() == [[0, 0, 0, 0, 0], [0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]

    def test_ragged_rows_of_equal_length_are_one_tensor(self, tmp_path):
        rows = [np.arange(3, dtype=np.int64) + i for i in range(5)]
        source = self.write(tmp_path, {"tokens": rows, "label": np.arange(5)})
        assert_rows(open_reader(source, ["tokens"]).read([4, 0]), {"tokens": np.stack(rows)}, [4, 0])
        as_list = open_reader(source, ["tokens"], ragged="list").read([4])["tokens"]
        assert [value.tolist() for value in as_list] == [[4, 5, 6]]

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda fit: {}, "is NoneType; expected a tensor of torch.float32 \\(3, 20\\)"),
            (lambda fit: {"x": fit.numpy()}, "is ndarray; expected a tensor"),
            (lambda fit: {"x": fit[:2]}, r"float32 \(2, 20\), expected torch.float32 \(3, 20\); schema.allocate\(3\)"),
            (lambda fit: {"x": fit[:, :10]}, "\\(3, 10\\) with gaps"),
            (lambda fit: {"x": fit.double()}, "torch.float64 \\(3, 20\\), expected torch.float32"),
            (lambda fit: {"x": torch.zeros(20, 3).T}, "\\(3, 20\\) with gaps"),
        ],
        ids=["missing", "NumPy", "short", "narrow", "dtype", "strided"],
    )
    def test_buffers_that_do_not_fit_are_refused(self, tmp_path: Path, make: Any, message: str) -> None:
        values = numbers("float32", (100, 20))
        reader = open_reader(self.write(tmp_path, {"x": values}))
        fit = torch.zeros(3, 20)
        with pytest.raises(SchemaError, match=message):
            reader.read([5, 0, 7], out=make(fit))
        assert reader.read([5, 0, 7], out={"x": fit})["x"] is fit
        np.testing.assert_array_equal(fit, values[[5, 0, 7]])

    # Writers

    def test_writer_contract(self, tmp_path, columns):
        writer = open_writer(tmp_path / self.target)
        assert isinstance(writer, Writer)
        with pytest.raises(SchemaError):
            writer.close()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        "later",
        [
            {"x": np.zeros((2, 3), "float64"), "y": np.zeros(2, "int64")},
            {"x": np.zeros((2, 4), "float32"), "y": np.zeros(2, "int64")},
            {"x": np.zeros((2, 3), "float32")},
            {"x": np.zeros((2, 3), "float32"), "y": np.zeros(2, "int64"), "z": np.zeros(2)},
            {"x": np.zeros((2, 3), "float32"), "y": np.zeros(3, "int64")},
            {"x": np.zeros((2, 3), "float32"), "y": ["a", "b"]},
        ],
        ids=["dtype", "shape", "missing", "new", "length", "kind"],
    )
    def test_later_batches_must_agree_with_the_first(self, tmp_path, later):
        writer = open_writer(tmp_path / self.target)
        writer.write({"x": np.zeros((5, 3), "float32"), "y": np.zeros(5, "int64")})
        with pytest.raises(SchemaError):
            writer.write(later)
        writer.abort()
        assert list(tmp_path.iterdir()) == []

    def test_writer_takes_tensors_and_reused_buffers(self, tmp_path):
        buffer = np.empty((4, 3), np.float32)
        with open_writer(tmp_path / self.target) as writer:
            for step in range(5):
                buffer[:] = step
                writer.write({"x": buffer, "y": torch.full((4,), step)})
        batch = open_reader(tmp_path / self.target).read(range(20))
        assert batch["x"][:, 0].tolist() == batch["y"].tolist() == np.repeat(np.arange(5), 4).tolist()

    def test_writer_takes_strided_arrays(self, tmp_path):
        array = numbers("float32", (6, 4, 10))
        columns = {
            "turned": array.transpose(2, 0, 1),
            "swapped": array[0].T.astype(">f4"),
            "flipped": array[0].T[:, ::-1],
        }
        reader = open_reader(self.write(tmp_path, columns))
        for name, values in columns.items():
            np.testing.assert_array_equal(reader.read([9, 2])[name].numpy(), values[[9, 2]])

    def test_closed_writer_stays_closed(self, tmp_path: Path) -> None:
        writer = open_writer(tmp_path / self.target, **self.writer_options)
        writer.write({"x": np.arange(3)})
        writer.close()
        with pytest.raises(SchemaError, match="writer is closed"):
            writer.write({"x": np.arange(9)})
        writer.close()
        assert open_reader(tmp_path / self.target).read([0, 1, 2])["x"].tolist() == [0, 1, 2]

    def test_target_stays_where_it_was_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        with open_writer(self.target, **self.writer_options) as writer:
            writer.write({"x": np.arange(3)})
            monkeypatch.chdir(tmp_path / "elsewhere")
        assert [path.name for path in tmp_path.iterdir() if path.name != "elsewhere"] == [self.target]

    def test_two_writers_of_one_target_do_not_meet(self, tmp_path: Path) -> None:
        first, second = (open_writer(tmp_path / self.target, **self.writer_options) for _ in range(2))
        first.write({"x": np.arange(3)})
        second.write({"x": np.arange(5)})
        first.close()
        second.close()
        assert len(open_reader(tmp_path / self.target)) == 5
        assert [path.name for path in tmp_path.iterdir()] == [self.target]

    def test_remains_of_a_dead_process_are_cleared_away(self, tmp_path: Path) -> None:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        remains = tmp_path / f".{self.target}.{socket.gethostname()}-{dead.pid}-0123abcd.tmp"
        remains.write_text("half a file")
        with open_writer(tmp_path / self.target, **self.writer_options) as writer:
            writer.write({"x": np.arange(3)})
        assert [path.name for path in tmp_path.iterdir()] == [self.target]

    @pytest.mark.parametrize("values", [["a", None], ["a", 5], ["a", b"b"], [b"a", "b"]])
    def test_lists_of_mixed_types_are_refused(self, tmp_path: Path, values: list[Any]) -> None:
        writer = open_writer(tmp_path / self.target, **self.writer_options)
        with pytest.raises(SchemaError, match="'name': row 1 of this batch is"):
            writer.write({"name": values})
        writer.abort()
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (np.float32(3), "'x' is float32 \\[\\]"),
            (np.zeros(2, "datetime64[s]"), "'x' is datetime64"),
            (np.array([1, None]), "'x' is object"),
            ([{"a": 1}, {"a": 2}], "'x' is object"),
            (np.array([["a", "b"]]), "'x' is <U1 \\[1, 2\\]"),
            ([[1, 2], [3]], "'x': its rows differ in length"),
            ([np.zeros(2), np.zeros(3, int)], "row 1 of this batch is int64 \\[3\\], but row 0 is float64 \\[2\\]"),
            ([np.zeros((2, 2)), np.zeros((2, 3))], "only the length of the first axis may differ"),
        ],
    )
    def test_what_no_writer_stores_is_named(self, tmp_path: Path, values: Any, message: str) -> None:
        with (
            pytest.raises(SchemaError, match=message),
            open_writer(tmp_path / self.target, **self.writer_options) as writer,
        ):
            writer.write({"x": values})
        assert list(tmp_path.iterdir()) == []

    def test_columns_of_objects_and_bytes_become_text(self, tmp_path: Path) -> None:
        with open_writer(tmp_path / self.target, **self.writer_options) as writer:
            writer.write({"a": np.array(["x", "yz"], object), "b": np.array([b"p", b"\xc3\xa9"])})
        assert open_reader(tmp_path / self.target).read([1, 0]) == {"a": ["yz", "x"], "b": ["é", "p"]}

    def test_an_empty_list_leaves_the_type_open(self, tmp_path: Path) -> None:
        with open_writer(tmp_path / self.target, **self.writer_options) as writer:
            writer.write({"x": [], "y": np.zeros(0)})
            writer.write({"x": ["a"], "y": np.ones(1, np.int64)})
            writer.write({"x": [], "y": []})
        assert open_reader(tmp_path / self.target).read([0]) == {"x": ["a"], "y": torch.tensor([1])}

    @pytest.mark.parametrize("room", [100_000, 3_000_000])
    def test_a_full_disk_ends_in_a_clear_error_and_leaves_the_old_data(self, source, tmp_path, columns, room):
        script = (
            "import os, resource, sys; sys.path.insert(0, os.getcwd())\n"
            "import numpy as np; from lightning_fastio import open_writer\n"
            f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))\n"
            f"with open_writer({str(source)!r}) as writer:\n"
            "    for _ in range(60):\n"
            "        writer.write({'x': np.random.rand(1000, 100).astype('float32'), 'y': ['abc'] * 1000})\n"
        )
        before = digest(source)
        done = subprocess.run([sys.executable, "-c", script], check=False, timeout=100, capture_output=True, text=True)
        assert done.returncode == 1
        last_line = done.stderr.splitlines()[-1]
        assert last_line == (f"lightning_fastio.errors.FileAccessError: {source} cannot be written: File too large")
        assert digest(source) == before
        assert list(tmp_path.iterdir()) == [source]

    def test_stacks_hold_the_values_of_all(self, tmp_path: Path) -> None:
        source = self.write(tmp_path, {"n": np.array([2**53 - 1, 2]), "f": np.array([0.5, 1.5], np.float32)})
        stacked = open_reader(source, {"z": ["n", "f"]}).read([0, 1])["z"]
        assert isinstance(stacked, torch.Tensor)
        assert stacked.dtype == torch.float64
        assert stacked.tolist() == [[2**53 - 1, 0.5], [2, 1.5]]

    def test_failed_or_aborted_writer_leaves_the_old_data(self, source, tmp_path, columns):
        before = digest(source)
        with suppress(ZeroDivisionError), open_writer(source) as writer:
            writer.write(example(100, seed=3))
            raise ZeroDivisionError
        writer = open_writer(source)
        writer.write(example(100, seed=3))
        writer.abort()
        writer.abort()
        assert digest(source) == before
        assert list(tmp_path.iterdir()) == [source]

    def test_killed_writer_leaves_the_old_data(self, source, tmp_path, columns):
        script = (
            "import os, signal, sys; sys.path.insert(0, os.getcwd())\n"
            "from lightning_fastio import open_writer; from tests.formats.conformance import example\n"
            f"writer = open_writer({str(source)!r})\n"
            "writer.write(example(1000, seed=3)); os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        before = digest(source)
        done = subprocess.run([sys.executable, "-c", script], check=False, timeout=100)
        assert done.returncode == -signal.SIGKILL
        assert digest(source) == before
        reader = open_reader(source)
        assert_rows(reader.read([3]), columns, [3])

    def test_new_data_replaces_the_old_and_open_readers_keep_theirs(self, source, tmp_path, columns):
        reader = open_reader(source)
        assert_rows(reader.read([3]), columns, [3])
        self.write(tmp_path, example(50, seed=2))
        assert list(tmp_path.iterdir()) == [source]
        with may_raise(CorruptFileError, "changed"):
            assert_rows(reader.read([3, 39]), columns, [3, 39])
        assert_rows(open_reader(source).read([49]), example(50, seed=2), [49])

    # Damage

    def test_missing_file(self, tmp_path):
        with pytest.raises(FileAccessError, match=self.target):
            open_reader(tmp_path / self.target)

    def test_no_rows_at_all(self, tmp_path):
        """Either an error when the file is opened, or a reader of length 0."""
        source = self.write(tmp_path, example(0))
        with may_raise(SchemaError, str(tmp_path)):
            reader = open_reader(source)
            assert len(reader) == 0
            assert_rows(reader.read([]), example(0), np.array([], int))

    def test_incomplete_files_are_refused_when_they_are_opened(self, source):
        for file in data_files(source):
            whole = file.read_bytes()
            for size in {0, 1, 7, 64, len(whole) // 2, len(whole) - 1}:
                file.write_bytes(whole[:size])
                with pytest.raises(FastIOError) as caught:
                    open_reader(source)
                assert str(source) in str(caught.value), size
            file.write_bytes(whole)

    def test_file_that_is_something_else(self, source):
        file = data_files(source)[0]
        file.write_bytes(b"<html><body>404 Not Found</body></html>\n" * 20)
        with pytest.raises(CorruptFileError, match=r"(?s)html"):
            open_reader(file)

    def test_file_cut_short_while_in_use(self, source, columns):
        reader = open_reader(source)
        assert_rows(reader.read([1]), columns, [1])
        for file in data_files(source):
            os.truncate(file, file.stat().st_size // 2)
        with may_raise(CorruptFileError, str(source)):  # What was decoded before may be delivered, and must be right.
            assert_rows(reader.read(range(40)), columns, range(40))
        reader.close()
        with pytest.raises(FastIOError, match=r"changed|incomplete"):
            reader.read(range(40))


@contextmanager
def may_raise(kind: type[Exception], part: str) -> Iterator[None]:
    """What happens inside either succeeds or raises this error, with this in its message."""
    try:
        yield
    except kind as error:
        if part not in str(error):
            raise


def data_files(source: Path) -> list[Path]:
    """The files of a source that hold data."""
    return [source] if source.is_file() else sorted(source.glob("*.npy"))


def digest(source: Path) -> str:
    """A hash of all files of a source."""
    files = [source] if source.is_file() else sorted(source.iterdir())
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


def num_descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))
