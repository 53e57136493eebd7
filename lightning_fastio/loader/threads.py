"""`ThreadWorkers`: batches fetched ahead in threads of this process."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue

import torch

from lightning_fastio.loader.fetch import BatchFetcher, Fetched
from lightning_fastio.loader.workers import MakeTasks, Workers


class ThreadWorkers(Workers):
    """Fetches ahead in threads.

    A batch is handed over as it is: no pickling, no shared memory. Whatever raises in a thread is raised again at
    its own batch. Threads end when the last batch is taken, on `close`, and when this object is forgotten.
    """

    def __init__(
        self,
        fetcher: BatchFetcher,
        make_tasks: MakeTasks,
        numbers: range,
        *,
        num_threads: int,
        ahead: int,
        group: int = 1,
    ) -> None:
        """Start.

        Args:
            fetcher: Does the work.
            make_tasks: Gives the tasks.
            numbers: Numbers of the tasks.
            num_threads: Threads at first.
            ahead: Groups that are finished or under way at most, beyond the one that the caller holds.
            group: Tasks that are fetched by one read, where batches are so small that handing them over would cost
                more than reading them.
        """
        self._groups = _cut(numbers, group, num_threads)
        self._num_ordered = 0
        self._num_taken = 0
        self._ahead = ahead
        self._finished: dict[int, list[Fetched | BaseException]] = {}
        self._current: deque[Fetched | BaseException] = deque()
        self._crew = _Crew(fetcher, make_tasks, self._groups)
        # Threads refer to the crew only, so that an iteration which is dropped half-way can be collected.
        self._finalizer = weakref.finalize(self, self._crew.dismiss)
        self._order()
        self._crew.resize(num_threads)

    def resize(self, num_threads: int, ahead: int) -> None:
        """Change the number of threads and the look-ahead while running; order and results stay the same."""
        if not self._is_over:
            self._ahead = ahead
            self._order()
            self._crew.resize(num_threads)

    def _take(self) -> Fetched:
        if not self._current:
            self._current.extend(self._take_group())
        result = self._current.popleft()
        if isinstance(result, BaseException):
            raise result
        if not self._current and self._num_taken == len(self._groups):
            self._end()
        return result

    def _stop(self) -> None:
        self._current.clear()
        self._finished.clear()
        self._finalizer()

    def _take_group(self) -> list[Fetched | BaseException]:
        wanted = self._num_taken
        if wanted == len(self._groups):
            raise StopIteration
        while wanted not in self._finished:
            group, results = self._crew.done.get()
            if group is None:
                raise StopIteration  # Closed by another thread.
            self._finished[group] = results
        self._num_taken += 1
        self._order()
        return self._finished.pop(wanted)

    def _order(self) -> None:
        """Order as many groups as there is room for."""
        for group in range(self._num_ordered, min(self._num_taken + self._ahead, len(self._groups))):
            self._num_ordered = group + 1
            self._crew.tasks.put(group)


def _cut(numbers: range, most: int, num_threads: int) -> list[range]:
    """Groups of up to ``most``: smaller at the start, so that the first batch comes soon, and at the end, so that no
    thread has much left to do when the others are done.
    """
    groups, start = [], 0
    while start < len(numbers):
        size = max(1, min(most, start, (len(numbers) - start) // num_threads))
        groups.append(numbers[start : start + size])
        start += size
    return groups


class _Crew:
    """Threads that take groups of tasks from one queue and put results into another; None sends one home.

    Both queues are C code, so that handing over a batch costs microseconds of the training thread.
    """

    def __init__(self, fetcher: BatchFetcher, make_tasks: MakeTasks, groups: Sequence[range]) -> None:
        self.tasks: SimpleQueue[int | None] = SimpleQueue()
        self.done: SimpleQueue[tuple[int | None, list[Fetched | BaseException]]] = SimpleQueue()
        self._fetcher = fetcher
        self._make_tasks = make_tasks
        self._groups = groups
        self._threads: list[threading.Thread] = []
        self._num_threads = 0

    def resize(self, num_threads: int) -> None:
        """Hire, or send home after what is ordered already."""
        for _ in range(self._num_threads - num_threads):
            self.tasks.put(None)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(num_threads - self._num_threads):
            thread = threading.Thread(target=self._run, name=f"fastio-read-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._num_threads = num_threads

    def dismiss(self) -> None:
        """Drop what is ordered, end the threads, and wake up whoever waits for a result."""
        with suppress(Empty):
            while True:
                self.tasks.get_nowait()
        for _ in self._threads:
            self.tasks.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._threads, self._num_threads = [], 0
        self.done.put((None, []))

    def _run(self) -> None:
        _use_one_core()
        fetcher = self._fetcher.for_thread()
        while (group := self.tasks.get()) is not None:
            self.done.put((group, self._fetch(fetcher, self._groups[group])))

    def _fetch(self, fetcher: BatchFetcher, numbers: range) -> list[Fetched | BaseException]:
        try:
            return list(fetcher.fetch_together(self._make_tasks(numbers)))
        except BaseException as error:
            if len(numbers) == 1:
                return [error]
        # One of them fails: the others are fetched alone, and the error comes at its own batch.
        return [result for number in numbers for result in self._fetch(fetcher, range(number, number + 1))]


_torch_threads = threading.Lock()


def _use_one_core() -> None:
    """Let torch operations in this thread run alone: teams of threads would spin against each other at barriers.

    ``torch.set_num_threads`` acts on the calling thread, and is also what threads that start later begin with. So
    another thread, which ends at once, puts the old number back for those.
    """
    with _torch_threads:
        inherited = torch.get_num_threads()
        torch.set_num_threads(1)
        restore = threading.Thread(target=torch.set_num_threads, args=(inherited,), name="fastio-restore", daemon=True)
        restore.start()
        restore.join()
