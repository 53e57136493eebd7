"""`tune`: measure, decide, and leave everything as it was."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter
from typing import Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_fastio.allowance import cpu_allowance, memory_allowance
from lightning_fastio.datamodules import FastIODataModule
from lightning_fastio.errors import ConfigError
from lightning_fastio.tuning.probe import LoaderProbe
from lightning_fastio.tuning.ranks import Ranks
from lightning_fastio.tuning.report import Tuning
from lightning_fastio.tuning.search import Finding, Search
from lightning_fastio.tuning.settings import Settings, Space
from lightning_fastio.tuning.step import Step, StepProbe, doublings

_LEAST_S_FOR_PROCESSES = 8.0
"""A worker process takes seconds to start."""


def tune(
    datamodule: FastIODataModule,
    model: LightningModule | None = None,
    *,
    trainer: Trainer | None = None,
    seconds: float = 60.0,
    batch_sizes: Sequence[int] | Literal["keep", "auto"] = "keep",
    depth: int = 2,
) -> Tuning:
    """Find loader settings by short measurements on your own data, transforms and model.

    The cheapest settings (threads before processes, fewer workers, a smaller cache, less prefetching) within 5 % of
    the fastest are chosen; with a model, the cheapest that are clearly faster than its training step. Without a model
    CUDA is not started. Random generators, the data module, the model, threads and worker processes are left as they
    were found.

    Example:
        >>> tuning = tune(data, model)
        >>> tuning.apply(data)
        >>> tuning.save("tuned.yaml")  # fastio fit -c config.yaml -c tuned.yaml

    Args:
        datamodule: The data module, with its transforms.
        model: Its training step is measured on a copy.
        trainer: Whose device and precision the step is measured with, and whose devices share the CPUs. Needed where
            several ranks have a GPU each.
        seconds: Time that it takes at most; a measurement that has begun is ended.
        batch_sizes: With a model, batch sizes to choose from: the smallest within 5 % of the most rows per second
            that fit in memory. auto tries 8, 16, 32 and so on. keep leaves the batch size alone, since another one
            trains differently.
        depth: Depth of PrefetchCallback, whose batches take their room while batch sizes are tried.

    Raises:
        ConfigError: There is nothing to tune, or several ranks run this and cannot agree.
    """
    started = perf_counter()
    if not isinstance(datamodule, FastIODataModule):
        raise ConfigError(
            f"tune() takes a FastIODataModule, not {type(datamodule).__name__}: NumpyDataModule, HDF5DataModule or "
            "ParquetDataModule"
        )
    if batch_sizes != "keep" and model is None:
        raise ConfigError("a batch size can be judged by the training step alone: give model=")
    ranks = Ranks()
    devices = max(ranks.per_node, trainer.num_devices if trainer is not None else 1)
    with _undisturbed(datamodule, uses_model=model is not None):
        datamodule.setup("fit")
        settings, space = _start(datamodule, devices, has_time_for_processes=seconds >= _LEAST_S_FOR_PROCESSES)
        step: Step | None = None
        steps: list[Step] = []
        device = torch.device("cpu")
        if model is not None:
            step_probe = StepProbe(
                model, datamodule, trainer=trainer, step_s=min(2.0, seconds / 20), depth=depth, agree=ranks.smallest
            )
            step, steps = step_probe.find_batch_size(
                _batch_sizes(batch_sizes, settings.batch_size, len(datamodule.stages.rows("train"))),
                lambda: ranks.smallest(started + seconds / 2 - perf_counter()) <= 0,
            )
            device = step_probe.device
            settings = replace(settings, batch_size=step.batch_size, pin_memory=device.type == "cuda")
        finding = _search(
            datamodule,
            settings,
            replace(space, to_cuda=device.type == "cuda"),
            device=device,
            ends_at=started + seconds,
            needed=None if step is None else step.rows_per_s,
            ranks=ranks,
        )
    decided = finding.decided if batch_sizes == "keep" else ("batch_size", *finding.decided)
    return Tuning(
        finding.settings,
        decided,
        finding.rows_per_s,
        step,
        finding.tried,
        steps,
        _notes(space, finding, has_transform=datamodule.has_transform),
    )


def _start(datamodule: FastIODataModule, devices: int, *, has_time_for_processes: bool) -> tuple[Settings, Space]:
    """The settings as they are, and what is worth trying."""
    loader = datamodule.new_train_loader()
    mixes_windows = loader.plan.shuffle == "block"
    settings = Settings(
        batch_size=loader.batch_size,
        num_workers=max(1, loader.num_workers),
        worker_type=loader.worker_type,
        prefetch_factor=loader.prefetch_factor,
        cache_bytes=datamodule.reader_options["cache_bytes"] if mixes_windows else 0,
    )
    space = Space(
        cpus=cpu_allowance() / devices,
        tries_processes=datamodule.has_transform and has_time_for_processes,
        max_cache_bytes=(memory_allowance() or 0) // 4 // devices if mixes_windows else 0,
    )
    return settings, space


def _search(
    datamodule: FastIODataModule,
    settings: Settings,
    space: Space,
    *,
    device: torch.device,
    ends_at: float,
    needed: float | None,
    ranks: Ranks,
) -> Finding:
    """Try loaders until the time is up."""
    left_s = ends_at - perf_counter()
    probe = LoaderProbe(datamodule, probe_s=max(0.05, min(0.5, left_s / 150)), device=device)
    try:
        # The first reads find a cold page cache and load libraries: they count for nobody.
        warm_at = perf_counter() + left_s / 20
        while True:
            probe(settings)
            if ranks.smallest(warm_at - perf_counter()) <= 0:
                break
        probe.release()
        search = Search(probe, clock=perf_counter, ends_at=ends_at, agree=ranks.smallest, needed_rows_per_s=needed)
        return search.run(settings, space)
    finally:
        probe.release()


def _batch_sizes(wanted: Sequence[int] | Literal["keep", "auto"], present: int, num_rows: int) -> Sequence[int]:
    if wanted == "keep":
        return [present]
    return doublings(present, num_rows) if wanted == "auto" else sorted(wanted)


def _notes(space: Space, finding: Finding, *, has_transform: bool) -> list[str]:
    notes = []
    if finding.is_enough:
        notes.append("Stopped early: the loader is clearly faster than the step needs.")
    if has_transform and not space.tries_processes:
        notes.append(f"Worker processes were not tried: they need {_LEAST_S_FOR_PROCESSES:.0f} seconds or more.")
    if not has_transform:
        notes.append("Worker processes were not tried: without a transform, threads do the same for less.")
    notes += dict.fromkeys(f"Cannot run: {each.obstacle}." for each in finding.tried if each.obstacle)
    if "cache_bytes" in finding.decided:
        notes.append("A larger cache also mixes more rows in the block shuffle.")
    return notes


@contextmanager
def _undisturbed(datamodule: FastIODataModule, *, uses_model: bool) -> Iterator[None]:
    """Keep random generators and the data module as they are, and Lightning quiet."""
    # Asking for the state of a CUDA generator starts CUDA.
    is_started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    include_cuda = is_started or (uses_model and torch.cuda.is_available())
    trainer, num_threads = datamodule.trainer, torch.get_num_threads()
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with isolate_rng(include_cuda=include_cuda), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(num_threads)
        datamodule.trainer = trainer
        datamodule.stages.close()
