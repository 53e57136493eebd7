"""Which fields of a reader are delivered, under which names, and which are stacked into one matrix."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from lightning_fastio.errors import ConfigError, SchemaError
from lightning_fastio.formats.base import FieldLayout, Fields, Reader, Rows, row_bytes
from lightning_fastio.formats.files import fingerprint_of
from lightning_fastio.schema import Batch, FieldSpec, Schema, common_dtype


def wanted_fields(fields: Fields) -> dict[str, tuple[str, ...]] | None:
    """Stored names of each field to deliver, more than one where they are stacked; None for all fields.

    Raises:
        ConfigError: No field is named, or one is named twice.
    """
    if fields is None:
        return None
    if isinstance(fields, str):
        raise ConfigError(f"fields={fields!r} is one text; give a list: fields=[{fields!r}]")
    if not isinstance(fields, Mapping):
        if not isinstance(fields, Iterable) or not all(isinstance(name, str) for name in fields):
            raise ConfigError(f"fields={fields!r}: expected a list of names, or a mapping of new names to stored ones")
        names = list(fields)
        if len(set(names)) < len(names):
            raise ConfigError(f"fields={names} names a field twice")
        wanted: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    else:
        wanted = {name: (stored,) if isinstance(stored, str) else tuple(stored) for name, stored in fields.items()}
    if not wanted or not all(wanted.values()):
        raise ConfigError(f"fields={fields!r} names no field; leave it out to get all of them")
    return wanted


def stored_names(wanted: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Each stored name once, in the order of first use."""
    return list(dict.fromkeys(name for names in wanted.values() for name in names))


def unknown_field(name: str, known: Iterable[str], where: object) -> SchemaError:
    """The error about a field that is not there, with the names that are near."""
    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join(map(repr, names[:20]))}"
    return SchemaError(f"{where} has no field {name!r}; {hint}")


class Selection:
    """The fields of another reader, some of them, renamed, or stacked along a new last axis."""

    def __init__(self, reader: Reader, wanted: Mapping[str, tuple[str, ...]]) -> None:
        """Set up.

        Args:
            reader: Where rows come from.
            wanted: Stored names of each delivered field; several are stacked.

        Raises:
            SchemaError: A field is unknown, or fields to stack are no numbers or differ in shape.
        """
        for name in stored_names(wanted):
            if name not in reader.schema:
                raise unknown_field(name, reader.schema, reader)
        self._reader = reader
        self._wanted = dict(wanted)
        self._schema = Schema({name: _stacked_spec(name, stored, reader.schema) for name, stored in wanted.items()})
        # Fields that the reader can fill where they belong; a second name for the same field is a copy.
        self._direct = {stored[0]: name for name, stored in reversed(list(wanted.items())) if len(stored) == 1}

    @staticmethod
    def of(reader: Reader, fields: Fields) -> Reader:
        """The wanted fields of a reader: the reader itself when these are what it has."""
        wanted = wanted_fields(fields)
        if wanted is None or list(wanted.items()) == [(name, (name,)) for name in reader.schema]:
            return reader
        return Selection(reader, wanted)

    @property
    def schema(self) -> Schema:
        """The fields as delivered."""
        return self._schema

    @property
    def blocks(self) -> npt.NDArray[np.int64] | None:
        """Those of the reader."""
        return self._reader.blocks

    @property
    def cache_bytes(self) -> int:
        """That of the reader."""
        return self._reader.cache_bytes

    @property
    def row_bytes(self) -> float:
        """That of the reader."""
        return row_bytes(self._reader)

    @property
    def metadata(self) -> Mapping[str, str]:
        """That of the reader."""
        return self._reader.metadata

    @property
    def fingerprint(self) -> str:
        """That of the reader, and what is selected."""
        return fingerprint_of([], self._reader.fingerprint, self._wanted)

    def __len__(self) -> int:
        return len(self._reader)

    def __repr__(self) -> str:
        return f"Selection({self._reader!r}, {self.schema})"

    def will_need(self, rows: Rows) -> None:
        """Pass the hint on."""
        self._reader.will_need(rows)

    def read(self, rows: Rows, out: Batch | None = None) -> Batch:
        """Read rows; see `Reader.read`."""
        out = self.schema.buffers(len(rows), out)
        given = {stored: out[name] for stored, name in self._direct.items() if name in out}
        batch = self._reader.read(rows, self._reader.schema.allocate(len(rows)) | given)
        return {name: self._assemble(name, stored, batch, out) for name, stored in self._wanted.items()}

    def _assemble(self, name: str, stored: tuple[str, ...], batch: Batch, out: Batch) -> Any:
        if self._direct.get(stored[0]) == name:
            return batch[stored[0]]
        if self.schema[name].kind != "tensor":
            return copy.deepcopy(batch[stored[0]])
        target = cast(torch.Tensor, out[name])
        if len(stored) == 1:
            return target.copy_(cast(torch.Tensor, batch[stored[0]]))
        for position, each in enumerate(stored):
            target[..., position] = cast(torch.Tensor, batch[each])
        return target

    def layout(self) -> list[FieldLayout]:
        """How each field is stored and read; of stacked ones the first."""
        layouts = {each.name: each for each in self._reader.layout()}
        return [
            replace(layouts[stored[0]], name=name)
            if len(stored) == 1
            else replace(layouts[stored[0]], name=name, stored=f"{len(stored)} fields of {layouts[stored[0]].stored}")
            for name, stored in self._wanted.items()
        ]

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()


def _stacked_spec(name: str, stored: tuple[str, ...], schema: Schema) -> FieldSpec:
    specs = [schema[each] for each in stored]
    if len(specs) == 1:
        return specs[0]
    for each, spec in zip(stored, specs, strict=True):
        if spec.kind != "tensor" or spec.shape != specs[0].shape:
            raise SchemaError(
                f"field {name!r} stacks {stored[0]!r} ({specs[0]}) and {each!r} ({spec}); "
                "only numeric fields of one shape can be stacked"
            )
    dtypes = [spec.dtype for spec in specs if spec.dtype is not None]
    return FieldSpec(common_dtype(dtypes), (*specs[0].shape, len(specs)))
