"""What can be read off a user's loaders, for advice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

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
            persistent_workers=loader.persistent_workers,
            measures_itself=True,
            max_workers=max_workers,
            is_pinned=loader.pin_memory,
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
