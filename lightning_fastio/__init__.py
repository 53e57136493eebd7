"""Feeds the GPU of a PyTorch Lightning run from .npy, .h5 and .parquet files at close to the speed of memory."""

from __future__ import annotations

__version__ = "0.1.0"
