"""Row numbers to a finished batch: read, transform, convert. Runs in reader threads and in worker processes alike."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from lightning_fastio.errors import ConfigError, SchemaError
from lightning_fastio.formats.base import Reader
from lightning_fastio.loader.buffers import BufferPool
from lightning_fastio.loader.tasks import Task
from lightning_fastio.plan.order import Int64Array
from lightning_fastio.schema import Batch

Transform: TypeAlias = Callable[..., Any]
"""Takes a batch (or a sample) and gives one back. If it has an argument ``generator`` (torch.Generator) or ``rng``
(numpy.random.Generator), it is called with one that depends on (seed, epoch, batch, rank) alone."""


class Fetched(NamedTuple):
    """A finished batch, and what it took."""

    batch: Any
    """The batch as the training loop gets it."""
    num_rows: int
    """Rows in it."""
    read_s: float
    """Seconds of reading."""
    transform_s: float
    """Seconds in transforms."""


class BatchFetcher:
    """Fetches batches from a reader. Picklable; each thread that has transforms uses a copy of its own."""

    def __init__(
        self,
        reader: Reader,
        *,
        transforms: Sequence[Transform] = (),
        sample_transform: Transform | None = None,
        batch_as: Literal["dict", "tuple"] = "dict",
        pin_memory: bool = False,
        owns_process: bool = False,
    ) -> None:
        """Set up.

        Args:
            reader: Where rows come from.
            transforms: Each takes and returns a whole batch, one after the other.
            sample_transform: Takes and returns one sample, a dict of field to value; the results are stacked.
            batch_as: ``tuple`` gives the values in the order of the fields.
            pin_memory: Read into pinned buffers.
            owns_process: The process runs nothing else, so that its global random generators may be seeded.
        """
        self.reader = reader
        self.transforms = list(transforms)
        self.sample_transform = sample_transform
        self.batch_as = batch_as
        self.pin_memory = pin_memory
        self.owns_process = owns_process
        self._pool = BufferPool()

    @property
    def has_transform(self) -> bool:
        """Whether user code runs on batches."""
        return bool(self.transforms) or self.sample_transform is not None

    def for_thread(self) -> BatchFetcher:
        """A fetcher for one thread: the same reader, and transforms whose generators no other thread seeds."""
        clone = copy.copy(self)
        clone.sample_transform = _own(self.sample_transform)
        clone.transforms = [_own(transform) or transform for transform in self.transforms]
        return clone

    def __call__(self, task: Task) -> Fetched:
        """Fetch one batch."""
        return next(self.fetch_together([task]))

    def fetch_together(self, tasks: Sequence[Task]) -> Iterator[Fetched]:
        """Fetch several small batches by one read; they are disjoint parts of the same buffers."""
        started = perf_counter()
        rows = tasks[0].rows if len(tasks) == 1 else np.concatenate([task.rows for task in tasks])
        whole = self.reader.read(rows, self._buffers(len(rows)))
        read_s = (perf_counter() - started) / len(tasks)
        stop = 0
        for task in tasks:
            start, stop = stop, stop + len(task.rows)
            batch: Any = whole if len(tasks) == 1 else _part(whole, start, stop)
            transform_s = 0.0
            if self.has_transform:
                started = perf_counter()
                batch = self._transformed(batch, task)
                transform_s = perf_counter() - started
            if self.batch_as == "tuple" and isinstance(batch, Mapping):
                batch = tuple(batch.values())
            yield Fetched(batch, len(task.rows), read_s, transform_s)

    def _buffers(self, num_rows: int) -> Batch:
        if self.pin_memory:
            return self.reader.schema.allocate(num_rows, pin_memory=True)
        return self._pool.allocate(self.reader.schema, num_rows)

    def _transformed(self, batch: Batch, task: Task) -> Any:
        if self.owns_process:
            _seed_globals(task.seed)
        if self.sample_transform is not None:
            call = _seeded(self.sample_transform, task.seed)
            samples = [call({name: values[i] for name, values in batch.items()}) for i in range(len(task.rows))]
            if None in samples:
                raise ConfigError(f"sample_transform {_name(self.sample_transform)} returned None, not the sample")
            batch = stack_samples(samples, task.rows)
        result: Any = batch
        for number, transform in enumerate(self.transforms, start=1):
            result = as_tensors(_seeded(transform, task.seed + number)(result))
            if result is None:
                raise ConfigError(f"transform {_name(transform)} returned None; it must return the batch")
        return result


def _part(whole: Batch, start: int, stop: int) -> Batch:
    """Some rows of a batch. `data` gives each part a version of its own, so that autograd takes a change in place of
    one for what it is, not for a change of the others.
    """
    return {name: values[start:stop].data for name, values in whole.items() if isinstance(values, torch.Tensor)}


def as_tensors(value: Any) -> Any:
    """NumPy arrays in a batch as tensors; views with negative strides are copied, since torch has none."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
    if type(value) is dict:
        return {key: as_tensors(item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(as_tensors(item) for item in value)
    return value


def stack_samples(samples: Sequence[Mapping[str, Any]], rows: Int64Array) -> dict[str, Any]:
    """Samples to a batch: tensors, arrays and numbers are stacked, everything else stays a list.

    Raises:
        SchemaError: Two samples differ in their fields or shapes; the message names both rows.
    """
    names = list(samples[0])
    for sample, row in zip(samples, rows, strict=True):
        if list(sample) != names:
            raise SchemaError(f"sample_transform gave row {rows[0]} the fields {names}, but row {row} {list(sample)}")
    return {name: _stack(name, [sample[name] for sample in samples], rows) for name in names}


def _stack(name: str, values: list[Any], rows: Int64Array) -> Any:
    if isinstance(values[0], bool | int | float | np.number | np.bool_):
        return torch.as_tensor(np.asarray(values))
    if not isinstance(values[0], torch.Tensor | np.ndarray):
        return values
    tensors = [as_tensors(value) for value in values]
    for tensor, row in zip(tensors, rows, strict=True):
        if tensor.shape != tensors[0].shape:
            raise SchemaError(
                f"field {name!r}: row {rows[0]} has shape {tuple(tensors[0].shape)}, but row {row} "
                f"{tuple(tensor.shape)}; a batch needs equal shapes: resize or pad in sample_transform"
            )
    return torch.stack(tensors)


def _own(transform: Transform | None) -> Transform | None:
    """A copy where the transform has a generator that is seeded for every batch, else the transform itself."""
    return copy.deepcopy(transform) if _generator_attributes(transform) else transform


def _seeded(transform: Transform, seed: int) -> Transform:
    """The transform with generators for one batch: passed in, and set on its ``rng`` or ``generator`` attribute."""
    for name in _generator_attributes(transform):
        setattr(transform, name, _make_generator(name, getattr(transform, name), seed))
    wanted = _generator_arguments(transform)
    if not wanted:
        return transform
    generators = {name: _make_generator(name, None, seed) for name in wanted}
    return lambda value: transform(value, **generators)


def _make_generator(name: str, like: object, seed: int) -> torch.Generator | np.random.Generator | random.Random:
    if isinstance(like, random.Random):
        return random.Random(seed)
    if isinstance(like, torch.Generator) or (name == "generator" and like is None):
        return torch.Generator().manual_seed(seed % 2**63)
    return np.random.Generator(np.random.PCG64(seed))


def _generator_attributes(transform: Transform | None) -> list[str]:
    kinds = (torch.Generator, np.random.Generator, random.Random)
    return [name for name in ("rng", "generator") if isinstance(getattr(transform, name, None), kinds)]


def _generator_arguments(transform: Transform) -> list[str]:
    try:
        parameters = inspect.signature(transform).parameters
    except (TypeError, ValueError):  # A built-in without a signature takes no generator.
        return []
    return [name for name in ("rng", "generator") if name in parameters]


def _seed_globals(seed: int) -> None:
    torch.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the legacy generator is the one that users' transforms draw from
    random.seed(seed)


def _name(transform: object) -> str:
    return getattr(transform, "__qualname__", type(transform).__qualname__)
