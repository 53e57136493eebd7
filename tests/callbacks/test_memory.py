"""MemoryHygieneCallback in whole runs on a CPU: policies by count, and everything restored."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_fastio.callbacks.memory import MemoryHygieneCallback
from lightning_fastio.errors import ConfigError
from tests.callbacks.small_runs import QUIET, fit

pytestmark = QUIET


def test_automatic_collection_is_off_during_training_and_restored(tmp_path: Path) -> None:
    seen = []

    class Look(Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            seen.append(gc.isenabled())

    fit(tmp_path, [MemoryHygieneCallback(gc_every_n_steps=3), Look()])
    assert seen == [False] * 20
    assert gc.isenabled()


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp8"},
        {"empty_cache": "always"},
        {"pressure_fraction": 2.0},
        {"check_every_n_steps": 0},
        {"gc_every_n_steps": 0},
    ],
)
def test_arguments_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        MemoryHygieneCallback(**options)
