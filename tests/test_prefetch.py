"""The thread that fetches ahead, the order of copies, and DevicePrefetcher."""

from __future__ import annotations

import threading
import weakref
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_fastio import prefetch
from lightning_fastio.errors import ConfigError
from lightning_fastio.prefetch import DevicePrefetcher, Pump, rows_in
from lightning_fastio.staging import Staged, Stager, move_batch, tensors_in
from tests.recording_backend import RecordingBackend

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Sample:
    x: torch.Tensor
    name: str


class Graph:
    """Moves itself, and knows of no streams."""

    def __init__(self) -> None:
        self.nodes = torch.ones(3)
        self.moves: list[dict[str, Any]] = []

    def to(self, device: Any, **options: Any) -> Graph:
        self.moves.append(options)
        self.nodes = self.nodes.to(device)
        return self


class InPlace:
    """Moves itself and returns nothing."""

    def __init__(self) -> None:
        self.values = torch.ones(2)

    def to(self, device: Any) -> None:
        self.values = self.values.to(device)


def nested_batch() -> dict[str, Any]:
    return {
        "x": torch.ones(2, 3),
        "list": [torch.ones(1), "text"],
        "tuple": (torch.ones(4), 7),
        "pair": Pair(torch.ones(5), None),
        "sample": Sample(torch.ones(6), "six"),
        "graph": Graph(),
        "none": None,
        "number": 3,
    }


class Gate:
    """A source whose items come when the test lets them."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self.num_fetched = 0
        self.fetched = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.allowed.acquire()
        if self.num_fetched == self.num_items:
            raise StopIteration
        self.num_fetched += 1
        self.fetched.release()
        return self.num_fetched - 1


def same(item: Any) -> Any:
    return item


# Pump


def test_items_come_in_order_and_then_the_end() -> None:
    pump: Pump[int] = Pump(iter(range(5)), lambda item: item * 10, depth=2)
    assert [pump.take() for _ in range(5)] == [0, 10, 20, 30, 40]
    for _ in range(2):
        with pytest.raises(StopIteration):
            pump.take()
    pump.stop()


def test_no_more_than_depth_items_are_ahead() -> None:
    for depth in (1, 3):
        source = Gate(10)
        pump: Pump[int] = Pump(source, same, depth=depth)
        for _ in range(10):
            source.allowed.release()
        for _ in range(depth):
            source.fetched.acquire()
        assert not source.fetched.acquire(timeout=0.05)
        assert pump.take() == 0
        source.fetched.acquire()
        assert not source.fetched.acquire(timeout=0.05)
        pump.stop()


def test_a_limit_ends_fetching() -> None:
    source = iter(range(10))
    pump: Pump[int] = Pump(source, same, depth=4, limit=3)
    assert [pump.take() for _ in range(3)] == [0, 1, 2]
    assert pump.num_left == 0
    pump.stop()
    assert next(source) == 3


def test_bytes_bound_what_is_ready_but_one_item_always_is() -> None:
    source = Gate(10)
    pump: Pump[int] = Pump(source, same, depth=5, max_bytes=100, num_bytes=lambda item: 60)
    for _ in range(10):
        source.allowed.release()
    for _ in range(2):
        source.fetched.acquire()
    assert not source.fetched.acquire(timeout=0.05)
    assert pump.take() == 0
    source.fetched.acquire()
    pump.stop()


def test_an_error_comes_at_its_place_with_its_traceback() -> None:
    def source() -> Iterator[int]:
        yield 0
        yield 1
        raise OSError("damaged")

    pump: Pump[int] = Pump(source(), same, depth=8)
    assert [pump.take(), pump.take()] == [0, 1]
    assert pump.has_more()
    with pytest.raises(OSError, match="damaged") as raised:
        pump.take()
    assert "source" in [entry.name for entry in raised.traceback]
    with pytest.raises(StopIteration):
        pump.take()
    pump.stop()


def test_only_the_source_ends_the_data() -> None:
    def prepare(item: int) -> int:
        raise StopIteration

    pump: Pump[int] = Pump(iter([1]), prepare, depth=1)
    with pytest.raises(RuntimeError, match="while a batch was prepared") as raised:
        pump.take()
    assert isinstance(raised.value.__cause__, StopIteration)
    pump.stop()


def test_has_more_knows_the_end() -> None:
    pump: Pump[int] = Pump(iter([1]), same, depth=1)
    assert pump.has_more()
    pump.take()
    assert not pump.has_more()
    pump.stop()


def test_a_stuck_source_is_left_behind_in_time() -> None:
    source = Gate(1)
    pump: Pump[int] = Pump(source, same, depth=1)
    assert not pump.stop(timeout_s=0.01)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "fastio-prefetch")
    source.allowed.release()
    assert pump.stop(timeout_s=None)
    assert not thread.is_alive()


def test_items_are_made_under_the_gradient_mode_of_the_loop() -> None:
    def modes(item: int) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    for context, expected in (
        (torch.enable_grad(), (True, False)),
        (torch.no_grad(), (False, False)),
        (torch.inference_mode(), (False, True)),
    ):
        with context:
            pump: Pump[Any] = Pump(iter([1]), modes, depth=1)
        assert pump.take() == expected
        pump.stop()


# Staging


def test_the_consumer_waits_for_the_copy_and_every_tensor_is_recorded() -> None:
    backend = RecordingBackend("meta")
    stager = Stager(backend)
    staged = stager.stage(nested_batch())
    assert backend.calls == [("record", 1, "copy"), ("record", 2, "copy")]
    backend.calls.clear()
    moved = staged.ready()
    assert backend.calls[:3] == [("record", 3, "compute"), ("wait", 2, "compute"), ("record", 4, "compute")]
    assert backend.calls[3:] == [("record_stream", "compute")] * 6
    assert {id(tensor) for tensor in backend.recorded} == {id(tensor) for tensor in tensors_in(moved)}
    assert sorted(tensor.numel() for tensor in backend.recorded) == [1, 3, 4, 5, 6, 6]


def test_containers_and_other_things_stay_what_they_are() -> None:
    batch = nested_batch()
    moved = Stager(RecordingBackend("meta")).stage(batch).ready()
    assert {key: type(value) for key, value in moved.items()} == {key: type(value) for key, value in batch.items()}
    assert moved["list"][1] == "text"
    assert moved["tuple"][1] == 7
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].right is None
    assert moved["sample"].name == "six"
    assert moved["graph"] is batch["graph"]
    assert moved["graph"].moves == [{"non_blocking": True}]
    assert (moved["none"], moved["number"]) == (None, 3)
    assert all(tensor.device.type == "meta" for tensor in tensors_in(moved))


def test_objects_that_take_no_options_or_return_nothing_move_too() -> None:
    value = InPlace()
    assert move_batch([value], torch.device("meta"))[0] is value
    assert value.values.device.type == "meta"


def test_pageable_tensors_are_pinned_and_the_source_is_held_until_the_copy_is_done() -> None:
    backend = RecordingBackend("meta")
    stager = Stager(backend)
    batch = torch.ones(3)
    stager.stage({"x": batch, "y": "text"})
    assert [id(value) for value in backend.pinned] == [id(batch)]
    assert stager.num_pinned == 1
    ((_, source, memory),) = stager._sources
    held = weakref.ref(source["x"])
    del source, memory
    stager.stage(None)
    assert held() is not None
    backend.all_passed = True
    stager.stage(None)
    assert held() is None


class Pins:
    """Can pin itself, but not say whether it is pinned."""

    kind = Sample
    """A class that is a dataclass, in the attributes."""

    def __init__(self) -> None:
        self.values = torch.ones(2)
        self.type = Sample

    def pin_memory(self) -> Pins:
        return self

    def clone(self) -> Pins:
        return Pins()

    def to(self, device: Any) -> Pins:
        self.values = self.values.to(device)
        return self


def test_objects_that_can_pin_themselves_are_pinned() -> None:
    backend = RecordingBackend("meta")
    stager = Stager(backend)
    batch = Pins()
    moved = stager.stage([batch, Sample]).ready()
    assert backend.pinned == [batch]
    assert stager.num_pinned == 1
    assert moved[0].values.device.type == "meta"
    assert moved[1] is Sample
    # What lies on the device already needs no pinning.
    stager.stage(moved[0])
    assert stager.num_pinned == 1


def test_memory_of_an_object_that_moves_in_place_is_held_until_the_copy_is_done() -> None:
    backend = RecordingBackend("meta")
    stager = Stager(backend)
    graph = Graph()
    held = weakref.ref(graph.nodes)
    stager.stage(graph).ready()
    assert graph.nodes.device.type == "meta"
    assert held() is not None
    backend.all_passed = True
    stager.stage(None)
    assert held() is None


def test_copies_wait_for_what_made_a_batch_on_the_device() -> None:
    backend = RecordingBackend("meta")
    Stager(backend).stage(torch.ones(2, device="meta"))
    assert backend.calls == [
        ("record", 1, "compute"),
        ("wait", 1, "copy"),
        ("record", 2, "copy"),
        ("record", 3, "copy"),
    ]


def test_times_are_read_only_when_the_device_has_passed() -> None:
    backend = RecordingBackend("meta")
    stager = Stager(backend)
    stager.stage(torch.ones(2)).ready()
    assert list(stager.finished_copies()) == []
    backend.all_passed = True
    (times,) = stager.finished_copies()
    # Events 1 and 2 are around the copy, 3 and 4 around the wait; each is 10 ms after the one before.
    assert (times.copy_s, times.stall_s) == (0.01, 0.01)
    assert list(stager.finished_copies()) == []


def test_a_batch_under_way_is_opaque_and_knows_its_size() -> None:
    staged = Stager(RecordingBackend("meta")).stage([torch.ones(4), torch.ones(2, dtype=torch.uint8)])
    assert isinstance(staged, Staged)
    assert staged.nbytes == 18
    assert not hasattr(staged, "to")
    assert list(tensors_in(staged)) == []


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta:UserWarning")
def test_tensors_are_found_in_every_kind_of_batch() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    assert isinstance(packed, PackedSequence)
    assert len(list(tensors_in(packed))) == 2
    sparse = torch.eye(3).to_sparse()
    assert [tensor.shape for tensor in tensors_in(sparse)] == [(2, 3), (3,)]
    assert len(list(tensors_in(torch.eye(3).to_sparse_csr()))) == 3
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert [tensor.numel() for tensor in tensors_in(nested)] == [2, 3]
    loop: list[Any] = [torch.ones(1)]
    loop.append(loop)
    assert len(list(tensors_in(loop))) == 1


def test_rows_of_a_batch_are_those_of_its_first_tensor() -> None:
    assert rows_in({"name": ["a"], "x": torch.ones(4, 2), "y": torch.ones(9)}) == 4
    assert rows_in(torch.tensor(1.0)) == 1
    assert rows_in("text") == 0


# DevicePrefetcher


@pytest.mark.parametrize("backend", [None, RecordingBackend()])
def test_batches_are_those_of_the_loader(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "open_backend", lambda device: backend)
    loader = [torch.full((2,), float(value)) for value in range(5)]
    batches = DevicePrefetcher(loader, "cpu", depth=3)
    assert len(batches) == 5
    for _ in range(2):
        assert [batch.tolist() for batch in batches] == [[value] * 2 for value in range(5)]
    assert batches.waits.steps["epoch"].tolist() == [0] * 5 + [1] * 5
    assert batches.waits.steps["is_first"].tolist() == [True, False, False, False, False] * 2
    assert batches.waits.steps["num_rows"].tolist() == [2] * 10
    assert (batches.waits.steps["step_s"] >= batches.waits.steps["data_wait_s"]).all()


def test_leaving_the_loop_ends_the_thread() -> None:
    def use(error: type[Exception] | None) -> None:
        for batch in DevicePrefetcher(list(range(10)), "cpu"):
            if batch == 2 and error is not None:
                raise error("step")
            if batch == 2:
                break

    before = set(threading.enumerate())
    use(None)
    with pytest.raises(ValueError, match="step"):
        use(ValueError)
    assert set(threading.enumerate()) == before


def test_no_more_than_depth_and_one_batches_live() -> None:
    references: list[weakref.ref[torch.Tensor]] = []

    def loader() -> Iterator[torch.Tensor]:
        for value in range(8):
            batch = torch.full((2,), float(value))
            references.append(weakref.ref(batch))
            yield batch
            del batch

    for depth in (1, 3):
        references.clear()
        for batch in DevicePrefetcher(loader(), "cpu", depth=depth):
            # One in use, `depth` ready, and none that the thread or the generator holds on top.
            assert sum(reference() is not None for reference in references) <= depth + 1
            del batch
        assert all(reference() is None for reference in references)


def test_a_loader_without_length_has_none() -> None:
    with pytest.raises(TypeError, match="generator has no length"):
        len(DevicePrefetcher((value for value in range(3)), "cpu"))


@pytest.mark.parametrize(("options", "message"), [({"depth": 0}, "depth=0"), ({"max_bytes": 0}, "max_bytes=0")])
def test_arguments_are_checked(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DevicePrefetcher([], "cpu", **options)
