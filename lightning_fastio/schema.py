"""What a row holds: the fields of a reader, and the batch that a read returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Literal, TypeAlias

import torch

from lightning_fastio.errors import SchemaError

Kind: TypeAlias = Literal["tensor", "ragged", "sparse", "string", "bytes"]
"""How a field is delivered:

- ``tensor``: one tensor of shape ``(batch, *shape)``;
- ``ragged``: a list of ``batch`` tensors, each of shape ``(length, *shape)``, the length differing by row;
- ``sparse``: one sparse CSR tensor of shape ``(batch, *shape)``;
- ``string``: a list of ``batch`` str;
- ``bytes``: a list of ``batch`` bytes objects (encoded images, for example).
"""

Batch: TypeAlias = dict[str, torch.Tensor | list[torch.Tensor] | list[str] | list[bytes]]
"""Field name to values, in the order of the schema."""


@dataclass(frozen=True)
class FieldSpec:
    """One field of a row."""

    dtype: torch.dtype | None
    """Element type as delivered; None for ``string`` and ``bytes``."""
    shape: tuple[int, ...] = ()
    """Shape of one sample, without the batch axis; for ``ragged``, the part after the axis that varies."""
    kind: Kind = "tensor"
    """How the field is delivered."""
    categories: tuple[str, ...] = ()
    """Names of the integer codes of an HDF5 enum or a dictionary column: code ``i`` means ``categories[i]``."""

    @property
    def nbytes(self) -> int:
        """Bytes of one delivered row; an estimate of 64 elements or characters for kinds of varying length."""
        itemsize = 1 if self.dtype is None else self.dtype.itemsize
        return itemsize * prod(self.shape) * (1 if self.kind == "tensor" else 64)

    def __str__(self) -> str:
        name = self.kind if self.dtype is None else str(self.dtype).removeprefix("torch.")
        prefix = "" if self.kind in ("tensor", "string", "bytes") else f"{self.kind} "
        return f"{prefix}{name}{list(self.shape) if self.shape else ''}"


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The type that holds the values of all, as NumPy has it: int64 beside float32 becomes float64, unlike in torch."""
    return reduce(_promote, dtypes)


def _promote(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    promoted = torch.promote_types(one, other)
    whole = [dtype for dtype in (one, other) if not dtype.is_floating_point and not dtype.is_complex]
    if promoted == torch.float32 and any(dtype.itemsize >= 4 for dtype in whole):
        return torch.float64
    if promoted in (torch.float16, torch.bfloat16) and any(dtype.itemsize >= 2 for dtype in whole):
        return torch.float64 if any(dtype.itemsize >= 4 for dtype in whole) else torch.float32
    return promoted


class Schema(Mapping[str, FieldSpec]):
    """The fields of a reader, by name and in order. Immutable, comparable, picklable."""

    def __init__(self, fields: Mapping[str, FieldSpec]) -> None:
        self._fields = dict(fields)

    def __getitem__(self, name: str) -> FieldSpec:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"Schema({', '.join(f'{name}: {spec}' for name, spec in self.items())})"

    def __hash__(self) -> int:
        return hash(tuple(self._fields.items()))

    @property
    def row_bytes(self) -> int:
        """Bytes of one delivered row over all fields (estimated where rows vary in length)."""
        return sum(spec.nbytes for spec in self.values())

    def allocate(self, num_rows: int, *, pin_memory: bool = False) -> Batch:
        """Uninitialised buffers for the ``tensor`` fields of ``num_rows`` rows; other kinds have no buffer.

        Pinned buffers come from torch's caching host allocator, which hands memory out again only after the
        copies that used it are done.
        """
        return {
            name: torch.empty((num_rows, *spec.shape), dtype=spec.dtype, pin_memory=pin_memory)
            for name, spec in self.items()
            if spec.kind == "tensor"
        }

    def buffers(self, num_rows: int, out: Batch | None) -> Batch:
        """``out``, if it is what `allocate` gives, and new buffers if it is None.

        Raises:
            SchemaError: A buffer is missing, or has another type, another shape or gaps: rows would end up elsewhere.
        """
        if out is None:
            return self.allocate(num_rows)
        for name, spec in self.items():
            if spec.kind != "tensor":
                continue
            buffer = out.get(name)
            shape = (num_rows, *spec.shape)
            if not isinstance(buffer, torch.Tensor):
                raise SchemaError(
                    f"out[{name!r}] is {type(buffer).__name__}; expected a tensor of {spec.dtype} {shape}"
                )
            if buffer.dtype is not spec.dtype or buffer.shape != shape or not buffer.is_contiguous():
                gaps = "" if buffer.is_contiguous() else " with gaps"
                raise SchemaError(
                    f"out[{name!r}] is {buffer.dtype} {tuple(buffer.shape)}{gaps}, expected {spec.dtype} {shape}; "
                    f"schema.allocate({num_rows}) makes buffers that fit"
                )
        return out
