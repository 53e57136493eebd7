"""Tables of encoded pictures: the layout of Hugging Face image sets, in Parquet or ``save_to_disk`` folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from lightning_fastio.convert.arrow import class_names, hub_features, ipc_batches
from lightning_fastio.convert.files import dataset_files, is_dataset_folder
from lightning_fastio.convert.images import class_metadata, task_pictures
from lightning_fastio.convert.manifest import fingerprint
from lightning_fastio.convert.pictures import EncodedPictures, LoadPictures
from lightning_fastio.convert.pixels import ImageRules
from lightning_fastio.convert.source import Source, Task
from lightning_fastio.errors import CorruptFileError, FormatError

_BATCH_ROWS = 64


@dataclass(kw_only=True)
class EncodedImages(Source):
    """Encoded pictures in the rows of tables; see `open_encoded`."""

    files: list[Path]
    column: str
    task_pictures: int

    def tasks(self) -> Iterator[Task]:
        """Runs of rows; their bytes travel with the task."""
        for file in self.files:
            row = 0
            for batch in read_batches(file):
                for start in range(0, batch.num_rows, self.task_pictures):
                    pictures = to_pictures(batch.slice(start, self.task_pictures), self.column, file, row + start)
                    yield Task(pictures, len(pictures.names), sum(map(len, pictures.data)))
                row += batch.num_rows


def open_encoded(
    files: list[Path],
    rules: ImageRules,
    *,
    classes: Sequence[str] | None = None,
    encoded: bool = False,
    ragged: bool = False,
    with_path: bool = True,
) -> EncodedImages:
    """Open tables with a column of encoded pictures.

    The column is a struct of ``bytes`` and ``path``, or binary. Columns of numbers and text become fields of the
    same name. ``ClassLabel`` names become the class mapping.

    Args:
        files: Parquet or Arrow files with equal columns, in this order.
        rules: How pictures become arrays.
        classes: Class names, where the files have none.
        encoded: Keep the encoded bytes.
        ragged: Store pictures of any size.
        with_path: Give rows a field ``path``.

    Raises:
        FormatError: There is no such column, or no rows.
    """
    schema = _schema_of(files[0])
    column = image_column(schema)
    if column is None:
        raise FormatError(f"{files[0]}: no column of encoded pictures; the columns are {schema.names}")
    first = next((batch for file in files for batch in read_batches(file)), None)
    if first is None:
        raise FormatError(f"{files[0]}: there are no rows")
    sample = to_pictures(first, column, files[0], 0)
    return EncodedImages(
        load=LoadPictures(rules, encoded=encoded, ragged=ragged, with_path=with_path),
        fingerprint=fingerprint(((file.name, os.stat(file)) for file in files), asdict(rules)),
        num_items=sum(map(_num_rows, files)) if all(file.suffix == ".parquet" for file in files) else None,
        metadata=class_metadata(classes or class_names(schema) or []),
        files=files,
        column=column,
        task_pictures=task_pictures(sample, rules, encoded=encoded, ragged=ragged),
    )


def image_column(schema: pa.Schema) -> str | None:
    """The column of encoded pictures: declared as an image, a struct of bytes and path, or binary called image."""
    declared = [name for name, feature in hub_features(schema).items() if feature.get("_type") == "Image"]
    structs = [
        entry.name
        for entry in schema
        if pa.types.is_struct(entry.type) and {"bytes", "path"} <= {member.name for member in entry.type}
    ]
    binary = [entry.name for entry in schema if _is_binary(entry.type) and entry.name in ("image", "img", "jpg", "png")]
    return next((name for name in (*declared, *structs, *binary) if name in schema.names), None)


def has_encoded_images(path: Path) -> bool:
    """Whether a Parquet file or dataset folder has a column of encoded pictures."""
    try:
        return image_column(_schema_of(dataset_files(path)[0] if is_dataset_folder(path) else path)) is not None
    except (pa.ArrowException, OSError):
        # Not readable: whoever opens it as a table says why.
        return False


def read_batches(file: Path) -> Iterator[pa.RecordBatch]:
    """Rows of a Parquet or Arrow file from front to back, a few at a time.

    Raises:
        CorruptFileError: The file is damaged.
    """
    try:
        if file.suffix == ".parquet":
            with pq.ParquetFile(file, page_checksum_verification=True) as table:
                yield from table.iter_batches(_BATCH_ROWS)
        else:
            yield from ipc_batches(file)
    except (pa.ArrowException, OSError) as error:
        raise CorruptFileError(f"{file}: {error}") from error


def to_pictures(batch: pa.RecordBatch, column: str, file: Path, first_row: int) -> EncodedPictures:
    """Rows of a table as pictures.

    Raises:
        FormatError: A row has no picture, or a null in another column.
    """
    values = batch.column(column)
    stored_names: list[str | None] = [None] * batch.num_rows
    if pa.types.is_struct(values.type):
        stored_names = values.field("path").to_pylist()
        values = values.field("bytes")
    data = values.to_pylist()
    for index, entry in enumerate(data):
        if entry is None:
            raise FormatError(
                f"{file}, row {first_row + index}: the bytes of the picture are not in the file, which only names "
                f"{stored_names[index]!r}"
            )
    names = [name or f"{file.name}#{first_row + index}" for index, name in enumerate(stored_names)]
    columns = {
        name: _plain(batch.column(name), f"{file}, column {name}") for name in _plain_columns(batch.schema, column)
    }
    return EncodedPictures(names, data, columns=columns)


def _plain_columns(schema: pa.Schema, image: str) -> list[str]:
    return [
        entry.name
        for entry in schema
        if entry.name not in (image, "path", "mask", "shape")
        and (
            pa.types.is_integer(entry.type)
            or pa.types.is_floating(entry.type)
            or pa.types.is_boolean(entry.type)
            or pa.types.is_string(entry.type)
            or pa.types.is_large_string(entry.type)
        )
    ]


def _plain(values: pa.Array, where: str) -> Any:
    if values.null_count:
        raise FormatError(f"{where}: {values.null_count} nulls; fill or drop them first")
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        return values.to_pylist()
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _is_binary(type_: pa.DataType) -> bool:
    return bool(pa.types.is_binary(type_) or pa.types.is_large_binary(type_))


def _schema_of(file: Path) -> pa.Schema:
    if file.suffix == ".parquet":
        return pq.read_schema(file)
    return next(islice(ipc_batches(file), 1)).schema


def _num_rows(file: Path) -> int:
    return int(pq.read_metadata(file).num_rows)
