"""What the doctor measures on a real device."""

from __future__ import annotations

import pytest
import torch

from lightning_fastio.doctor import diagnose, rates

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_pinned_copies_are_at_least_as_fast() -> None:
    device = torch.device("cuda", 0)
    pinned, pageable = (rates.copy_rate(device, pin_memory=pin_memory) for pin_memory in (True, False))
    assert pinned > 0.8 * pageable > 0


def test_each_gpu_is_named_with_its_rates() -> None:
    found = {each.check: each.finding for each in diagnose(gpu=True)}
    for index in range(torch.cuda.device_count()):
        assert torch.cuda.get_device_name(index) in found[f"GPU {index}"]
        assert "pinned" in found[f"copy to GPU {index}"]
