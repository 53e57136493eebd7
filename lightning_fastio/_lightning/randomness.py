"""Which batches may be fetched in a thread without changing the random numbers that training draws.

The global generators are shared by all threads. A DataLoader draws its base seed when it starts, a shuffling sampler
its seed at the first batch, and a dataset in this process may draw for every item. Where that happens in a thread,
training draws other numbers than in a run without it, and other ones in each run. So batches that may draw are
fetched on the training thread, in the order in which Lightning would fetch them, and all others in the thread.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_fastio.loader import BatchLoader

T = TypeVar("T")


class QuietFetches:
    """Tells how many of the next fetches leave the global generators alone, for one pass over the loaders."""

    def __init__(self, combined: CombinedLoader, keep_randomness: bool, tell: Callable[[str], None]) -> None:
        self._combined = combined
        self._tell = tell
        # The order of a `BatchLoader` is drawn from generators of its own; only a transform in this thread may draw.
        never_draws = all(isinstance(loader, BatchLoader) and loader.num_workers for loader in combined.flattened)
        self._is_free = never_draws or not keep_randomness
        self._draws = False
        self._num_since_start = 0

    def num_quiet(self) -> int | None:
        """Fetches from now on that draw nothing; None where that holds for all."""
        if self._is_free:
            return None
        # The first fetch starts the sampler, and the second shows whether the dataset draws.
        if self._draws or self._num_since_start < 2:
            return 0
        return self._num_until_start()

    def note_fetch(self) -> None:
        """Count a fetch."""
        self._num_since_start += 1

    def fetch(self, source: Iterator[T]) -> T:
        """Fetch on this thread."""
        if self._num_since_start and self._num_until_start() == 0:
            self._num_since_start = 0
        before = _generator_states() if self._num_since_start == 1 and not self._draws else None
        fetched = next(source)
        if before is not None and before != _generator_states():
            self._draws = True
            self._tell(
                "The dataset draws random numbers in this process, from the generators that training draws from as "
                "well. Nothing is fetched ahead, so that the run stays as it is without PrefetchCallback. To fetch "
                "ahead: DataLoader(num_workers=1) or more, a generator that belongs to the dataset, or "
                "PrefetchCallback(keep_randomness=False)."
            )
        self.note_fetch()
        return fetched

    def _num_until_start(self) -> int | None:
        """Fetches before the next one that starts a loader; 0 where that cannot be told."""
        combined, iterator = self._combined, self._combined._iterator
        loaders = combined.flattened
        if len(loaders) == 1 or combined._mode in ("min_size", "max_size"):
            return None
        lengths: list[Any] = [sized_len(loader) for loader in loaders]
        if iterator is None or not all(lengths):
            return 0
        if combined._mode == "sequential":
            current: int = iterator._iterator_idx  # type: ignore[attr-defined]
            if current >= len(loaders):
                return 0
            limit = combined.limits[current] if combined.limits else lengths[current]
            return max(0, int(min(limit, lengths[current])) - iterator._idx)
        # Loaders that are cycled start again where they end.
        fetched = iterator._idx
        return min(0 if fetched and fetched % length == 0 else length - fetched % length for length in lengths)


def _generator_states() -> tuple[Any, ...]:
    numpy_state: tuple[Any, ...] = np.random.get_state()  # type: ignore[assignment]  # noqa: NPY002
    name, keys, *rest = numpy_state
    return torch.get_rng_state().numpy().tobytes(), name, keys.tobytes(), *rest, random.getstate()
