"""Several readers as one: rows one after another (shards), or fields side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch

from lightning_fastio.errors import SchemaError
from lightning_fastio.formats.base import FieldLayout, Reader, Rows, check_rows, row_bytes
from lightning_fastio.formats.blocks import split_by_block
from lightning_fastio.formats.csr import csr_tensor
from lightning_fastio.formats.files import fingerprint_of
from lightning_fastio.formats.mapped import MappedArray
from lightning_fastio.formats.pages import Int64Array
from lightning_fastio.formats.spans import JoinedArrays
from lightning_fastio.schema import Batch, Schema


@runtime_checkable
class Scatters(Protocol):
    """A reader whose rows can be put at given places of larger buffers, which saves a copy."""

    def read_into(self, rows: Int64Array, batch: Batch, positions: Int64Array) -> None:
        """Read checked rows: row ``rows[i]`` goes to place ``positions[i]`` of every tensor or list in the batch."""
        ...

    def mapped_arrays(self) -> Mapping[str, MappedArray]:
        """The fields that are rows of mapped bytes."""
        ...


class Concatenated:
    """The rows of several readers, one after another."""

    def __init__(self, readers: Sequence[Reader], names: Sequence[object]) -> None:
        """Set up.

        Args:
            readers: At least one; all have the same schema.
            names: What each is called in messages, its path for example.

        Raises:
            SchemaError: Two schemas differ; the message has both names and the field.
        """
        for reader, name in zip(readers, names, strict=True):
            check_same_schema(readers[0].schema, reader.schema, names[0], name)
        self._readers = list(readers)
        self._bounds = np.cumsum([0, *map(len, readers)], dtype=np.int64)
        has_rows_of_one_size = not any(spec.kind in ("ragged", "sparse") for spec in self.schema.values())
        self._scatters = has_rows_of_one_size and all(isinstance(reader, Scatters) for reader in readers)
        self._mapped = _join_mapped(cast(Sequence[Scatters], readers), self.schema) if self._scatters else {}

    @property
    def schema(self) -> Schema:
        """The fields of every reader."""
        return self._readers[0].schema

    @property
    def blocks(self) -> Int64Array | None:
        """Blocks of all readers; one without blocks is one."""
        if all(reader.blocks is None for reader in self._readers):
            return None
        bounds = [
            start + (np.array([0, len(reader)]) if reader.blocks is None else reader.blocks)
            for start, reader in zip(self._bounds, self._readers, strict=False)
        ]
        return np.unique(np.concatenate(bounds))

    @property
    def cache_bytes(self) -> int:
        """The largest cache of a reader: readers of one source share theirs."""
        return max(reader.cache_bytes for reader in self._readers)

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a decoded row, over all readers."""
        return sum(row_bytes(reader) * len(reader) for reader in self._readers) / max(1, len(self))

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of all readers; where two differ, the first counts."""
        return {name: text for reader in reversed(self._readers) for name, text in reader.metadata.items()}

    @property
    def fingerprint(self) -> str:
        """Of all readers, in order."""
        return fingerprint_of([], [reader.fingerprint for reader in self._readers])

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __repr__(self) -> str:
        return f"Concatenated({len(self)} rows of {len(self._readers)} readers, {self.schema})"

    def will_need(self, rows: Rows) -> None:
        """Pass the hint on to the readers that have the rows."""
        with suppress(IndexError):
            checked = check_rows(rows, len(self))
            if len(self._mapped) < len(self.schema):
                for part in split_by_block(checked, self._bounds):
                    self._readers[part.block].will_need(part.rows)
                return
            numbers, local = self._locate(checked)
            for arrays in self._mapped.values():
                arrays.will_need(numbers, local)

    def read(self, rows: Rows, out: Batch | None = None) -> Batch:
        """Read rows; see `Reader.read`."""
        checked = check_rows(rows, len(self))
        batch: Batch = dict(self.schema.buffers(len(checked), out))
        if self._mapped:
            numbers, local = self._locate(checked)
            for name, arrays in self._mapped.items():
                arrays.read(numbers, local, cast(torch.Tensor, batch[name]).numpy())
        if len(self._mapped) < len(self.schema):
            others = {name: values for name, values in batch.items() if name not in self._mapped}
            batch |= self._read_parts(checked, others)
        return {name: batch[name] for name in self.schema}

    def layout(self) -> list[FieldLayout]:
        """Of the first reader; the others have the same schema."""
        number = f"first of {len(self._readers)} parts"
        return [replace(each, stored=f"{each.stored}; {number}") for each in self._readers[0].layout()]

    def close(self) -> None:
        """Close all readers."""
        for arrays in self._mapped.values():
            arrays.close()
        for reader in self._readers:
            reader.close()

    def _locate(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Number of the reader of each row, and number of the row in it."""
        numbers = np.searchsorted(self._bounds, rows, side="right") - 1
        return numbers, rows - self._bounds[numbers]

    def _read_parts(self, rows: Int64Array, batch: Batch) -> Batch:
        """Rows reader by reader; the batch has buffers for the tensors among the fields to read."""
        parts = list(split_by_block(rows, self._bounds))
        if not parts:
            return self._readers[0].read(rows, batch)
        if len(parts) == 1 and not self._mapped and (np.diff(parts[0].positions) == 1).all():
            return self._readers[parts[0].block].read(parts[0].rows, batch)
        for name, spec in self.schema.items():
            if spec.kind != "tensor":
                batch[name] = cast(Any, [None] * len(rows))
        # What comes as one tensor of a size that is not known before: sparse rows, and rows padded to the longest.
        pieces: dict[str, list[torch.Tensor]] = {}
        for part in parts:
            self._read_part(self._readers[part.block], part.positions, part.rows, batch, pieces)
        order = np.concatenate([part.positions for part in parts])
        for name, found in pieces.items():
            join = _join_csr if self.schema[name].kind == "sparse" else _join_padded
            batch[name] = join(found, order)
        return batch

    def _read_part(
        self,
        reader: Reader,
        positions: Int64Array,
        rows: Int64Array,
        batch: Batch,
        pieces: dict[str, list[torch.Tensor]],
    ) -> None:
        """Put rows of one reader at their places in the batch."""
        if self._scatters:
            cast(Scatters, reader).read_into(rows, batch, positions)
            return
        start, stop = int(positions[0]), int(positions[-1]) + 1
        buffers: Batch | None = None
        if stop - start == len(positions) and (np.diff(positions) == 1).all():  # They fill a slice of the buffers.
            buffers = {name: batch[name][start:stop] for name in self._tensors()}
        index = torch.from_numpy(positions)
        for name, values in reader.read(rows, buffers).items():
            target: Any = batch[name]
            if isinstance(values, list):
                for position, value in zip(positions.tolist(), values, strict=True):
                    target[position] = value
            elif isinstance(target, list):
                pieces.setdefault(name, []).append(values)
            elif buffers is None:
                target[index] = values

    def _tensors(self) -> list[str]:
        return [name for name, spec in self.schema.items() if spec.kind == "tensor"]


class SideBySide:
    """The fields of several readers with the same rows."""

    def __init__(self, readers: Mapping[str, Reader]) -> None:
        """Set up.

        Args:
            readers: Readers by what they are called in messages; no field occurs in two.

        Raises:
            SchemaError: Two readers differ in their number of rows, or have a field in common.
        """
        self._readers = list(readers.values())
        fields: dict[str, Any] = {}
        first = next(iter(readers))
        for name, reader in readers.items():
            if len(reader) != len(readers[first]):
                raise SchemaError(
                    f"fields side by side need the same number of rows: {first!r} has {len(readers[first])}, "
                    f"but {name!r} has {len(reader)}"
                )
            for field, spec in reader.schema.items():
                if field in fields:
                    raise SchemaError(f"field {field!r} occurs twice; the second time in {name!r}")
                fields[field] = spec
        self._schema = Schema(fields)

    @property
    def schema(self) -> Schema:
        """The fields of all readers, in order."""
        return self._schema

    @property
    def blocks(self) -> Int64Array | None:
        """Blocks of the reader with the most bytes, among those that have blocks."""
        cut = [reader for reader in self._readers if reader.blocks is not None]
        return max(cut, key=lambda reader: reader.schema.row_bytes).blocks if cut else None

    @property
    def cache_bytes(self) -> int:
        """Caches of all readers together."""
        return sum(reader.cache_bytes for reader in self._readers)

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a decoded row, all readers together."""
        return sum(map(row_bytes, self._readers))

    @property
    def metadata(self) -> Mapping[str, str]:
        """Metadata of all readers; where two differ, the first counts."""
        return {name: text for reader in reversed(self._readers) for name, text in reader.metadata.items()}

    @property
    def fingerprint(self) -> str:
        """Of all readers and their fields."""
        return fingerprint_of([], [(list(reader.schema), reader.fingerprint) for reader in self._readers])

    def __len__(self) -> int:
        return len(self._readers[0])

    def __repr__(self) -> str:
        return f"SideBySide({len(self)} rows, {self.schema})"

    def will_need(self, rows: Rows) -> None:
        """Pass the hint on."""
        for reader in self._readers:
            reader.will_need(rows)

    def read(self, rows: Rows, out: Batch | None = None) -> Batch:
        """Read rows; see `Reader.read`."""
        rows = check_rows(rows, len(self))
        out = self.schema.buffers(len(rows), out)
        batch: Batch = {}
        for reader in self._readers:
            batch |= reader.read(rows, {name: out[name] for name in reader.schema if name in out})
        return batch

    def layout(self) -> list[FieldLayout]:
        """How each field is stored and read."""
        return [layout for reader in self._readers for layout in reader.layout()]

    def close(self) -> None:
        """Close all readers."""
        for reader in self._readers:
            reader.close()


def _join_mapped(readers: Sequence[Scatters], schema: Schema) -> dict[str, JoinedArrays]:
    """The fields whose rows are copied as they are out of the maps of all readers."""
    arrays = [reader.mapped_arrays() for reader in readers]
    joined = {}
    for name in set(arrays[0]).intersection(*arrays[1:]):
        dtype = torch.empty(0, dtype=schema[name].dtype).numpy().dtype
        if JoinedArrays.can_join([each[name] for each in arrays], dtype):
            joined[name] = JoinedArrays([each[name] for each in arrays])
    return joined


def check_same_schema(first: Schema, other: Schema, first_name: object, other_name: object) -> None:
    """Raise `SchemaError` unless two schemas are equal, field order included."""
    for field in [*first, *other]:
        if field not in other or field not in first:
            has, lacks = (first_name, other_name) if field in first else (other_name, first_name)
            raise SchemaError(
                f"{has} has the field {field!r}, but {lacks} has not; files of one source hold equal fields"
            )
        if first[field] != other[field]:
            raise SchemaError(
                f"field {field!r} is {first[field]} in {first_name}, but {other[field]} in {other_name}; "
                "files of one source hold equal fields"
            )
    if list(first) != list(other):
        raise SchemaError(f"{first_name} has the fields {list(first)}, but {other_name} has {list(other)}")


def _join_csr(pieces: Sequence[torch.Tensor], positions: Int64Array) -> torch.Tensor:
    """One sparse CSR tensor whose row ``positions[i]`` is row ``i`` of the pieces laid end to end."""
    lengths = np.concatenate([np.diff(piece.crow_indices().numpy()) for piece in pieces])
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(positions)
    crow = np.concatenate([[0], np.cumsum(lengths[order])])
    index = torch.from_numpy(np.repeat(starts[order] - crow[:-1], lengths[order]) + np.arange(crow[-1]))
    columns = torch.cat([piece.col_indices() for piece in pieces])[index]
    values = torch.cat([piece.values() for piece in pieces])[index]
    return csr_tensor(torch.from_numpy(crow), columns, values, (len(lengths), *pieces[0].shape[1:]))


def _join_padded(pieces: Sequence[torch.Tensor], positions: Int64Array) -> torch.Tensor:
    """One padded tensor whose row ``positions[i]`` is row ``i`` of the pieces laid end to end."""
    longest = max(piece.shape[1] for piece in pieces)
    out = pieces[0].new_zeros((len(positions), longest, *pieces[0].shape[2:]))
    start = 0
    for piece in pieces:
        out[torch.from_numpy(positions[start : start + len(piece)]), : piece.shape[1]] = piece
        start += len(piece)
    return out
