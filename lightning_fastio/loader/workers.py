"""Numbered tasks to results in their order: what all kinds of workers have in common, and those of no thread."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from lightning_fastio.errors import FastIOError
from lightning_fastio.loader.fetch import BatchFetcher, Fetched
from lightning_fastio.loader.tasks import Task

MakeTasks: TypeAlias = Callable[[range], list[Task]]
"""Gives the tasks with some numbers; may be called from any thread."""


class Workers(ABC):
    """Results in the order of their numbers; ends after the last one, and after an error."""

    _is_over = False
    _was_closed = False

    def __next__(self) -> Fetched:
        if self._was_closed:
            raise FastIOError(
                "the loader was closed while it was iterated: let one iteration end before you close it or, with "
                "worker processes, begin another one"
            )
        if self._is_over:
            raise StopIteration
        try:
            return self._take()
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Stop; results that are under way are dropped, and asking for more is an error. Idempotent."""
        self._was_closed = not self._is_over
        self._end()

    def _end(self) -> None:
        self._is_over = True
        self._stop()

    @abstractmethod
    def _take(self) -> Fetched:
        """The next result."""

    @abstractmethod
    def _stop(self) -> None:
        """Free what runs. Idempotent."""


class InlineWorkers(Workers):
    """Fetches each batch in the calling thread when it is asked for."""

    def __init__(self, fetcher: BatchFetcher, make_tasks: MakeTasks, numbers: range) -> None:
        self._fetcher = fetcher
        self._make_tasks = make_tasks
        self._numbers = iter(numbers)

    def _take(self) -> Fetched:
        number = next(self._numbers)
        return self._fetcher(self._make_tasks(range(number, number + 1))[0])

    def _stop(self) -> None:
        self._numbers = iter(())
