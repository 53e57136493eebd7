"""The contract between what is converted and the rest of the converter: `Source`, its tasks, and what they give.

Worker processes import this module, so it stays free of torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

RowBatch: TypeAlias = dict[str, Any]
"""Field name to array, list of str, list of bytes or list of arrays; every field has one entry a row."""

Engine: TypeAlias = Literal["auto", "process", "thread", "ray"]
"""Where tasks are loaded."""

TASK_BYTES = 8 << 20
"""Decoded bytes that one task aims at. A constant: where tasks end decides where shards end, so that it may
depend neither on the number of workers nor on the memory of the machine."""


@dataclass(frozen=True)
class Skipped:
    """An input that could not be converted."""

    item: str
    """The input: path relative to the source, or file and line."""
    reason: str
    """Why, in words."""


@dataclass
class Loaded:
    """What one task gave: rows in order, and the inputs that gave none."""

    rows: RowBatch
    """The rows; empty when every input of the task was skipped."""
    skipped: list[Skipped] = field(default_factory=list)
    """Inputs left out, in order."""
    statistics: Any = None
    """Statistics of the rows, when they were asked for."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(next(iter(self.rows.values()))) if self.rows else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows."""
        return sum(_size_of(values) for values in self.rows.values())


def _size_of(values: Any) -> int:
    if hasattr(values, "nbytes"):
        return int(values.nbytes)
    return sum(value.nbytes if hasattr(value, "nbytes") else len(value) for value in values)


@dataclass(frozen=True)
class Task:
    """The smallest piece of work: a run of inputs that are loaded together."""

    payload: Any
    """What ``Source.load`` needs; small, or at most a few MiB, and picklable."""
    num_items: int
    """Inputs in it, for the progress display."""
    num_bytes: int = 0
    """Bytes of them as stored in the source."""
    split: str = ""
    """Sub-folder of the destination, such as ``train``; empty without splits."""


@dataclass(kw_only=True)
class Source(ABC):
    """Something to convert: an ordered list of tasks, the same at every run."""

    load: Callable[[Any], Loaded]
    """Turns the payload of a task into rows. Picklable, and without the list of inputs: it goes to every worker."""
    fingerprint: str
    """Changes when an input is added, removed or replaced."""
    num_items: int | None = None
    """Inputs over all tasks; None when only reading them tells."""
    num_bytes: int | None = None
    """Bytes of all inputs as stored; None when unknown."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Stored with the rows and delivered as ``Reader.metadata``, such as ``classes`` as a JSON list."""
    skipped: list[Skipped] = field(default_factory=list)
    """Inputs left out before any was loaded, such as an image without its mask."""
    split_names: tuple[str, ...] = ()
    """The splits that tasks belong to, in order; empty without splits."""
    engine: Engine = "process"
    """Where ``load`` runs best: processes for decoding in Python, threads for work that releases the GIL."""

    @abstractmethod
    def tasks(self) -> Iterator[Task]:
        """The tasks in order. A second call gives the same ones again."""

    def close(self) -> None:
        """Release files and remove copies. Nothing to do for most sources."""
        return
