"""`BatchLoader` inside Lightning's loops: rows of predictions, epochs that go on half-way, states in checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast, overload

from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.progress import _ProcessedTracker
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_fastio.loader import BatchLoader


class PlannedIndices(_IndexBatchSamplerWrapper):
    """What the predict loop asks a loader for the row numbers of each batch."""

    def __init__(self, loader: BatchLoader) -> None:
        # Lightning only looks batches up, which a sequence can do as well as the list it declares.
        self.seen_batch_indices = _RowsOfBatches(loader)  # type: ignore[assignment]


class _RowsOfBatches(Sequence[list[int]]):
    """Batch number to row numbers, computed when asked for, so that reading ahead does not matter."""

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    @overload
    def __getitem__(self, batch: int) -> list[int]: ...
    @overload
    def __getitem__(self, batch: slice) -> Sequence[list[int]]: ...
    def __getitem__(self, batch: int | slice) -> list[int] | Sequence[list[int]]:
        if isinstance(batch, slice):
            return [self[index] for index in range(*batch.indices(len(self)))]
        return self._loader.rows_of(batch)

    def __iter__(self) -> Iterator[list[int]]:
        return (self[batch] for batch in range(len(self)))


def begin_epoch(trainer: Trainer) -> None:
    """Bring the fit loop in step with its loaders at the start of an epoch, before the first batch.

    - A checkpoint that is saved inside a step, or after an exception in it, counts the batch of that step as not
      yet seen.
    - Loader states of a checkpoint that were left waiting, because `estimated_stepping_batches` built the loaders
      before the checkpoint was read (Lightning #20550), are loaded now.
    - An epoch that ``max_steps`` ended half-way is finished first.
    - Lightning 2.4 takes a checkpoint of `on_train_batch_end` for one of a batch that is not done, and would count one
      batch too few to the end of the epoch.
    - An epoch that goes on with another batch size has another number of batches than the one after it, but the
      loop counts them only when it builds its loaders.
    """
    loop = trainer.fit_loop
    combined = loop._combined_loader
    if combined is None or combined._iterator is None or not trainer.training:
        return
    if "_state_dicts" not in vars(combined):
        combined._state_dicts = partial(_states_of_consumed, loop, combined)  # type: ignore[method-assign]
    progress = loop.epoch_loop.batch_progress
    is_unfinished = 0 < progress.current.ready < loop.max_batches
    if loop._combined_loader_states_to_load and (loop.restarting or is_unfinished):
        combined._load_state_dicts(loop._combined_loader_states_to_load)
        loop._combined_loader_states_to_load = []
    if is_unfinished:
        for loader in combined.flattened:
            if isinstance(loader, BatchLoader):
                loader.finish_skipped(counted=loop.restarting)
    if loop.restarting and not hasattr(loop.epoch_loop, "restarted_on_train_batch_end"):
        done = cast(_ProcessedTracker, progress.current).processed
        if progress.current.completed == done - 1:
            progress.increment_completed()
    limits = [
        _parse_num_batches(RunningStage.TRAINING, len(loader), trainer.limit_train_batches)
        if isinstance(loader, BatchLoader)
        else limit
        for loader, limit in zip(combined.flattened, combined.limits or [], strict=True)
    ]
    if limits == combined.limits:
        return
    combined.limits = limits
    combined._iterator.limits = limits
    loop.max_batches = len(combined)
    if loop._data_fetcher is not None:
        loop._data_fetcher.length = len(combined)
    if isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(loop.max_batches * trainer.val_check_interval))


def _states_of_consumed(loop: _FitLoop, combined: CombinedLoader) -> list[dict[str, Any]]:
    """Loader states after the batches whose steps are done; Lightning's own count those that were fetched."""
    fetched = 0 if loop._data_fetcher is None else loop._data_fetcher.fetched
    is_ahead = fetched > cast(_ProcessedTracker, loop.epoch_loop.batch_progress.current).processed
    own = [loader for loader in combined.flattened if isinstance(loader, BatchLoader)]
    # A loader that was used up before the others took no part in the last fetch.
    latest = max((loader.num_delivered for loader in own), default=0)
    return [
        loader.state_dict_before_last()
        if is_ahead and isinstance(loader, BatchLoader) and loader.num_delivered == latest
        else loader.state_dict()
        for loader in combined.flattened
        if isinstance(loader, _Stateful)
    ]
