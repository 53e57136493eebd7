"""Tables of labels beside pictures: CSV, TSV or JSON Lines."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_fastio.convert.manifest import escape_name
from lightning_fastio.errors import ConfigError, FileAccessError, FormatError

PATH_COLUMNS = ("file_name", "filename", "file", "path", "image", "image_path", "name", "id")


@dataclass(frozen=True)
class LabelTable:
    """Labels by the path of a picture."""

    paths: list[str]
    """The path in each row, as written there."""
    columns: dict[str, list[Any]]
    """The other columns; a single one is called ``label``."""
    rows: dict[str, int]
    """Row number by path, and by path without suffix."""

    def row_of(self, name: str) -> int | None:
        """The row of a picture, by its path or its path without suffix."""
        text = escape_name(name)
        return self.rows.get(text, self.rows.get(os.path.splitext(text)[0]))


def read_labels(file: Path) -> LabelTable:
    """Read a table of labels.

    Args:
        file: ``.csv`` or ``.tsv`` with a header, or ``.jsonl``. The column of paths is the one named in
            `PATH_COLUMNS`, otherwise the first.

    Raises:
        FileAccessError: There is no such file.
        FormatError: It has no rows or cannot be parsed.
        ConfigError: A path occurs twice.
    """
    try:
        records = _read_json_lines(file) if file.suffix.lower() in (".jsonl", ".ndjson", ".json") else _read_csv(file)
    except FileNotFoundError:
        raise FileAccessError(f"{file}: no such file of labels") from None
    except (ValueError, csv.Error) as error:
        raise FormatError(f"{file}: not a readable table of labels: {error}") from error
    if not records:
        raise FormatError(f"{file}: the table of labels has no rows")
    names = list(dict.fromkeys(name for record in records for name in record))
    key = next((name for name in PATH_COLUMNS if name in names), names[0])
    others = [name for name in names if name != key]
    paths = [os.path.normpath(str(record.get(key, ""))) for record in records]
    rows: dict[str, int] = {}
    for row, path in enumerate(paths):
        if path in rows:
            raise ConfigError(f"{file}: {path} occurs in rows {rows[path] + 1} and {row + 1}; which label counts?")
        rows[path] = row
    for row, path in enumerate(paths):
        rows.setdefault(os.path.splitext(path)[0], row)
    columns = {name: [record.get(name) for record in records] for name in others}
    if len(columns) == 1:
        columns = {"label": next(iter(columns.values()))}
    return LabelTable(paths, columns, rows)


def typed_column(values: Sequence[Any], where: str) -> npt.NDArray[Any] | list[str]:
    """Text as int64 where all of it is whole numbers, float32 where all is numbers, otherwise as it is.

    Raises:
        FormatError: A value is missing.
    """
    missing = [row for row, value in enumerate(values) if value is None or value == ""]
    if missing:
        raise FormatError(
            f"{where}: no value for {len(missing)} of {len(values)} pictures (the first is number {missing[0] + 1})"
        )
    if values and all(isinstance(value, list) for value in values):
        return np.array(values)
    with suppress(ValueError, TypeError):
        return np.array([_whole(value) for value in values], np.int64)
    with suppress(ValueError, TypeError):
        return np.array([float(value) for value in values], np.float32)
    return [str(value) for value in values]


def _whole(value: Any) -> int:
    """The number; ValueError where text such as ``007``, or 1.5, would lose something."""
    number = int(value)
    if str(number) != str(value):
        raise ValueError(f"{value!r} is not a whole number")
    return number


def _read_csv(file: Path) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as stream:
        delimiter = "\t" if file.suffix.lower() == ".tsv" else ","
        return [dict(record) for record in csv.DictReader(stream, delimiter=delimiter)]


def _read_json_lines(file: Path) -> list[dict[str, Any]]:
    with file.open(encoding="utf-8-sig") as stream:
        return [json.loads(line) for line in stream if line.strip()]
