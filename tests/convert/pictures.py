"""Picture files for the tests of conversion."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lightning_fastio import open_reader

DESTINATIONS = ("out", "out.h5", "out.parquet")
"""One destination for each format: a NumPy folder, an HDF5 file, a Parquet file."""


def destination_options(name: str) -> dict[str, Any]:
    """What ``convert`` needs besides the name."""
    return {"format": "numpy"} if "." not in name else {}


def noise(seed: int, shape: tuple[int, ...] = (6, 8, 3)) -> np.ndarray:
    """Bytes that differ from seed to seed."""
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, pixels: np.ndarray, **options: Any) -> np.ndarray:
    """Write a picture, make its folder, and give back its pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return pixels


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    """A picture as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def read_all(path: Path) -> dict[str, Any]:
    """All rows of converted data, tensors as arrays."""
    reader = open_reader(path, widen_unsigned=False) if path.suffix != ".parquet" else open_reader(path)
    rows = reader.read(np.arange(len(reader)))
    reader.close()
    return {name: plain(values) for name, values in rows.items()}


def plain(values: Any) -> Any:
    """Tensors as arrays, in lists too."""
    if hasattr(values, "numpy"):
        return values.numpy()
    return [plain(value) for value in values] if isinstance(values, list) else values


def classes_of(path: Path) -> str | None:
    """The stored class mapping."""
    reader = open_reader(path)
    metadata = reader.metadata
    reader.close()
    return metadata.get("classes")
