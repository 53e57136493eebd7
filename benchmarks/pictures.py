"""The pictures of the conversion benchmark, and what decoding them takes at least.

Worker processes import this module, so it imports Pillow and NumPy alone.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZE = (224, 224)
"""(height, width) of a decoded picture."""

_NUM_DISTINCT = 250


def decode(file: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What Pillow has to do at least."""
    with Image.open(file) as image:
        resized = image.convert("RGB").resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR)
    return np.asarray(resized)


def decode_item(file: str) -> dict[str, Any]:
    """The same, as an item of litdata."""
    return {"image": decode(file), "path": file}


def decode_chunk(files: list[str]) -> int:
    """Decode, and throw away."""
    return sum(decode(file).shape[0] for file in files)


def write_pictures(folder: Path, num_pictures: int) -> Path:
    """Pictures as large as those of ImageNet, some of them many times under different names."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[:375, :500]
    for number in range(_NUM_DISTINCT):
        phase = generator.uniform(0, 6, 3)
        waves = [np.sin(columns / (20 + 9 * phase[channel]) + rows / 31 + phase[channel]) for channel in range(3)]
        pixels = 128 + 70 * np.stack(waves, -1) + generator.normal(0, 14, (375, 500, 3))
        buffer = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=85)
        for copy in range(number, num_pictures, _NUM_DISTINCT):
            (folder / f"{copy:05d}.jpg").write_bytes(buffer.getvalue())
    return folder
