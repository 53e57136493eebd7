"""CSV, Arrow and Feather files and Hugging Face dataset folders, by way of a Parquet copy.

These formats are read from front to back. A copy in Parquet, removed afterwards, gives them what the Parquet reader
has: ranges of rows, lists that are measured over all rows, one vocabulary for each categorical column, rules for
nulls. It costs one pass over the disk, in bounded memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from lightning_fastio.convert.files import dataset_files, is_dataset_folder
from lightning_fastio.errors import CorruptFileError, FormatError

CSV_SUFFIXES = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")

_BLOCK_BYTES = 8 << 20
_GROUP_BYTES = 32 << 20
_CSV_NULLS = ["", "NA", "null", "NULL"]
# Narrow to wide: a column takes the first type to which every value of the files converts.
_CSV_TYPES = (pa.int64(), pa.float64(), pa.bool_(), pa.string())


def is_arrow(source: Any) -> bool:
    """Whether a source is one that goes by way of a copy."""
    files = source if isinstance(source, list) else [source]
    return all(
        isinstance(file, Path)
        and (file.name.lower().endswith(CSV_SUFFIXES + ARROW_SUFFIXES) or is_dataset_folder(file))
        for file in files
    )


def spill(source: Path | list[Path], workspace: Path) -> Path:
    """Copy into a Parquet file whose rows can be found.

    Args:
        source: A file, a dataset folder, or a list of them with equal columns.
        workspace: Folder for the copy.

    Raises:
        FormatError: The files have different columns, or no rows.
        CorruptFileError: A file cannot be parsed.
    """
    workspace.mkdir(parents=True, exist_ok=True)
    path = workspace / f"source-{os.getpid()}.parquet"
    files = [
        part
        for file in (source if isinstance(source, list) else [source])
        for part in (dataset_files(file) if is_dataset_folder(file) else [file])
    ]
    writer: pq.ParquetWriter | None = None
    try:
        for file in files:
            with _errors_of(file):
                for batch in _batches(file, files):
                    if writer is None:
                        writer = pq.ParquetWriter(path, batch.schema, compression="none", write_statistics=True)
                    elif batch.schema != writer.schema:
                        raise FormatError(
                            f"{file}: columns {batch.schema.names} differ from {writer.schema.names} of {files[0]}, "
                            f"or their types do"
                        )
                    writer.write_batch(
                        batch, row_group_size=max(1, _GROUP_BYTES * batch.num_rows // max(1, batch.nbytes))
                    )
        if writer is None:
            raise FormatError(f"{source}: there are no rows")
        writer.close()
    except BaseException:
        if writer is not None:
            writer.close()
        path.unlink(missing_ok=True)
        with suppress(OSError):
            workspace.rmdir()
        raise
    return path


def class_names(schema: pa.Schema) -> list[str] | None:
    """Class names that Hugging Face datasets stores with the schema: those of ``label``, or of the only such column."""
    features = hub_features(schema)
    named = {name: feature["names"] for name, feature in features.items() if feature.get("_type") == "ClassLabel"}
    if "label" in named:
        return list(named["label"])
    return list(next(iter(named.values()))) if len(named) == 1 else None


def hub_features(schema: pa.Schema) -> dict[str, dict[str, Any]]:
    """The description of the columns by Hugging Face datasets; empty where there is none."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return {}
    features = json.loads(text).get("info", {}).get("features") or {}
    return {name: feature for name, feature in features.items() if isinstance(feature, dict)}


def _batches(file: Path, files: list[Path]) -> Iterator[pa.RecordBatch]:
    if file.name.lower().endswith(CSV_SUFFIXES):
        types = _csv_types(files)
        yield from _read_csv(file, types)
        return
    yield from ipc_batches(file)


def ipc_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Batches of an Arrow or Feather file, mapped into memory."""
    with pa.memory_map(str(file)) as stream:
        try:
            reader = pa.ipc.open_file(stream)
        except pa.ArrowInvalid:
            # Hugging Face datasets writes the streaming kind, Feather the one with a footer.
            stream.seek(0)
            yield from pa.ipc.open_stream(stream)
            return
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index)


def _csv_types(files: list[Path]) -> dict[str, pa.DataType]:
    """The narrowest type of each column over ALL rows: a guess from the first ones breaks on a later one."""
    possible: dict[str, list[pa.DataType]] = {}
    for file in files:
        for batch in _read_csv(file, None):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                types = possible.setdefault(name, list(_CSV_TYPES))
                while len(types) > 1 and not _converts(column, types[0]):
                    types.pop(0)
    return {name: types[0] for name, types in possible.items()}


def _converts(column: pa.Array, type_: pa.DataType) -> bool:
    """Whether every value is of a type; numbers such as 007 are names, which would lose their zeros."""
    try:
        pc.cast(column, type_)
    except pa.ArrowInvalid:
        return False
    return type_ == pa.bool_() or not pc.any(pc.match_substring_regex(column, "^[+-]?0[0-9]"), min_count=0).as_py()


def _read_csv(file: Path, types: dict[str, pa.DataType] | None) -> Iterator[pa.RecordBatch]:
    """Batches of a CSV file; without ``types``, all columns as text."""
    parse = pa_csv.ParseOptions(delimiter="\t" if ".tsv" in file.name.lower() else ",", newlines_in_values=True)
    scanning = types is None
    if types is None:
        with pa_csv.open_csv(file, parse_options=parse) as reader:
            types = dict.fromkeys(reader.schema.names, pa.string())
    # Text keeps its empty values and its "NA"; to numbers they are nulls; while the types are open, either.
    convert = pa_csv.ConvertOptions(column_types=types, strings_can_be_null=scanning, null_values=_CSV_NULLS)
    read = pa_csv.ReadOptions(block_size=_BLOCK_BYTES)
    with pa_csv.open_csv(file, read, parse, convert) as reader:
        yield from reader


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    try:
        yield
    except pa.ArrowInvalid as error:
        raise CorruptFileError(f"{file}: cannot be parsed: {error}") from error
