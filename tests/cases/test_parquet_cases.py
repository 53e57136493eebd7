"""What went wrong for people who trained from Parquet with other tools, and the right answer here."""

from __future__ import annotations

import datetime
import decimal
import logging
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lightning_fastio import ParquetDataModule
from lightning_fastio.errors import FormatError, SchemaError
from lightning_fastio.formats.parquet import open_source, open_target
from lightning_fastio.formats.parquet.files import Files


def write(path: Path, table: pa.Table | dict[str, Any], **options: Any) -> Path:
    pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), path, **options)
    return path


def everything(source: Any, fields: Any = None, **options: Any) -> dict[str, Any]:
    """All rows of a source."""
    with closing(open_source(source, fields, **options)) as reader:
        return dict(reader.read(range(len(reader))))


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """Counts how often row groups are decoded."""
    counts: Counter[tuple[int, ...]] = Counter()
    read = Files.read

    def counting(self: Files, index: int, groups: list[int], *args: Any, **options: Any) -> pa.Table:
        counts[(index, *groups)] += 1
        return read(self, index, groups, *args, **options)

    monkeypatch.setattr(Files, "read", counting)
    return counts


class TestP4NullRowsInsideListColumns:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        vectors = pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32()))
        return write(tmp_path / "a.parquet", {"id": [1, 2, 3], "x": vectors})

    def test_are_refused_by_name_when_opening(self, path: Path) -> None:
        with pytest.raises(FormatError, match=r"'x' has 1 null.*row 1 of .*null_fill"):
            open_source(path, ["x", "id"])

    def test_are_left_out_with_a_notice_when_not_named(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        assert list(open_source(path).schema) == ["id"]
        assert "'x' has 1 null among 3 values" in caplog.text

    def test_are_filled_and_later_rows_stay_in_place(self, path: Path) -> None:
        batch = everything(path, null_fill={"x": -1.0})
        assert batch["x"].tolist() == [[1, 2], [-1, -1], [3, 4]]
        assert batch["id"].tolist() == [1, 2, 3]

    def test_are_empty_rows_of_a_list(self, path: Path) -> None:
        batch = everything(path, null_fill=0.0, ragged="list")
        assert [row.tolist() for row in batch["x"]] == [[1, 2], [], [3, 4]]

    def test_fixed_size_lists(self, tmp_path: Path) -> None:
        vectors = pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2))
        path = write(tmp_path / "a.parquet", {"x": vectors})
        assert everything(path, null_fill=7)["x"].tolist() == [[1, 2], [7, 7], [3, 4]]


class TestP8ShardsInNaturalOrder:
    @pytest.fixture
    def paths(self, tmp_path: Path) -> list[Path]:
        return [write(tmp_path / f"part-{number}.parquet", {"y": [number]}) for number in range(12)]

    def test_of_a_folder(self, paths: list[Path]) -> None:
        assert everything(paths[0].parent)["y"].tolist() == list(range(12))

    def test_of_a_glob(self, paths: list[Path]) -> None:
        assert everything(f"{paths[0].parent}/part-*.parquet")["y"].tolist() == list(range(12))

    def test_a_list_is_kept_as_given(self, paths: list[Path]) -> None:
        assert everything([paths[10], paths[2]])["y"].tolist() == [10, 2]


def test_p9_one_huge_row_group(
    tmp_path: Path, decoded: Counter[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    values = np.arange(100_000)
    path = write(tmp_path / "huge.parquet", {"y": values}, row_group_size=100_000)
    reader = open_source(path, cache_bytes=1 << 16)
    assert str(path) in caplog.text
    assert "fastio convert" in caplog.text
    decoded.clear()
    rows = np.random.default_rng(0).integers(0, len(reader), 200)
    assert [int(reader.read([row])["y"]) for row in rows.tolist()] == rows.tolist()  # type: ignore[arg-type]
    assert sum(decoded.values()) <= 2
    reader.close()


class TestP10ManyTinyRowGroups:
    def test_open_with_a_warning_and_read_right(
        self, tmp_path: Path, decoded: Counter[tuple[int, ...]], caplog: pytest.LogCaptureFixture
    ) -> None:
        path = write(tmp_path / "tiny.parquet", {"y": np.arange(5000)}, row_group_size=1)
        reader = open_source(path)
        assert "5000 row groups hold 1 rows each" in caplog.text
        assert len(reader.blocks) - 1 <= 100
        rows = np.random.default_rng(0).permutation(5000)
        assert reader.read(rows)["y"].tolist() == rows.tolist()  # type: ignore[union-attr]
        assert sum(decoded.values()) <= 100
        reader.close()

    def test_the_writer_gathers_rows(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        with open_target(path) as writer:
            for number in range(300):
                writer.write({"y": [number]})
        assert pq.ParquetFile(path).num_row_groups == 1
        assert everything(path)["y"].tolist() == list(range(300))


def test_p11_memory_is_bounded_by_the_cache(tmp_path: Path) -> None:
    group_bytes = 1 << 20
    rows = np.random.default_rng(0).integers(0, 255, (40 * 64, group_bytes // 64), dtype=np.uint8)
    path = tmp_path / "a.parquet"
    with open_target(path, block_bytes=group_bytes) as writer:
        writer.write({"x": rows})
    reader = open_source(path, cache_bytes=3 * group_bytes)
    assert len(reader.blocks) == 41
    before, most = pa.total_allocated_bytes(), 0
    for start in range(0, len(rows), 64):
        reader.will_need(range(start, min(start + 256, len(rows))))
        assert torch.equal(reader.read(range(start, start + 64))["x"], torch.from_numpy(rows[start : start + 64]))  # type: ignore[arg-type]
        most = max(most, pa.total_allocated_bytes() - before)
    reader.close()
    assert most <= 6 * group_bytes, "the cache, and a group in the hands of each thread"


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_p12_reading_before_and_after_workers_start(tmp_path: Path, start_method: str) -> None:
    write(tmp_path / "a.parquet", {"y": np.arange(1000), "s": [str(i) for i in range(1000)]}, row_group_size=100)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing, warnings
        from lightning_fastio.formats.parquet import open_source

        def total(reader, start, results):
            results.put(int(reader.read(range(start, start + 500))["y"].sum()))

        if __name__ == "__main__":
            warnings.simplefilter("ignore")
            reader = open_source({str(tmp_path / "a.parquet")!r}, filters=[("y", ">=", 0)])
            reader.will_need(range(1000))
            assert int(reader.read(range(1000))["y"].sum()) == 499500
            context = multiprocessing.get_context({start_method!r})
            results = context.Queue()
            workers = [context.Process(target=total, args=(reader, start, results)) for start in (0, 500)]
            for worker in workers:
                worker.start()
            assert sorted(results.get(timeout=50) for _ in workers) == [124750, 374750]
            for worker in workers:
                worker.join(50)
                assert worker.exitcode == 0
        """)
    )
    subprocess.run([sys.executable, script], check=True, timeout=60)


class TestP13NestedColumnsThatDecodeIntoSeveralChunks:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(tmp_path / "a.parquet", {"x": [[i, i + 1] for i in range(3000)]})

    @staticmethod
    def fail(*args: Any, **options: Any) -> pa.Table:
        raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")

    def test_are_read_in_smaller_batches(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reader = open_source(path)
        monkeypatch.setattr(pq.ParquetFile, "read_row_groups", self.fail)
        assert reader.read([2999, 0])["x"].tolist() == [[2999, 3000], [0, 1]]  # type: ignore[union-attr]

    def test_or_else_the_error_names_the_column(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        reader = open_source(path)
        monkeypatch.setattr(pq.ParquetFile, "read_row_groups", self.fail)
        monkeypatch.setattr(pq.ParquetFile, "iter_batches", self.fail)
        with pytest.raises(FormatError, match=r"cannot decode 'x'.*smaller row groups"):
            reader.read([0])


def test_p14_the_writer_cuts_row_groups_by_bytes(tmp_path: Path) -> None:
    images = [np.random.default_rng(i).bytes(200_000) for i in range(20)]
    path = tmp_path / "a.parquet"
    with open_target(path, block_bytes=1_000_000) as writer:
        writer.write({"image": images, "y": list(range(20))})
    assert pq.ParquetFile(path).num_row_groups == 5
    assert everything(path)["image"] == images


class TestP15DecimalDateAndTimestampColumns:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        day = datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)
        table = {
            "x": [0.5, 1.5],
            "ts": pa.array([day, day + datetime.timedelta(seconds=1)], pa.timestamp("us", "UTC")),
            "d": pa.array([decimal.Decimal("1.25"), decimal.Decimal("-0.10")], pa.decimal128(10, 2)),
            "day": pa.array([day.date(), day.date()], pa.date32()),
            "span": pa.array([datetime.timedelta(seconds=2)] * 2, pa.duration("ms")),
            "clock": pa.array([datetime.time(1)] * 2, pa.time32("ms")),
        }
        return write(tmp_path / "a.parquet", table)

    def test_do_not_matter_when_they_are_not_selected(self, path: Path) -> None:
        assert everything(path, ["x"])["x"].tolist() == [0.5, 1.5]

    def test_become_numbers_by_rule(self, path: Path) -> None:
        batch = everything(path)
        assert batch["ts"].tolist() == [1704067200_000000, 1704067201_000000]
        assert batch["d"].tolist() == [1.25, -0.1]
        assert batch["d"].dtype == torch.float64
        assert batch["day"].tolist() == [19723, 19723]
        assert batch["span"].tolist() == [2000, 2000]
        assert batch["clock"].tolist() == [3600_000, 3600_000]


class TestP16ZeroRows:
    def test_files_and_row_groups_count_as_zero(self, tmp_path: Path) -> None:
        schema = pa.schema([("y", pa.int64())])
        with pq.ParquetWriter(tmp_path / "0.parquet", schema):
            pass
        with pq.ParquetWriter(tmp_path / "1.parquet", schema) as writer:
            for values in ([0], [], [1]):
                writer.write_table(pa.table({"y": pa.array(values, pa.int64())}))
        write(tmp_path / "2.parquet", {"y": pa.array([2, 3, 4])})
        assert [pq.ParquetFile(tmp_path / f"{i}.parquet").num_row_groups for i in range(3)] == [0, 3, 1]
        reader = open_source(tmp_path)
        assert reader.blocks.tolist() == [0, 1, 2, 5]
        assert reader.read([4, 0, 3, 1, 2])["y"].tolist() == [4, 0, 3, 1, 2]  # type: ignore[union-attr]

    def test_nothing_at_all_is_an_error(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"y": pa.array([], pa.int64())})
        with pytest.raises(SchemaError, match="has no row"):
            open_source(path)


def test_p17_columns_are_selected_by_name(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", {"a": [1, 2], "b": [10, 20]})
    write(tmp_path / "2.parquet", {"b": [30], "a": [3]})
    batch = everything(tmp_path, {"x": ["b", "a"]})
    assert batch["x"].tolist() == [[10, 1], [20, 2], [30, 3]]
    assert list(everything(tmp_path, ["b", "a"])) == ["b", "a"]


def test_p18_the_index_of_a_pandas_frame_is_no_feature(tmp_path: Path) -> None:
    metadata = {"pandas": '{"index_columns": ["__index_level_0__"], "columns": []}'}
    table = pa.table({"x": [1.0], "__index_level_0__": [17]}).replace_schema_metadata(metadata)
    path = write(tmp_path / "a.parquet", table)
    assert list(open_source(path).schema) == ["x"]
    assert everything(path, ["__index_level_0__"])["__index_level_0__"].tolist() == [17]


class TestP19DotsAndUnknownNames:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(tmp_path / "a.parquet", {"a.x": [1, 2], "a": [{"x": 3, "y": 4}, {"x": 5, "y": 6}]})

    def test_an_exact_name_wins(self, path: Path) -> None:
        assert everything(path, ["a.x"])["a.x"].tolist() == [1, 2]

    def test_struct_members_by_dotted_name(self, path: Path) -> None:
        assert everything(path, ["a.y"])["a.y"].tolist() == [4, 6]
        assert list(open_source(path).schema) == ["a.x", "a.y"]

    def test_an_unknown_name_lists_near_ones(self, path: Path) -> None:
        with pytest.raises(SchemaError, match=r"no field 'zz'; it has 'a\.x', 'a'"):
            open_source(path, ["zz"])
        with pytest.raises(SchemaError, match=r"no field 'a\.z'; did you mean .*'a\.x'"):
            open_source(path, ["a.z"])


class TestP20FixedShapeTensors:
    @staticmethod
    def column(values: list[Any], shape: list[int], **options: Any) -> pa.ExtensionArray:
        type_ = pa.fixed_shape_tensor(pa.float32(), shape, **options)
        return pa.ExtensionArray.from_storage(type_, pa.array(values, type_.storage_type))

    def test_keep_shape_and_dtype(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"x": self.column([[1, 2, 3, 4], [5, 6, 7, 8]], [2, 2])})
        batch = everything(path)
        assert batch["x"].dtype == torch.float32
        assert batch["x"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]

    def test_a_permutation_gives_the_logical_shape(self, tmp_path: Path) -> None:
        column = self.column([[1, 2, 3, 4, 5, 6]], [2, 3], permutation=[1, 0])
        batch = everything(write(tmp_path / "a.parquet", {"x": column}))
        assert batch["x"].tolist() == [[[1, 4], [2, 5], [3, 6]]]
        assert np.array_equal(batch["x"].numpy(), column.to_numpy_ndarray())

    def test_a_null_is_refused_or_filled(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"x": self.column([[1, 2], None], [2])})
        with pytest.raises(FormatError, match="'x' has 1 null"):
            open_source(path)
        assert everything(path, null_fill=0)["x"].tolist() == [[1, 2], [0, 0]]


class TestP21ListsOfEqualLength:
    def test_are_tensors(self, tmp_path: Path) -> None:
        flat = pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.float32()))
        nested = pa.array([[[1, 2, 3], [4, 5, 6]]] * 2, pa.list_(pa.list_(pa.float32())))
        batch = everything(write(tmp_path / "a.parquet", {"flat": flat, "nested": nested}))
        assert batch["flat"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
        assert batch["nested"].tolist() == [[[1, 2, 3], [4, 5, 6]]] * 2
        assert batch["nested"].dtype == torch.float32

    @pytest.fixture
    def ragged(self, tmp_path: Path) -> Path:
        """One row of 2,000 differs, far behind the rows that are looked at first."""
        rows = [[i, i] for i in range(2000)]
        rows[1700] = [1, 2, 3]
        return write(tmp_path / "a.parquet", {"x": rows}, row_group_size=500)

    def test_one_ragged_row_makes_a_list(self, ragged: Path) -> None:
        reader = open_source(ragged)
        assert reader.schema["x"].kind == "ragged"
        assert [row.tolist() for row in reader.read([1699, 1700])["x"]] == [[1699, 1699], [1, 2, 3]]

    def test_or_is_refused_with_its_row(self, ragged: Path) -> None:
        with pytest.raises(FormatError, match=r"'x', row 1700 of .*3 values.*have 2"):
            open_source(ragged, ragged="error")

    def test_or_is_padded(self, ragged: Path) -> None:
        batch = open_source(ragged, ragged="pad").read([1699, 1700])
        assert batch["x"].tolist() == [[1699, 1699, 0], [1, 2, 3]]  # type: ignore[union-attr]


class TestP22NullLabels:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write(tmp_path / "a.parquet", {"x": [1, 2, 3], "y": [1.0, None, float("nan")]})

    def test_are_refused_when_opening_and_told_apart_from_nan(self, path: Path) -> None:
        with pytest.raises(FormatError, match=r"'y' has 1 null among 3 values \(1 are NaN.*row 1 of"):
            open_source(path, ["x", "y"])

    def test_do_not_matter_when_not_selected(self, path: Path) -> None:
        assert everything(path, ["x"])["x"].tolist() == [1, 2, 3]

    def test_are_filled_while_nan_stays(self, path: Path) -> None:
        y = everything(path, null_fill={"y": -1.0})["y"]
        assert y[:2].tolist() == [1, -1]
        assert y[2].isnan()

    def test_are_filtered(self, path: Path) -> None:
        batch = everything(path, filters=~pa.compute.field("y").is_null())
        assert batch["x"].tolist() == [1, 3]

    def test_large_integers_stay_exact(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"y": pa.array([2**62 + 1, None])})
        assert everything(path, null_fill=-1)["y"].tolist() == [2**62 + 1, -1]


def test_p23_stray_files_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning_fastio")
    for name in ("_SUCCESS", ".x.crc", "notes.txt", "a.parquet.tmp", "_metadata", ".hidden.parquet"):
        (tmp_path / name).write_bytes(b"stray")
    write(tmp_path / "a.parquet", {"y": [1]})
    write(tmp_path / "b.PARQUET", {"y": [2]})
    assert everything(tmp_path)["y"].tolist() == [1, 2]
    assert "a.parquet.tmp" in caplog.text


def test_codes_mean_the_same_in_training_and_validation(tmp_path: Path) -> None:
    paths = {}
    for stage, names in {"train": ["b", "a", "c"], "val": ["a", "c", "b"], "test": ["c", "b"]}.items():
        path = tmp_path / f"{stage}.parquet"
        paths[stage] = str(write(path, {"x": [0.0] * len(names), "label": pa.array(names).dictionary_encode()}))
    data = ParquetDataModule(train=paths["train"], val=paths["val"], test=paths["test"])
    data.setup("fit")
    assert next(iter(data.val_dataloader()))["label"].tolist() == [0, 2, 1]
    with pytest.raises(SchemaError, match=r"'label': its codes mean \['b', 'c'\] .*test.parquet.* \['a', 'b', 'c'\]"):
        data.setup("test")
    data.teardown("fit")


def test_no_thread_is_left_after_close(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    reader = open_source(write(tmp_path / "a.parquet", {"y": np.arange(1000)}, row_group_size=10))
    reader.will_need(range(1000))
    assert reader.read([999])["y"].tolist() == [999]  # type: ignore[union-attr]
    reader.close()
    assert not set(threading.enumerate()) - before
