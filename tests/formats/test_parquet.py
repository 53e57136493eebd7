"""Parquet: what each column type becomes, sources, filters, nulls, and what is refused."""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from lightning_fastio.errors import ConfigError, CorruptFileError, FileAccessError, FormatError, SchemaError
from lightning_fastio.formats import open_reader
from lightning_fastio.formats.base import row_bytes
from lightning_fastio.formats.parquet import open_source, open_target
from lightning_fastio.schema import FieldSpec


def write(path: Path, columns: pa.Table | dict[str, Any], **options: Any) -> Path:
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


def everything(source: Any, fields: Any = None, **options: Any) -> dict[str, Any]:
    """All rows of a source."""
    with closing(open_source(source, fields, **options)) as reader:
        return dict(reader.read(range(len(reader))))


NUMBERS = {
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "uint16": torch.int32,
    "uint32": torch.int64,
    "uint64": torch.int64,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "bool": torch.bool,
}


class TestTypes:
    @pytest.mark.parametrize(("stored", "delivered"), NUMBERS.items())
    def test_numbers(self, tmp_path: Path, stored: str, delivered: torch.dtype) -> None:
        values = np.array([0, 1, 100, 7]).astype(stored)
        batch = everything(write(tmp_path / "a.parquet", {"x": pa.array(values)}))
        assert batch["x"].dtype == delivered
        assert batch["x"].tolist() == values.tolist()

    def test_unsigned_as_they_are(self, tmp_path: Path) -> None:
        values = np.array([0, 2**64 - 1], np.uint64)
        path = write(tmp_path / "a.parquet", {"x": pa.array(values)})
        batch = everything(path, widen_unsigned=False)
        assert batch["x"].dtype == torch.uint64
        assert batch["x"].numpy().tolist() == values.tolist()
        with pytest.raises(FormatError, match=r"'x', row 1 of .*18446744073709551615 does not fit.*widen_unsigned"):
            everything(path)

    def test_text_of_every_width(self, tmp_path: Path) -> None:
        texts = ["", "ä", "a longer text than fits a view"]
        columns = {str(type_): pa.array(texts, type_) for type_ in (pa.string(), pa.large_string())}
        columns |= {"view": pa.array(texts, pa.string_view())} if hasattr(pa, "string_view") else {}
        assert everything(write(tmp_path / "a.parquet", columns)) == dict.fromkeys(columns, texts)

    def test_bytes(self, tmp_path: Path) -> None:
        values = [b"", b"\x00\xff", b"a" * 100]
        columns = {"small": pa.array(values, pa.binary()), "large": pa.array(values, pa.large_binary())}
        path = write(tmp_path / "a.parquet", columns)
        assert everything(path) == dict.fromkeys(columns, values)
        assert open_source(path).schema["small"] == FieldSpec(None, kind="bytes")

    def test_a_tensor_column_is_a_view_of_what_was_decoded(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        images = np.random.default_rng(0).integers(0, 255, (50, 8, 8, 3), dtype=np.uint8)
        with open_target(path, compression="zstd") as writer:
            writer.write({"x": images})
        with closing(open_source(path)) as reader:
            assert not reader._decode(0)["x"].rows.flags.owndata  # type: ignore[union-attr]
            assert torch.equal(reader.read([7, -1])["x"], torch.from_numpy(images[[7, -1]]))  # type: ignore[arg-type]

    def test_plain_fixed_size_binary_is_uint8(self, tmp_path: Path) -> None:
        column = pa.array([b"abc", b"xyz"], pa.binary(3))
        assert everything(write(tmp_path / "a.parquet", {"x": column}))["x"].tolist() == [[97, 98, 99], [120, 121, 122]]

    def test_any_tool_reads_tensor_columns(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
        with open_target(path) as writer:
            writer.write({"x": values})
        table = pq.read_table(path)
        metadata = table.schema.field("x").metadata
        assert metadata[b"fastio.dtype"] == b"float32"
        assert metadata[b"fastio.shape"] == b"[3, 4]"
        second = np.frombuffer(table["x"][1].as_py(), "float32").reshape(3, 4)
        assert np.array_equal(second, values[1])

    def test_bool_bytes_other_than_0_and_1(self, tmp_path: Path) -> None:
        metadata = {"fastio.dtype": "bool", "fastio.shape": "[2]"}
        schema = pa.schema([pa.field("x", pa.binary(2), metadata=metadata)])
        table = pa.table([pa.array([b"\x00\x02", b"\xff\x01"], pa.binary(2))], schema=schema)
        assert everything(write(tmp_path / "a.parquet", table))["x"].view(torch.uint8).tolist() == [[0, 1], [1, 1]]

    def test_int96_timestamps_beyond_2262(self, tmp_path: Path) -> None:
        column = pa.array([32503680000_000000], pa.timestamp("us"))  # The year 3000.
        path = write(tmp_path / "a.parquet", {"t": column}, use_deprecated_int96_timestamps=True)
        assert everything(path)["t"].tolist() == [32503680000_000000]

    def test_sliced_lists_and_nested_fixed_size_lists(self, tmp_path: Path) -> None:
        lists = pa.array([[9, 9]] * 3 + [[1, 2], [3, 4]], pa.list_(pa.int16())).slice(3)
        fixed = pa.array([[[0, 0]] * 2] * 2 + [[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.int8(), 2), 2))
        batch = everything(write(tmp_path / "a.parquet", {"l": lists, "f": fixed.slice(2)}))
        assert batch["l"].tolist() == [[1, 2], [3, 4]]
        assert batch["f"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]

    def test_null_elements_inside_lists(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"x": pa.array([[1, None], [3, 4]], pa.list_(pa.int64()))})
        with pytest.raises(FormatError, match=r"'x' has 1 null among 4 values.*row 0 of"):
            open_source(path, ["x"])
        assert everything(path, null_fill=-1)["x"].tolist() == [[1, -1], [3, 4]]

    def test_ragged_lists_with_fixed_inner_shape(self, tmp_path: Path) -> None:
        rows = [[[1.0, 2.0]], [], [[3.0, 4.0], [5.0, 6.0]]]
        path = write(tmp_path / "a.parquet", {"x": pa.array(rows, pa.list_(pa.list_(pa.float32())))})
        with closing(open_source(path)) as reader:
            assert reader.schema["x"] == FieldSpec(torch.float32, (2,), kind="ragged")
            batch = reader.read([2, 1, 0])
        assert [row.tolist() for row in batch["x"]] == [rows[2], rows[1], rows[0]]
        assert batch["x"][1].shape == (0, 2)

    @pytest.mark.parametrize("write_statistics", [True, False])
    def test_lists_of_one_value_beside_empty_ones(self, tmp_path: Path, write_statistics: bool) -> None:
        rows = [[number] for number in range(2000)] + [[]]
        path = write(tmp_path / "a.parquet", {"x": rows}, write_statistics=write_statistics)
        assert [row.tolist() for row in everything(path)["x"]] == rows

    def test_lists_ragged_at_two_levels_are_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"x": [[[1], [2, 3]], [[4]]]})
        with pytest.raises(FormatError, match=r"'x'.*inner lists vary"):
            open_source(path, ["x"])

    def test_structs_within_structs(self, tmp_path: Path) -> None:
        rows = [{"in": {"a": 1, "l": [1, 2]}, "t": "u"}, {"in": {"a": 2, "l": [3, 4]}, "t": "v"}]
        path = write(tmp_path / "a.parquet", {"s": rows, "y": [5, 6]})
        batch = everything(path)
        assert list(batch) == ["s.in.a", "s.in.l", "s.t", "y"]
        assert batch["s.in.l"].tolist() == [[1, 2], [3, 4]]
        assert batch["s.t"] == ["u", "v"]
        with pytest.raises(FormatError, match=r"'s' cannot be loaded: it is a struct; .* 's\.in', 's\.t'"):
            open_source(path, ["s"])

    def test_nulls_of_a_struct_are_nulls_of_its_members(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"s": [{"a": 1}, None, {"a": 3}]})
        with pytest.raises(FormatError, match=r"'s\.a' has 1 null.*row 1 of"):
            open_source(path, ["s.a"])
        assert everything(path, null_fill={"s.a": 0})["s.a"].tolist() == [1, 0, 3]


class TestCategories:
    def test_one_vocabulary_for_all_files_and_row_groups(self, tmp_path: Path) -> None:
        for number, texts in enumerate((["b", "a", "b"], ["c", "b", "a"])):
            column = pa.array(texts).dictionary_encode()
            write(tmp_path / f"{number}.parquet", {"city": column}, row_group_size=2)
        with closing(open_source(tmp_path)) as reader:
            assert reader.schema["city"] == FieldSpec(torch.int64, categories=("a", "b", "c"))
            assert reader.read(range(6))["city"].tolist() == [1, 0, 1, 2, 1, 0]  # type: ignore[union-attr]

    def test_keep_the_order_of_an_ordered_categorical(self, tmp_path: Path) -> None:
        column = pa.DictionaryArray.from_arrays(pa.array([2, 0], pa.int8()), ["low", "mid", "high"], ordered=True)
        path = write(tmp_path / "a.parquet", {"level": column})
        assert open_source(path).schema["level"].categories == ("low", "mid", "high")
        assert everything(path)["level"].tolist() == [2, 0]

    def test_nulls_become_a_category_of_their_own(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"city": pa.array(["b", None, "a"]).dictionary_encode()})
        with closing(open_source(path, null_fill={"city": "unknown"})) as reader:
            assert reader.schema["city"].categories == ("a", "b", "unknown")
            assert reader.read(range(3))["city"].tolist() == [1, 2, 0]  # type: ignore[union-attr]

    def test_names_of_hugging_face_class_labels(self, tmp_path: Path) -> None:
        notes = '{"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}'
        table = pa.table({"label": [1, 0, 1]}).replace_schema_metadata({"huggingface": notes})
        path = write(tmp_path / "a.parquet", table)
        assert open_source(path).schema["label"] == FieldSpec(torch.int64, categories=("cat", "dog"))
        assert everything(path)["label"].tolist() == [1, 0, 1]

    def test_dictionaries_of_numbers_are_numbers(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"x": pa.array([10, 20, 10], pa.int32()).dictionary_encode()})
        assert everything(path)["x"].tolist() == [10, 20, 10]


class TestStacks:
    def test_columns_become_a_matrix_in_the_order_asked_for(self, tmp_path: Path) -> None:
        columns = {f"f{i}": np.arange(10_000, dtype=np.float32) + i / 16 for i in range(5)}
        path = write(tmp_path / "a.parquet", columns, row_group_size=6000)
        names = ["f3", "f0", "f4"]
        with closing(open_source(path, {"x": names, "z": "f1"})) as reader:
            assert reader.schema["x"] == FieldSpec(torch.float32, (3,))
            rows = np.random.default_rng(0).integers(0, 10_000, 500)
            batch = reader.read(rows)
        assert np.array_equal(batch["x"], np.stack([columns[name][rows] for name in names], axis=1))  # type: ignore[arg-type]
        assert np.array_equal(batch["z"], columns["f1"][rows])  # type: ignore[arg-type]

    def test_different_numbers_take_the_type_that_holds_both(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"a": pa.array([1, 2], pa.int32()), "b": [0.5, 1.5]})
        matrix = everything(path, {"x": ["a", "b"]})["x"]
        assert matrix.dtype == torch.float64
        assert matrix.tolist() == [[1, 0.5], [2, 1.5]]

    def test_equal_lists_stack_along_the_last_axis(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"a": [[1, 2, 3], [4, 5, 6]], "b": [[7, 8, 9], [0, 1, 2]]})
        assert everything(path, {"x": ["a", "b"]})["x"].tolist() == [
            [[1, 7], [2, 8], [3, 9]],
            [[4, 0], [5, 1], [6, 2]],
        ]

    def test_columns_of_different_shapes_are_refused(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"a": [1, 2], "b": [[1, 2], [3, 4]], "s": ["u", "v"]})
        with pytest.raises(SchemaError, match=r"'x' stacks.*a: int64, b: int64\[2\]"):
            open_source(path, {"x": ["a", "b"]})
        with pytest.raises(SchemaError, match="s: string"):
            open_source(path, {"x": ["a", "s"]})


class TestSources:
    def test_hive_partitions_are_fields(self, tmp_path: Path) -> None:
        for split, year, value in [("train", 2023, 1), ("train", 2024, 2), ("a b/c", 2024, 3)]:
            folder = tmp_path / f"split={split.replace('/', '%2F').replace(' ', '%20')}" / f"year={year}"
            folder.mkdir(parents=True)
            write(folder / "part-0.parquet", {"x": [value, value]})
        batch = everything(tmp_path)
        rows = sorted(zip(batch["x"].tolist(), batch["split"], batch["year"].tolist(), strict=True))
        assert rows[::2] == [(1, "train", 2023), (2, "train", 2024), (3, "a b/c", 2024)]
        batch = everything(tmp_path, ["year", "x"], filters=[("split", "==", "train"), ("year", ">", 2023)])
        assert {name: values.tolist() for name, values in batch.items()} == {"year": [2024, 2024], "x": [2, 2]}
        assert everything(tmp_path, ["year"])["year"].shape == (6,)

    def test_folder_names_above_the_source_are_no_fields(self, tmp_path: Path) -> None:
        folder = tmp_path / "run=3"
        folder.mkdir()
        write(folder / "a.parquet", {"x": [1]})
        assert list(open_source(folder).schema) == ["x"]
        assert list(open_source(folder / "a.parquet").schema) == ["x"]

    def test_files_that_differ_are_named(self, tmp_path: Path) -> None:
        write(tmp_path / "1.parquet", {"x": [1.0], "t": pa.array([1], pa.timestamp("us"))})
        write(tmp_path / "2.parquet", {"x": [1.0], "t": pa.array([1], pa.timestamp("ms"))})
        write(tmp_path / "3.parquet", {"t": pa.array([1], pa.timestamp("us"))})
        with pytest.raises(SchemaError, match=r"'t' is timestamp\[ms\] in .*2\.parquet, but timestamp\[us\] in .*1\."):
            open_source([tmp_path / "1.parquet", tmp_path / "2.parquet"])
        with pytest.raises(SchemaError, match=r"3\.parquet has no field 'x', but .*1\.parquet has"):
            open_source([tmp_path / "1.parquet", tmp_path / "3.parquet"])
        assert everything([tmp_path / "1.parquet", tmp_path / "2.parquet"], ["x"])["x"].tolist() == [1, 1]

    def test_more_files_than_may_be_open(self, tmp_path: Path) -> None:
        import resource

        for number in range(100):
            write(tmp_path / f"{number}.parquet", {"y": [number]})
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        try:
            assert everything(tmp_path)["y"].tolist() == list(range(100))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FileAccessError, match=r"none\.parquet"):
            open_source(tmp_path / "none.parquet")


class TestFilters:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        columns = {"y": np.arange(1000), "s": [str(i % 7) for i in range(1000)]}
        return write(tmp_path / "a.parquet", columns, row_group_size=100)

    def test_rows_are_numbered_in_file_order(self, path: Path) -> None:
        expected = [i for i in range(1000) if i % 7 == 3 and i >= 250]
        with closing(open_source(path, filters=[("s", "==", "3"), ("y", ">=", 250)])) as reader:
            assert reader.read(range(len(reader)))["y"].tolist() == expected  # type: ignore[union-attr]
            order = np.random.default_rng(0).permutation(len(reader))
            assert reader.read(order)["y"].tolist() == [expected[i] for i in order]  # type: ignore[union-attr]

    def test_expressions_alternatives_and_lists_as_in_yaml(self, path: Path) -> None:
        assert everything(path, filters=pc.field("y") < 3)["y"].tolist() == [0, 1, 2]
        assert everything(path, filters=[[("y", "==", 5)], [("y", "==", 999)]])["y"].tolist() == [5, 999]
        assert everything(path, filters=[["y", "<", 10], ["s", "in", ["1", "2"]]])["y"].tolist() == [1, 2, 8, 9]

    def test_row_groups_without_a_row_are_not_read(self, path: Path) -> None:
        with closing(open_source(path, filters=[("y", "in", [150, 950])])) as reader:
            assert reader.blocks.tolist() == [0, 1, 2]
            assert reader.read([1, 0])["y"].tolist() == [950, 150]  # type: ignore[union-attr]

    def test_the_fingerprint_tells_which_rows_pass(self, path: Path) -> None:
        prints = [
            open_source(path, filters=filters).fingerprint for filters in (None, [("y", "<", 9)], [("y", ">", 990)])
        ]
        assert len(set(prints)) == 3

    def test_none_passing_is_an_error(self, path: Path) -> None:
        with pytest.raises(SchemaError, match="no row that passes the filters"):
            open_source(path, filters=[("y", "<", 0)])

    def test_filters_that_do_not_fit(self, path: Path) -> None:
        for filters in ([("zz", "<", 0)], [("y", "~", 0)], "y < 3", pc.field("s") < 3):
            with pytest.raises(ConfigError, match="filters="):
                open_source(path, filters=filters)


class TestNulls:
    def test_are_found_when_opening_also_without_statistics(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"y": [1, None, 3]}, write_statistics=False)
        with closing(open_source(path, ["y"])) as reader, pytest.raises(FormatError, match=r"'y' has 1 null.*row 1 of"):
            reader.read([0])

    @pytest.mark.parametrize(
        ("values", "fill", "expected"),
        [
            ([True, None], False, [True, False]),
            (["a", None], "?", ["a", "?"]),
            ([b"a", None], b"", [b"a", b""]),
            ([1.5, None], float("inf"), [1.5, float("inf")]),
        ],
    )
    def test_are_filled_by_type(self, tmp_path: Path, values: list[Any], fill: Any, expected: list[Any]) -> None:
        batch = everything(write(tmp_path / "a.parquet", {"y": values}), null_fill={"y": fill})
        assert (batch["y"].tolist() if isinstance(batch["y"], torch.Tensor) else batch["y"]) == expected

    def test_one_fill_for_all_goes_where_it_fits(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"y": [1, None], "s": ["a", "b"]})
        assert everything(path, null_fill=0) == {"y": pytest.approx(torch.tensor([1, 0])), "s": ["a", "b"]}

    @pytest.mark.parametrize("fill", [0.5, 2**40, "a", None.__class__])
    def test_a_fill_that_would_be_changed_is_refused(self, tmp_path: Path, fill: Any) -> None:
        path = write(tmp_path / "a.parquet", {"y": pa.array([1, None], pa.int32())})
        with pytest.raises(ConfigError, match="null_fill="):
            open_source(path, null_fill={"y": fill})

    def test_a_fill_for_an_unknown_field(self, tmp_path: Path) -> None:
        with pytest.raises(SchemaError, match="no field 'yy'; did you mean 'y'"):
            open_source(write(tmp_path / "a.parquet", {"y": [1]}), null_fill={"yy": 0})


class TestRefused:
    def test_one_notice_lists_what_was_left_out(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        columns = {
            "x": [1],
            "m": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int32())),
            "l": [["a"]],
            "n": pa.nulls(1),
        }
        path = write(tmp_path / "a.parquet", columns)
        with caplog.at_level(logging.WARNING, "lightning_fastio"):
            assert list(open_source(path).schema) == ["x"]
        assert len(caplog.records) == 1
        assert all(f"field '{name}'" in caplog.text for name in "mln")
        assert "fields=['x']" in caplog.text
        for name in "mln":
            with pytest.raises(FormatError, match=f"field '{name}'"):
                open_source(path, [name])

    def test_nothing_that_can_be_loaded(self, tmp_path: Path) -> None:
        with pytest.raises(FormatError, match=r"no field that can be loaded: field 'l'"):
            open_source(write(tmp_path / "a.parquet", {"l": [["a"]]}))

    def test_duplicate_and_empty_names(self, tmp_path: Path) -> None:
        table = pa.table([pa.array([1]), pa.array([2]), pa.array([3]), pa.array([4])], names=["a", "a", "", "b"])
        path = write(tmp_path / "a.parquet", table)
        assert everything(path)["b"].tolist() == [4]
        with pytest.raises(FormatError, match="'a' cannot be loaded: 2 columns have this name"):
            open_source(path, ["a"])

    def test_declared_larger_than_the_file(self, tmp_path: Path) -> None:
        table = pa.table({"x": pa.array([b"ab"], pa.binary(2))})
        data = write(tmp_path / "a.parquet", table, store_schema=False).read_bytes()
        # In the footer, Thrift's compact protocol: physical type 7 (fixed-size binary), then its width of 2 bytes.
        head, footer = data.split(b"\x15\x0e\x15\x04", 1)
        gibibyte = b"\x80\x80\x80\x80\x08"
        size = int.from_bytes(data[-8:-4], "little") + len(gibibyte) - 1
        footer = footer[:-8] + size.to_bytes(4, "little") + b"PAR1"
        path = tmp_path / "b.parquet"
        path.write_bytes(head + b"\x15\x0e\x15" + gibibyte + footer)
        with pytest.raises(FormatError, match=r"declared with 1073741824 bytes a row"):
            open_source(path)

    def test_text_that_is_not_utf8(self, tmp_path: Path) -> None:
        column = pa.array([b"ok", b"\xff\xfe"]).view(pa.string())
        path = write(tmp_path / "a.parquet", {"s": column})
        with closing(open_source(path)) as reader:
            assert reader.read([0])["s"] == ["ok"]
            with pytest.raises(CorruptFileError, match="not valid UTF-8"):
                reader.read([1])

    def test_tensor_metadata_that_does_not_fit(self, tmp_path: Path) -> None:
        for metadata in ({"fastio.dtype": "float32", "fastio.shape": "[2]"}, {"fastio.dtype": "exec"}):
            schema = pa.schema([pa.field("x", pa.binary(2), metadata=metadata)])
            path = write(tmp_path / "a.parquet", pa.table([pa.array([b"ab"], pa.binary(2))], schema=schema))
            with pytest.raises(FormatError, match="'x'"):
                open_source(path)

    def test_a_file_that_changes_while_in_use(self, tmp_path: Path) -> None:
        path = write(tmp_path / "a.parquet", {"y": [1, 2, 3]})
        with closing(open_source(path)) as reader:
            write(path, {"y": [1, 2, 3, 4]})
            with pytest.raises(CorruptFileError, match=r"a\.parquet was changed while it was in use"):
                reader.read([0])


def test_rows_of_varying_length_are_weighed_by_what_they_hold(tmp_path: Path) -> None:
    table = pa.table({"image": [np.random.default_rng(row).bytes(20_000) for row in range(200)], "label": range(200)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=50)
    reader = open_reader(tmp_path / "x.parquet")
    assert 20_000 <= row_bytes(reader) < 25_000
    assert row_bytes(open_reader({"image": tmp_path / "x.parquet"})) >= 20_000
