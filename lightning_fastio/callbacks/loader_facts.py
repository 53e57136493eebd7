"""What can be read off a user's loaders, for advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_fastio.adjusting import WorkerAdjuster
from lightning_fastio.allowance import memory_allowance
from lightning_fastio.loader import BatchLoader
from lightning_fastio.verdict import LoaderFacts


def facts_of(loaders: Sequence[Any], *, max_workers: int) -> LoaderFacts:
    """Facts about the first loader of a stage, which advice speaks of."""
    loader = loaders[0] if loaders else None
    name = type(loader).__name__
    if isinstance(loader, BatchLoader):
        return LoaderFacts(
            name,
            num_workers=loader.num_workers,
            worker_type=loader.worker_type,
            measures_itself=True,
            max_workers=max_workers,
            is_pinned=loader.pin_memory,
            slow_layout=_slow_layout(loader),
        )
    if isinstance(loader, DataLoader):
        return LoaderFacts(
            name,
            num_workers=loader.num_workers,
            persistent_workers=loader.persistent_workers,
            max_workers=max_workers,
            is_pinned=loader.pin_memory,
        )
    return LoaderFacts(name, max_workers=max_workers)


def _slow_layout(loader: BatchLoader) -> str:
    """The field with the most bytes among those that could be stored better."""
    schema = loader.reader.schema
    slow = [layout for layout in loader.reader.layout() if layout.hint]
    worst = max(slow, key=lambda layout: schema[layout.name].nbytes if layout.name in schema else 0, default=None)
    return "" if worst is None else f"Field {worst.name!r}: {worst.hint}"


_LOOK_AHEAD_FRACTION = 0.25
"""Share of the memory allowance that batches which are read ahead may take up."""


def adjuster_of(loaders: Sequence[Any], *, max_workers: int) -> WorkerAdjuster | None:
    """What adjusts the reader threads of a single loader that leaves their number open; None for all others."""
    loader = loaders[0] if len(loaders) == 1 else None
    if not isinstance(loader, BatchLoader) or not loader.adjusts:
        return None
    ahead_bytes = max(1, loader.prefetch_factor * loader.batch_size * loader.reader.schema.row_bytes)
    memory = memory_allowance()
    if memory is not None:
        max_workers = min(max_workers, int(_LOOK_AHEAD_FRACTION * memory / ahead_bytes))
    # Of batches that are read together the first one waits for all: they are judged together.
    return WorkerAdjuster(loader.num_workers, max(1, max_workers), stride=loader.batches_per_read)
