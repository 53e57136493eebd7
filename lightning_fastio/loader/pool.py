"""`WorkerPool`: whichever workers a loader was asked for."""

from __future__ import annotations

import weakref
from typing import Any, Literal

from torch.utils.data import DataLoader

from lightning_fastio.errors import ConfigError
from lightning_fastio.loader.fetch import BatchFetcher
from lightning_fastio.loader.processes import ProcessWorkers, TaskSampler, start_processes
from lightning_fastio.loader.threads import ThreadWorkers
from lightning_fastio.loader.workers import InlineWorkers, MakeTasks, Workers


class WorkerPool:
    """Starts the workers of each iteration, and keeps processes from one to the next."""

    def __init__(
        self,
        fetcher: BatchFetcher,
        *,
        num_workers: int,
        worker_type: Literal["thread", "process"],
        prefetch_factor: int,
        multiprocessing_context: str,
        persistent_workers: bool,
        pin_memory: bool,
    ) -> None:
        """Set up; nothing starts yet. The arguments are those of `BatchLoader`."""
        self.num_workers = num_workers
        self.in_processes = worker_type == "process" and num_workers > 0
        """Whether batches are fetched in other processes."""
        self._fetcher = fetcher
        self._prefetch_factor = prefetch_factor
        self._process_options: dict[str, Any] = {
            "multiprocessing_context": multiprocessing_context,
            "persistent_workers": persistent_workers,
            "pin_memory": pin_memory,
        }
        self._process_loader: DataLoader[Any] | None = None
        self._process_tasks = TaskSampler()
        # An iteration owns its workers, so that they stop when it is dropped half-way.
        self._running: weakref.WeakSet[Workers] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        # What runs stays in its process.
        state = {name: value for name, value in vars(self).items() if name != "_running"}
        return {**state, "_process_loader": None, "_process_tasks": TaskSampler()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _running=weakref.WeakSet())

    def start(self, make_tasks: MakeTasks, numbers: range, *, group: int = 1) -> Workers:
        """Workers for one iteration.

        Args:
            make_tasks: Gives the tasks.
            numbers: Numbers of the tasks.
            group: Tasks that one read fetches at most, in threads.
        """
        workers: Workers
        if self.num_workers == 0:
            workers = InlineWorkers(self._fetcher, make_tasks, numbers)
        elif self.in_processes:
            # The processes serve one iteration at a time.
            self._close_running()
            if self._process_loader is None:
                self._process_loader = start_processes(
                    self._fetcher,
                    self._process_tasks,
                    num_workers=self.num_workers,
                    prefetch_factor=self._prefetch_factor,
                    **self._process_options,
                )
            workers = ProcessWorkers(self._process_loader, self._process_tasks, make_tasks, numbers)
        else:
            workers = ThreadWorkers(
                self._fetcher,
                make_tasks,
                numbers,
                num_threads=self.num_workers,
                ahead=self._num_ahead,
                group=group,
            )
        self._running.add(workers)
        return workers

    def resize(self, num_workers: int) -> None:
        """Change the number of threads, also of iterations that are under way."""
        if num_workers < 1 or self.num_workers == 0 or self.in_processes:
            raise ConfigError(
                f"num_workers cannot change from {self.num_workers} to {num_workers} here: only a loader with reader "
                "threads can be resized, to 1 or more"
            )
        self.num_workers = num_workers
        for workers in list(self._running):
            if isinstance(workers, ThreadWorkers):
                workers.resize(num_workers, self._num_ahead)

    def close(self) -> None:
        """Stop everything that runs."""
        self._close_running()
        self._process_loader = None

    @property
    def _num_ahead(self) -> int:
        return self.num_workers * self._prefetch_factor

    def _close_running(self) -> None:
        for workers in list(self._running):
            workers.close()
        self._running.clear()
