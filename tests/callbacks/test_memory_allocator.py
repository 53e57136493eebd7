"""When cached memory goes back to the device."""

from __future__ import annotations

import torch

from lightning_fastio.callbacks.memory.allocator import GIB, CacheKeeper, DeviceReading, EmptyCache, open_device_memory
from tests.callbacks.small_runs import RecordingMemory, reading

CALM = reading(allocated_gib=1, reserved_gib=6, peak_gib=5)
PRESSED = reading(allocated_gib=1, reserved_gib=9, peak_gib=5)


def keeper(memory: RecordingMemory, policy: EmptyCache) -> CacheKeeper:
    return CacheKeeper(memory, policy, pressure_fraction=0.2, check_every_n_steps=10)


def run(cache: CacheKeeper, num_steps: int) -> None:
    for step in range(1, num_steps + 1):
        cache.after_step(step)


def test_what_the_next_step_takes_again_is_no_surplus() -> None:
    assert reading(allocated_gib=1, reserved_gib=8, peak_gib=8).surplus_bytes == 0
    assert reading(allocated_gib=1, reserved_gib=8, peak_gib=5).surplus_bytes == 3 * GIB


def test_pressure_is_looked_at_every_n_steps() -> None:
    memory = RecordingMemory(CALM)
    run(keeper(memory, "pressure"), 35)
    assert memory.calls == ["read"] * 3


def test_pressure_gives_back_what_the_peak_did_not_need() -> None:
    memory = RecordingMemory(PRESSED, reading(1, 5, 5), reading(1, 5, 5))
    cache = keeper(memory, "pressure")
    run(cache, 29)
    assert memory.calls == ["read", "empty_cache", "read", "read"]
    assert (cache.num_calls, cache.returned_bytes) == (1, 4 * GIB)


def test_memory_that_is_taken_again_is_left_alone_for_longer() -> None:
    memory = RecordingMemory(PRESSED)
    run(keeper(memory, "pressure"), 150)
    # Checks at 10, 20, 40, 80 (then 160): each finds the memory reserved again.
    assert memory.num_emptied == 4


def test_a_stage_end_counts_only_under_its_policy_or_pressure() -> None:
    for policy, state, num_emptied in (
        ("stage", CALM, 1),
        ("pressure", CALM, 0),
        ("pressure", PRESSED, 1),
        ("never", PRESSED, 0),
    ):
        memory = RecordingMemory(state)
        keeper(memory, policy).after_stage()  # type: ignore[arg-type]
        assert memory.num_emptied == num_emptied, policy


def test_stage_and_never_do_not_look_between_stages() -> None:
    for policy in ("stage", "never"):
        memory = RecordingMemory(PRESSED)
        run(keeper(memory, policy), 50)  # type: ignore[arg-type]
        assert memory.calls == []


def test_fragmentation_is_a_share_of_the_reserved_memory() -> None:
    assert reading(reserved_gib=4, split_bytes=GIB).fragmentation_fraction == 0.25
    assert DeviceReading(GIB, 0, 0, 0, 0, 0).fragmentation_fraction == 0.0


def test_only_cuda_devices_have_an_allocator() -> None:
    assert open_device_memory(torch.device("cpu")) is None
    assert open_device_memory(torch.device("mps")) is None
