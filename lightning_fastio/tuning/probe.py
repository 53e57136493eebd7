"""Measured: a loader of a data module, read by somebody who does nothing else."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lightning_fastio.datamodules import FastIODataModule
from lightning_fastio.formats.base import Reader
from lightning_fastio.loader import BatchLoader
from lightning_fastio.staging import move_batch
from lightning_fastio.tuning.search import Measurement
from lightning_fastio.tuning.settings import Settings

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class _Live:
    """A loader that runs from one measurement to the next, since worker processes take seconds to start."""

    loader: BatchLoader
    batches: Iterator[Any]
    own_reader: Reader | None
    memory_bytes: int = 0


class LoaderProbe:
    """Measures the training loader of a data module.

    Each loader reads another epoch, so that data larger than memory stays as cold as in training.
    """

    def __init__(self, datamodule: FastIODataModule, *, probe_s: float, device: torch.device) -> None:
        """Set up.

        Args:
            datamodule: Whose loader.
            probe_s: Seconds of one measurement.
            device: Where batches are copied to; a CPU leaves them where they are.
        """
        self._datamodule = datamodule
        self._probe_s = probe_s
        self._device = device
        self._num_epochs = 0
        self._live: dict[Settings, _Live] = {}

    def __call__(self, settings: Settings) -> Measurement:
        """Measure one."""
        before = _memory_bytes()
        is_new = settings not in self._live
        if is_new:
            self._live[settings] = self._start(settings)
        live = self._live[settings]
        # What waits in the queues was read while nobody was looking.
        for _ in range(settings.num_workers * settings.prefetch_factor + 1):
            self._take(live)
        if is_new:
            live.memory_bytes = max(0, _memory_bytes() - before)
        self._synchronize()
        start, cpu_s, num_rows = perf_counter(), _cpu_s(), live.loader.stats.num_rows
        num_batches, elapsed = 0, 0.0
        # Workers may deliver in bursts, so that each should have its turn.
        while elapsed < self._probe_s or (num_batches < settings.num_workers and elapsed < 4 * self._probe_s):
            self._take(live)
            num_batches += 1
            elapsed = perf_counter() - start
        self._synchronize()
        elapsed = perf_counter() - start
        rows = live.loader.stats.num_rows - num_rows
        return Measurement(rows / elapsed, (_cpu_s() - cpu_s) / elapsed, live.memory_bytes)

    def release(self) -> None:
        """Stop all loaders."""
        while self._live:
            _, live = self._live.popitem()
            del live.batches
            live.loader.close()
            if live.own_reader is not None:
                live.own_reader.close()

    def _start(self, settings: Settings) -> _Live:
        own_reader = None
        options: dict[str, Any] = {}
        if settings.cache_bytes != self._datamodule.reader_options["cache_bytes"] and settings.cache_bytes:
            own_reader = options["reader"] = open_with_cache(self._datamodule, settings.cache_bytes)
        if settings.worker_type == "process" and self._datamodule.hparams["multiprocessing_context"] == "forkserver":
            # Their batches come as fast, and no server stays behind.
            options["multiprocessing_context"] = "spawn"
        loader = self._datamodule.new_train_loader(
            batch_size=settings.batch_size,
            num_workers=settings.num_workers,
            worker_type=settings.worker_type,
            prefetch_factor=settings.prefetch_factor,
            pin_memory=settings.pin_memory,
            **options,
        )
        self._num_epochs += 1
        loader.set_epoch(self._num_epochs)
        return _Live(loader, _endless(loader), own_reader)

    def _take(self, live: _Live) -> None:
        batch = next(live.batches)
        if self._device.type == "cuda":
            move_batch(batch, self._device)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def open_with_cache(datamodule: FastIODataModule, cache_bytes: int) -> Reader:
    """A reader of the training data with another size of its cache; whoever asks for it closes it."""
    options = datamodule.reader_options
    datamodule.reader_options = {**options, "cache_bytes": cache_bytes}
    try:
        return datamodule.stages.open("train")
    finally:
        datamodule.reader_options = options


def _endless(loader: BatchLoader) -> Iterator[Any]:
    while True:
        yield from loader


def _processes() -> list[str]:
    return ["self", *(str(child.pid) for child in multiprocessing.active_children())]


def _cpu_s() -> float:
    """CPU seconds of this process and its workers until now."""
    total = 0.0
    for process in _processes():
        # The name of a program, in brackets, may have blanks in it.
        fields = _read_proc(process, "stat").rpartition(")")[2].split()
        total += sum(map(int, fields[11:13])) / _TICKS_PER_S if len(fields) > 12 else 0.0
    return total


def _memory_bytes() -> int:
    """Memory of this process and its workers, without pages of files, which the kernel can drop."""
    total = 0
    for process in _processes():
        status = _read_proc(process, "status")
        total += sum(int(size) << 10 for size in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE))
    return total


def _read_proc(process: str, name: str) -> str:
    try:
        return Path("/proc", process, name).read_text()
    except OSError:  # A worker that ended meanwhile.
        return ""
