"""`Stages`: which rows of which source each stage of a Trainer uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from lightning_fastio.arguments import check_part, check_whole
from lightning_fastio.errors import ConfigError, SchemaError
from lightning_fastio.formats.base import Reader
from lightning_fastio.plan.rows import AllRows, ChosenRows, Part, RowSet, Split, balanced_weights

Source: TypeAlias = str | Path | list[str] | list[Path] | dict[str, str] | dict[str, Path] | None
"""A file, a folder, a glob, a list of files, or a mapping of field name to any of these."""

Stage: TypeAlias = Literal["train", "val", "test", "predict"]

_READ_AT_ONCE = 1 << 16


class Stages:
    """Opens each source once, and divides the training data where a stage has none of its own."""

    def __init__(
        self,
        sources: Mapping[Stage, Source],
        split: Split,
        *,
        open_source: Callable[[Any], Reader],
        open_column: Callable[[str], Reader],
        split_by: str | None = None,
        stratify_by: str | None = None,
        max_rows: int | None = None,
        rows: str | Path | Sequence[int] | npt.NDArray[Any] | None = None,
        weights: str | Sequence[float] | npt.NDArray[Any] | None = None,
    ) -> None:
        """Set up; nothing is opened yet.

        Args:
            sources: What the user gave for each stage.
            split: How to divide the training data.
            open_source: Opens a source.
            open_column: Opens the training data with one field alone.
            split_by: See `FastIODataModule`.
            stratify_by: See `FastIODataModule`.
            max_rows: See `FastIODataModule`.
            rows: See `FastIODataModule`.
            weights: See `FastIODataModule`.

        Raises:
            ConfigError: Arguments contradict each other.
        """
        self._sources = dict(sources)
        self._split = split
        self._open_source = open_source
        self._open_column = open_column
        self._split_by = split_by
        self._stratify_by = stratify_by
        self._max_rows = max_rows
        self._rows = rows
        self._weights = weights
        self._readers: dict[str, Reader] = {}
        self._parts: dict[Part, RowSet] = {}
        self._columns: dict[str, npt.NDArray[Any]] = {}
        check_part("val_split", split.val)
        check_part("test_split", split.test)
        check_whole("split_seed", split.seed, least=0)
        wishes: dict[Stage, float] = {"val": split.val, "test": split.test}
        for stage, wanted in wishes.items():
            if wanted and self._sources.get(stage) is not None:
                raise ConfigError(f"{stage}= and {stage}_split= are both given: leave one out")
            if wanted and self._sources.get("train") is None:
                raise ConfigError(f"{stage}_split={wanted} takes a part of the training data: give train=")
        if max_rows is not None:
            check_whole("max_rows", max_rows, least=1)
        if (split_by or stratify_by) and not (split.val or split.test):
            raise ConfigError("split_by and stratify_by say how to split: give val_split= or test_split= too")
        if split_by and stratify_by:
            raise ConfigError("split_by and stratify_by exclude each other: choose one")

    def has(self, stage: Stage) -> bool:
        """Whether there is data for a stage."""
        return self._source_of(stage) is not None

    def reader(self, stage: Stage) -> Reader:
        """The opened reader behind a stage.

        Raises:
            ConfigError: There is no data for it.
        """
        source = self._source_of(stage)
        if source is None:
            remedy = f"give {stage}=" + (f" or {stage}_split=" if stage in ("val", "test") else "")
            raise ConfigError(f"there is no data for {stage}: {remedy}")
        key = repr(source)
        if key not in self._readers:
            opened = self._open_source(source)
            for other in self._readers.values():
                _check_same_codes(opened, other)
            self._readers[key] = opened
        return self._readers[key]

    def any_reader(self) -> Reader:
        """The reader of the first stage that has data."""
        return self.reader(next(stage for stage in self._sources if self.has(stage)))

    def rows(self, stage: Stage) -> RowSet:
        """The rows of the reader that a stage uses.

        Raises:
            ConfigError: There is none.
        """
        reader, part = self.reader(stage), self._part_of(stage)
        num_rows = len(reader) if self._max_rows is None else min(len(reader), self._max_rows)
        if part is None:
            rows: RowSet = AllRows(num_rows)
        else:
            if part not in self._parts:
                self._parts[part] = self._split_rows(part, num_rows, has_blocks=reader.blocks is not None)
            rows = self._parts[part]
        if stage == "train" and self._rows is not None:
            rows = self._subset(rows, len(reader))
        if not len(rows):
            raise ConfigError(f"there is no row for {stage} in {self._source_of(stage)!r}")
        return rows

    def weights(self) -> npt.NDArray[Any] | None:
        """A weight for each training row, or None.

        Raises:
            ConfigError: An array that has not one number for each row of the source.
        """
        if self._weights is None:
            return None
        num_rows = len(self.reader("train"))
        if isinstance(self._weights, str):
            balanced = self._weights == "balanced" or self._weights.startswith("balanced:")
            field = self._weights.partition(":")[2] or self._label_field() if balanced else self._weights
            column = self._column(field)
        else:
            balanced, column = False, np.atleast_1d(self._weights)
            if len(column) != num_rows:
                raise ConfigError(f"weights has {len(column)} numbers; expected one for each of the {num_rows} rows")
        rows = self.rows("train")
        used = column[rows.at(np.arange(len(rows)))]
        return balanced_weights(used) if balanced else used

    def draws_from_split(self, stages: Iterable[Stage]) -> bool:
        """Whether any of the stages uses a side of the split."""
        return any(self._part_of(stage) is not None for stage in stages)

    @property
    def split_fingerprint(self) -> str:
        """A text that changes when the split or the data behind it does."""
        if not (self._split.val or self._split.test):
            return "none"
        data = self.reader("train").fingerprint
        settings = repr((self._split, self._split_by, self._stratify_by, self._max_rows, data))
        digest = blake2b(settings.encode(), digest_size=8).hexdigest()
        return f"val {self._split.val}, test {self._split.test}, seed {self._split.seed}: {digest}"

    def open(self, stage: Stage) -> Reader:
        """Another reader of the data behind a stage; whoever asks for it closes it."""
        return self._open_source(self._source_of(stage))

    def forget_readers(self) -> None:
        """Close the readers; the next use opens files anew, with the options of that time."""
        self.close()
        self._readers.clear()

    def close(self) -> None:
        """Close the readers; they open again when they are read."""
        for reader in self._readers.values():
            reader.close()

    def _source_of(self, stage: Stage) -> Source:
        if stage == "predict" and self._sources.get("predict") is None:
            return self._source_of("test")
        return self._sources.get("train" if self._part_of(stage) else stage)

    def _part_of(self, stage: Stage) -> Part | None:
        """The side of the split that a stage uses; None if it has data of its own."""
        if stage == "predict":
            return None if self._sources.get("predict") is not None else self._part_of("test")
        if stage == "train":
            return "train" if self._split.val or self._split.test else None
        wanted = self._split.val if stage == "val" else self._split.test
        return stage if self._sources.get(stage) is None and wanted else None

    def _split_rows(self, part: Part, num_rows: int, *, has_blocks: bool) -> RowSet:
        groups = None if self._split_by is None else self._column(self._split_by)[:num_rows]
        strata = None if self._stratify_by is None else self._column(self._stratify_by)[:num_rows]
        return self._split.rows(part, num_rows, has_blocks=has_blocks, groups=groups, strata=strata)

    def _subset(self, rows: RowSet, num_rows: int) -> RowSet:
        wanted = np.load(self._rows) if isinstance(self._rows, str | Path) else np.asarray(self._rows)
        chosen = ChosenRows(wanted, num_rows)
        if isinstance(rows, AllRows) and len(rows) == num_rows:
            return chosen
        everything = rows.at(np.arange(len(rows)))
        return ChosenRows(np.intersect1d(everything, chosen.at(np.arange(len(chosen)))), num_rows)

    def _label_field(self) -> str:
        schema = self.reader("train").schema
        found = [name for name in ("label", "labels", "y", "target") if name in schema]
        if len(found) != 1:
            raise ConfigError(
                f"weights='balanced' finds no single label among the fields {list(schema)}: name it, as in "
                "weights='balanced:FIELD'"
            )
        return found[0]

    def _column(self, field: str) -> npt.NDArray[Any]:
        """All values of one field of the training data."""
        if field in self._columns:
            return self._columns[field]
        reader = self._open_column(field)
        pieces = []
        for start in range(0, len(reader), _READ_AT_ONCE):
            values = reader.read(np.arange(start, min(start + _READ_AT_ONCE, len(reader))))[field]
            pieces.append(values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values))
        if reader not in self._readers.values():
            reader.close()
        column: npt.NDArray[Any] = np.concatenate(pieces)
        if column.ndim != 1:
            raise ConfigError(f"field {field!r} has shape {column.shape[1:]} in each row; expected one value")
        self._columns[field] = column
        return column


def _check_same_codes(reader: Reader, other: Reader) -> None:
    """Refuse categories that have another code in the data of another stage."""
    for name in set(reader.schema) & set(other.schema):
        found, expected = reader.schema[name].categories, other.schema[name].categories
        if any(a != b for a, b in zip(found, expected, strict=False)):
            raise SchemaError(
                f"field {name!r}: its codes mean {list(found)} in {reader!r}, but {list(expected)} in {other!r}; write "
                "the data of all stages with the same categories, or divide one source with val_split"
            )
