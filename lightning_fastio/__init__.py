"""Feeds the GPU of a PyTorch Lightning run from .npy, .h5 and .parquet files at close to the speed of memory."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# Loads nothing else, and being here, the function is not hidden by the package of the same name.
from lightning_fastio.convert import convert

__version__ = "0.1.0"

__all__ = [
    "BatchLoader",
    "DevicePrefetcher",
    "FastIODataModule",
    "FastIOError",
    "HDF5DataModule",
    "MemoryHygieneCallback",
    "NumpyDataModule",
    "ParquetDataModule",
    "PrefetchCallback",
    "convert",
    "diagnose",
    "open_reader",
    "open_writer",
    "tune",
]

if TYPE_CHECKING:
    from lightning_fastio.callbacks import MemoryHygieneCallback, PrefetchCallback
    from lightning_fastio.datamodules import FastIODataModule, HDF5DataModule, NumpyDataModule, ParquetDataModule
    from lightning_fastio.doctor import diagnose
    from lightning_fastio.errors import FastIOError
    from lightning_fastio.formats import open_reader, open_writer
    from lightning_fastio.loader import BatchLoader
    from lightning_fastio.prefetch import DevicePrefetcher
    from lightning_fastio.tuning import tune

# Where names live. They are imported when they are used, so that the command line does not wait for Lightning.
_MODULES = {
    "BatchLoader": "loader",
    "DevicePrefetcher": "prefetch",
    "FastIODataModule": "datamodules",
    "FastIOError": "errors",
    "HDF5DataModule": "datamodules",
    "MemoryHygieneCallback": "callbacks",
    "NumpyDataModule": "datamodules",
    "ParquetDataModule": "datamodules",
    "PrefetchCallback": "callbacks",
    "diagnose": "doctor",
    "open_reader": "formats",
    "open_writer": "formats",
    "tune": "tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'lightning_fastio' has no attribute {name!r}")
    return getattr(import_module(f"lightning_fastio.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
