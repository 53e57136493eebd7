"""`ProcessWorkers`: batches fetched ahead in worker processes, on torch's DataLoader."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_fastio.errors import ConfigError
from lightning_fastio.loader.fetch import BatchFetcher, Fetched
from lightning_fastio.loader.tasks import Task
from lightning_fastio.loader.workers import MakeTasks, Workers


class ProcessWorkers(Workers):
    """Fetches ahead in the worker processes of a torch DataLoader, for transforms that hold the GIL."""

    def __init__(self, loader: DataLoader[Any], tasks: TaskSampler, make_tasks: MakeTasks, numbers: range) -> None:
        tasks.renew(make_tasks, numbers)
        self._iterator: Iterator[Fetched] | None = iter(loader)

    def _take(self) -> Fetched:
        if self._iterator is None:
            raise StopIteration
        return next(self._iterator)

    def _stop(self) -> None:
        self._iterator = None


class TaskSampler(Sampler[Task]):
    """Hands the tasks of one epoch after the other to a DataLoader whose workers persist."""

    def __init__(self) -> None:
        self._tasks: Iterator[Task] = iter(())

    def renew(self, make_tasks: MakeTasks, numbers: range) -> None:
        """Set the tasks of the next iteration."""
        self._tasks = (make_tasks(range(number, number + 1))[0] for number in numbers)

    def __iter__(self) -> Iterator[Task]:
        return self._tasks


class TaskDataset(Dataset[Fetched]):
    """Makes a fetcher look like a dataset whose indices are tasks."""

    def __init__(self, fetcher: BatchFetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, task: Task) -> Fetched:
        return self._fetcher(task)


def start_processes(
    fetcher: BatchFetcher,
    tasks: TaskSampler,
    *,
    num_workers: int,
    prefetch_factor: int,
    multiprocessing_context: str,
    persistent_workers: bool,
    pin_memory: bool,
) -> DataLoader[Any]:
    """A DataLoader whose workers fetch whole batches; they start when it is iterated.

    Raises:
        ConfigError: A transform cannot be sent to another process.
    """
    if multiprocessing_context != "fork":
        for transform in fetcher.transforms:
            _check_picklable("transform", transform)
        _check_picklable("sample_transform", fetcher.sample_transform)
    return DataLoader(
        TaskDataset(fetcher),
        batch_size=None,
        sampler=tasks,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        multiprocessing_context=multiprocessing_context,
        persistent_workers=persistent_workers,
        pin_memory=pin_memory,
        worker_init_fn=_init_worker,
        # Its own generator, so that starting workers does not move the global one.
        generator=torch.Generator(),
    )


def _check_picklable(name: str, transform: object) -> None:
    try:
        pickle.dumps(transform)
    except Exception as error:
        raise ConfigError(
            f"{name}={transform!r} cannot be sent to worker processes ({error}): define it as a function or class of a "
            "module, not as a lambda or local function, or use worker_type='thread'"
        ) from error


def _init_worker(worker: int) -> None:
    """One core for each worker: torch has set its own threads to one already, Arrow has not."""
    import pyarrow

    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
