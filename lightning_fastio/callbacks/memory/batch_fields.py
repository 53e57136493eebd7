"""The tensors of a batch by name, and a line about each, for reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch


def tensors_of(batch: Any, name: str = "batch") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a batch, whatever its structure, named by the Python that gets them, such as ``batch['x']``.

    Args:
        batch: A tensor, or any nesting of mappings, sequences, dataclasses and named tuples; the rest is passed over.
        name: Name of ``batch`` itself.
    """
    if isinstance(batch, torch.Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from tensors_of(value, f"{name}[{key!r}]")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from tensors_of(getattr(batch, field.name), f"{name}.{field.name}")
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        for key, value in zip(batch._fields, batch, strict=True):
            yield from tensors_of(value, f"{name}.{key}")
    elif isinstance(batch, (list, tuple)):
        for position, value in enumerate(batch):
            yield from tensors_of(value, f"{name}[{position}]")


def describe(tensor: torch.Tensor) -> str:
    """Type and shape, such as ``float32 (256, 3, 224, 224)``."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def describe_values(tensor: torch.Tensor) -> str:
    """Type, shape, range and number of values that are not finite. Waits for the device."""
    text = describe(tensor)
    if tensor.layout is not torch.strided or tensor.numel() == 0 or tensor.is_complex():
        return text
    values = tensor.detach()
    if not values.is_floating_point():
        return f"{text}, {values.min().item()} to {values.max().item()}"
    finite = values.isfinite()
    num_bad = values.numel() - int(finite.sum())
    if num_bad:
        text += f", {num_bad} of {values.numel()} not finite"
    if num_bad < values.numel():
        infinity = float("inf")
        low = values.masked_fill(~finite, infinity).min().item()
        high = values.masked_fill(~finite, -infinity).max().item()
        text += f", {low:.4g} to {high:.4g}"
    return text


def num_samples(batch: Any) -> int | None:
    """Length of the first tensor of a batch, or None if it has none."""
    return next((len(tensor) for _, tensor in tensors_of(batch) if tensor.ndim), None)


def num_bytes(batch: Any) -> int:
    """Memory of the tensors of a batch."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_of(batch))
