"""When the Trainer logs."""

from __future__ import annotations

from lightning.pytorch import Trainer


def log_step(trainer: Trainer) -> int | None:
    """The step under which metrics of the batch that just ended are logged, or None where the Trainer logs none."""
    if not trainer.loggers or trainer.fit_loop._should_accumulate():
        return None
    if not trainer._logger_connector.should_update_logs:
        return None
    step: int = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step
