"""Precision that the callback installs, against ``Trainer(precision=...)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fastio.callbacks.memory import MemoryHygieneCallback
from tests.callbacks.small_runs import QUIET, ManualNet, Net, assert_same_weights, fit

pytestmark = QUIET


@pytest.mark.parametrize(
    ("net", "options"),
    [
        (Net, {}),
        (Net, {"gradient_clip_val": 0.1}),
        (Net, {"accumulate_grad_batches": 3}),
        (ManualNet, {}),
    ],
)
def test_weights_equal_those_of_trainer_precision(tmp_path: Path, net: type[Net], options: dict[str, Any]) -> None:
    ours = fit(tmp_path, [MemoryHygieneCallback("bf16-mixed")], net(), **options)
    stock = fit(tmp_path, [], net(), precision="bf16-mixed", **options)
    assert {dtype for _, dtype in ours.dtypes} == {torch.bfloat16}
    assert ours.dtypes == stock.dtypes
    assert_same_weights(ours, stock)


def test_auto_leaves_a_cpu_run_as_it_is(tmp_path: Path) -> None:
    ours = fit(tmp_path, [MemoryHygieneCallback()])
    assert {dtype for _, dtype in ours.dtypes} == {torch.float32}
    assert_same_weights(ours, fit(tmp_path, []))
