"""BatchLoader: the same batches for any workers, exact state, private data, nothing left running."""

from __future__ import annotations

import gc
import pickle
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fastio.errors import ConfigError, FastIOError, ResumeError, SchemaError
from lightning_fastio.loader import BatchLoader
from tests.memory import MemoryReader, counting_reader


def rows_of(loader: BatchLoader) -> list[list[int]]:
    return [batch["x"].tolist() for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fastio-read")]


class BreaksAt10(MemoryReader):
    """A reader with one row that cannot be read."""

    def read(self, rows: Any, out: Any = None) -> Any:
        if 10 in np.asarray(rows):
            raise OSError("row 10 is broken")
        return super().read(rows, out)


class AddNoise:
    """A transform with a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**batch, "noise": torch.from_numpy(self.rng.random(len(batch["x"])))}


def draw_global(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**batch, "noise": torch.rand(len(batch["x"])), "np": torch.tensor(np.random.rand() + random.random())}  # noqa: NPY002


def draw_passed(batch: dict[str, torch.Tensor], generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**batch, "noise": torch.rand(len(batch["x"]), generator=generator)}


@pytest.mark.parametrize("shuffle", ["none", "global", "block"])
def test_same_batches_for_any_number_and_kind_of_workers(shuffle: Any) -> None:
    def batches(num_workers: int, worker_type: Any = "thread", persistent: bool = True) -> list[list[int]]:
        reader = counting_reader(103, blocks=[*list(range(0, 104, 10)), 103] if shuffle == "block" else None)
        with BatchLoader(
            reader,
            8,
            shuffle=shuffle,
            seed=3,
            num_workers=num_workers,
            worker_type=worker_type,
            persistent_workers=persistent,
        ) as loader:
            return rows_of(loader) + rows_of(loader)

    expected = batches(0)
    assert sorted(flat(expected[:13])) == list(range(103))
    assert (expected[:13] == expected[13:]) == (shuffle == "none")
    for num_workers in (1, 2, 5):
        assert batches(num_workers) == expected
    assert batches(2, "process") == expected
    assert batches(1, "process", persistent=False) == expected


@pytest.mark.parametrize(("drop_last", "num_batches"), [(False, 6), (True, 5)])
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_len_is_what_is_yielded(drop_last: bool, num_batches: int, num_workers: int) -> None:
    loader = BatchLoader(counting_reader(46), 8, drop_last=drop_last, num_workers=num_workers)
    assert len(loader) == num_batches == len(list(loader))


def test_orders_differ_by_seed_and_epoch_and_repeat() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        loader = BatchLoader(counting_reader(50), 8, shuffle="global", seed=seed)
        loader.sampler.set_epoch(epoch)
        return rows_of(loader)

    orders = [order(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))
    assert orders == [order(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]


def test_the_order_ignores_the_global_generators() -> None:
    torch.manual_seed(1)
    first = rows_of(BatchLoader(counting_reader(50), 8, shuffle="global"))
    torch.manual_seed(2)
    assert rows_of(BatchLoader(counting_reader(50), 8, shuffle="global")) == first


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_in_place_change_stays_in_its_batch(num_workers: int) -> None:
    loader = BatchLoader(counting_reader(20), 5, num_workers=num_workers)
    for batch in loader:
        batch["x"].zero_()
    assert rows_of(loader) == np.arange(20).reshape(4, 5).tolist()


@pytest.mark.parametrize("num_workers", [0, 3])
def test_state_counts_what_was_delivered_and_resume_is_the_rest(num_workers: int) -> None:
    loader = BatchLoader(counting_reader(100), 8, shuffle="global", num_workers=num_workers)
    loader.sampler.set_epoch(2)
    whole = rows_of(loader)
    loader.sampler.set_epoch(2)
    iterator = iter(loader)
    seen = [next(iterator)["x"].tolist() for _ in range(5)]
    state = loader.state_dict()
    assert pickle.loads(pickle.dumps(state)) == state

    resumed = BatchLoader(counting_reader(100), 8, shuffle="global", num_workers=1)
    resumed.load_state_dict(state)
    iter(resumed)  # As Lightning does before it sets the epoch.
    resumed.sampler.set_epoch(2)
    assert len(resumed) == 13
    assert seen + rows_of(resumed) == whole
    resumed.sampler.set_epoch(3)
    loader.sampler.set_epoch(3)
    assert rows_of(resumed) == rows_of(loader)

    other = BatchLoader(counting_reader(100), 16, shuffle="global", num_workers=num_workers)
    other.load_state_dict(state)
    rest = rows_of(other)
    assert [len(batch) for batch in rest] == [16, 16, 16, 12]
    assert flat(seen) + flat(rest) == flat(whole)
    assert len(other) == 5 + 4
    other.sampler.set_epoch(3)
    assert len(other) == 7


def test_a_state_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    loader = BatchLoader(counting_reader(20), 8, shuffle="global")
    rows_of(loader)
    resumed = BatchLoader(counting_reader(20), 8, shuffle="global")
    resumed.load_state_dict(loader.state_dict())
    for each in (loader, resumed):
        each.sampler.set_epoch(1)
    assert rows_of(resumed) == rows_of(loader) != []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seed": 1}, "seed"),
        ({"shuffle": "none"}, "shuffle"),
        ({"rows": range(50)}, "rows"),
        ({"weights": np.ones(100)}, "weights"),
        ({"reader": counting_reader(99)}, "number of rows"),
        ({"reader": MemoryReader({"x": np.arange(100)})}, "fields"),
    ],
)
def test_resume_with_another_order_or_data_is_refused(change: dict[str, Any], word: str) -> None:
    settings: dict[str, Any] = {"reader": counting_reader(100), "batch_size": 8, "shuffle": "global"}
    state = BatchLoader(**settings).state_dict()
    with pytest.raises(ResumeError, match=f"with {word} .* but now"):
        BatchLoader(**settings | change).load_state_dict(state)
    if word in ("number of rows", "fields", "rows"):
        BatchLoader(**settings | change, allow_changed_data=True).load_state_dict(state)


def test_an_error_comes_at_its_own_batch_and_ends_the_threads() -> None:
    class Broken(MemoryReader):
        def read(self, rows: Any, out: Any = None) -> Any:
            if 17 in np.asarray(rows):
                raise OSError("row 17 is broken")
            return super().read(rows, out)

    loader = BatchLoader(Broken({"x": np.arange(40)}), 4, num_workers=2)
    iterator = iter(loader)
    assert [next(iterator)["x"][0].item() for _ in range(4)] == [0, 4, 8, 12]
    with pytest.raises(OSError, match="row 17 is broken"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    assert reader_threads() == []


def test_threads_end_with_the_epoch_on_close_and_when_forgotten() -> None:
    loader = BatchLoader(counting_reader(400), 4, num_workers=3)
    list(loader)
    assert reader_threads() == []
    iterator = iter(loader)
    next(iterator)
    assert len(reader_threads()) == 3
    loader.close()
    assert reader_threads() == []
    with pytest.raises(FastIOError, match="closed while it was iterated"):
        next(iterator)
    iterator = iter(loader)
    next(iterator)
    del iterator, loader
    gc.collect()
    assert reader_threads() == []


def test_reads_no_further_ahead_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = counting_reader(1000)
    reads: list[int] = []
    third = threading.Event()
    original = reader.read

    def read(rows: Any, out: Any = None) -> Any:
        reads.append(int(rows[0]))
        if len(reads) == 3:
            third.set()
        return original(rows, out)

    reader.read = read  # type: ignore[method-assign]
    monkeypatch.setattr("lightning_fastio.loader.batch_loader._GROUP_BYTES", 0)
    loader = BatchLoader(reader, 10, num_workers=1, prefetch_factor=2)
    iterator = iter(loader)
    assert reads == []
    next(iterator)
    assert third.wait(10)
    next(iterator)
    loader.close()
    assert len(reads) <= 4


def test_resize_keeps_the_batches() -> None:
    loader = BatchLoader(counting_reader(400), 4, shuffle="global", num_workers=1)
    expected = rows_of(loader)
    loader.sampler.set_epoch(0)
    got = []
    for number, batch in enumerate(loader):
        got.append(batch["x"].tolist())
        loader.resize(1 + number % 4)
    assert got == expected
    assert reader_threads() == []


@pytest.mark.parametrize(("num_workers", "worker_type"), [(0, "thread"), (2, "thread"), (1, "process")])
def test_an_error_ends_the_pass_whatever_the_workers(num_workers: int, worker_type: Any) -> None:
    loader = BatchLoader(BreaksAt10({"x": np.arange(40)}), 5, num_workers=num_workers, worker_type=worker_type)
    iterator = iter(loader)
    assert [next(iterator)["x"][0].item() for _ in range(2)] == [0, 5]
    with pytest.raises(OSError, match="row 10 is broken"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    assert loader.state_dict()["legs"][0][-1] == 2
    loader.close()


def test_a_resized_loader_keeps_a_thread() -> None:
    loader = BatchLoader(counting_reader(40), 4, num_workers=2)
    with pytest.raises(ConfigError, match="from 2 to 0"):
        loader.resize(0)
    with pytest.raises(ConfigError, match="only a loader with reader threads"):
        BatchLoader(counting_reader(40), 4, num_workers=0).resize(1)


def test_a_loader_travels_to_another_process_where_it_stands() -> None:
    loader = BatchLoader(counting_reader(300_000), 1000, shuffle="global", num_workers=2)
    iterator = iter(loader)
    seen = [next(iterator)["x"].tolist() for _ in range(3)]
    copied = pickle.loads(pickle.dumps(loader))
    rest = [batch["x"].tolist() for batch in copied]
    assert rest == [batch["x"].tolist() for batch in iterator]
    assert len(seen) + len(rest) == len(loader) == 300
    loader.close()


def test_a_block_shuffle_resumes_with_another_cache() -> None:
    def loader(cache_bytes: int) -> BatchLoader:
        reader = counting_reader(400, blocks=list(range(0, 401, 10)), cache_bytes=cache_bytes)
        return BatchLoader(reader, 10, shuffle="block", num_workers=0)

    begun = loader(2400)
    iterator = iter(begun)
    seen = [row for _ in range(20) for row in next(iterator)["x"].tolist()]
    resumed = loader(4800)
    resumed.load_state_dict(begun.state_dict())
    assert sorted(seen + flat(rows_of(resumed))) == list(range(400))


def test_small_batches_do_not_share_what_autograd_watches() -> None:
    iterator = iter(BatchLoader(counting_reader(80), 4, num_workers=1, prefetch_factor=1))
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * next(iterator)["y"]).sum()
    next(iterator)["y"].sub_(1.0)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 0.5, 1, 1.5]


def test_transforms_run_side_by_side_also_on_small_batches() -> None:
    together = threading.Barrier(4)

    def meet(batch: Any) -> Any:
        together.wait(10)
        return batch

    assert len(rows_of(BatchLoader(counting_reader(64), 1, num_workers=4, transform=meet))) == 64


def test_worker_processes_serve_one_iteration_at_a_time() -> None:
    with BatchLoader(counting_reader(40), 4, num_workers=1, worker_type="process") as loader:
        first, second = iter(loader), iter(loader)
        assert next(first)["x"].tolist() == [0, 1, 2, 3]
        assert next(second)["x"].tolist() == [0, 1, 2, 3]
        with pytest.raises(FastIOError, match="begin another one"):
            next(first)
        assert len(list(second)) == 9


def test_transforms_may_return_tuples_of_arrays() -> None:
    loader = BatchLoader(counting_reader(4), 4, transform=lambda batch: (batch["x"].numpy(), [np.ones(2), "a"]))
    x, (ones, text) = next(iter(loader))
    assert (x.tolist(), ones.tolist(), text) == ([0, 1, 2, 3], [1, 1], "a")
    assert isinstance(ones, torch.Tensor)


def test_huge_weights_keep_their_proportions() -> None:
    rows = flat(rows_of(BatchLoader(counting_reader(400), 400, weights=[1e308] * 400)))
    assert len(set(rows)) > 200


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_are_announced_once_before_they_are_read(num_workers: int) -> None:
    reader = counting_reader(1000)
    batches = rows_of(BatchLoader(reader, 10, num_workers=num_workers, shuffle="global"))
    announced = flat(reader.announced)
    if num_workers == 0:
        assert announced == flat(batches[1:]), "each batch after the first, in order"
    assert len(set(announced)) == len(announced)
    blocked = counting_reader(100, blocks=list(range(0, 101, 10)), cache_bytes=20 * 12 * 8 // 3)
    rows_of(BatchLoader(blocked, 10, num_workers=num_workers, shuffle="block"))
    assert sorted(row // 10 for row in flat(blocked.announced)) == list(range(10))


def test_torch_threads_of_the_caller_stay() -> None:
    before = torch.get_num_threads()
    inside: list[int] = []

    def look(batch: Any) -> Any:
        inside.append(torch.get_num_threads())
        return batch

    list(BatchLoader(counting_reader(20), 4, num_workers=2, transform=look))
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert set(inside) == {1}
    assert torch.get_num_threads() == before == later[0]


@pytest.mark.parametrize("transform", [AddNoise(), draw_passed])
def test_noise_repeats_under_a_seed_and_differs_between_batches_and_epochs(transform: Any) -> None:
    def noise(num_workers: int, worker_type: Any = "thread", seed: int = 0) -> list[list[float]]:
        with BatchLoader(
            counting_reader(40), 4, num_workers=num_workers, worker_type=worker_type, seed=seed, transform=transform
        ) as loader:
            found = []
            for epoch in range(2):
                loader.sampler.set_epoch(epoch)
                found += [batch["noise"].tolist() for batch in loader]
            return found

    expected = noise(0)
    draws = [value for batch in expected for value in batch]
    assert len(set(draws)) == len(draws)
    assert noise(3) == expected
    assert noise(2, "process") == expected
    assert noise(0, seed=1) != expected


def test_processes_seed_the_global_generators_and_leave_the_callers_alone() -> None:
    def noise() -> list[list[float]]:
        with BatchLoader(counting_reader(16), 4, num_workers=2, worker_type="process", transform=draw_global) as loader:
            return [[*batch["noise"].tolist(), batch["np"].item()] for batch in loader]

    before = torch.get_rng_state()
    first = noise()
    assert torch.equal(torch.get_rng_state(), before)
    assert len({value for batch in first for value in batch}) == 20
    assert noise() == first


def test_numpy_results_become_tensors_also_flipped_ones() -> None:
    loader = BatchLoader(counting_reader(4), 4, transform=lambda batch: {"x": batch["x"].numpy()[::-1]})
    assert rows_of(loader) == [[3, 2, 1, 0]]


def test_sample_transform_is_stacked() -> None:
    def one(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": sample["x"] * 2, "pair": np.array([1.0, 2.0]), "n": 3, "name": "a"}

    batch = next(iter(BatchLoader(counting_reader(4), 2, sample_transform=one)))
    assert batch["x"].tolist() == [0, 2]
    assert batch["pair"].tolist() == [[1, 2], [1, 2]]
    assert batch["n"].tolist() == [3, 3]
    assert batch["name"] == ["a", "a"]


def test_samples_of_different_shapes_are_named() -> None:
    def grow(sample: dict[str, Any]) -> dict[str, Any]:
        return {"x": torch.zeros(1 if sample["x"] == 4 else 3, 2)}

    with pytest.raises(SchemaError, match=r"field 'x': row 0 has shape \(3, 2\), but row 4 \(1, 2\)"):
        list(BatchLoader(counting_reader(8), 8, sample_transform=grow))


def test_tuples_are_in_the_order_of_the_fields() -> None:
    x, y = next(iter(BatchLoader(counting_reader(4), 4, batch_as="tuple")))
    assert x.tolist() == [0, 1, 2, 3]
    assert y.tolist() == [0, 0.5, 1, 1.5]


def test_a_transform_that_cannot_travel_is_named() -> None:
    loader = BatchLoader(counting_reader(4), 2, num_workers=1, worker_type="process", transform=lambda batch: batch)
    with pytest.raises(ConfigError, match=r"transform=.*worker_type='thread'"):
        next(iter(loader))


def test_a_transform_that_returns_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"transform .* returned None"):
        list(BatchLoader(counting_reader(4), 2, num_workers=0, transform=lambda batch: None))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"prefetch_factor": 0}, "prefetch_factor=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"drop_last": True, "pad_last": True}, "exclude each other"),
        ({"shuffle": "block"}, "decodes in blocks"),
        ({"weights": [1.0]}, "weights has shape"),
        ({"weights": [-1.0] * 10}, "not negative"),
        ({"rows": [True]}, "mask of 1 values"),
        ({"rows": [10]}, "rows holds 10"),
        ({"rows": [5, 5]}, "rows holds 5 more than once"),
        ({"shuffle": True}, "shuffle=True"),
        ({"worker_type": "threads"}, "worker_type='threads'"),
        ({"batch_as": "tuples"}, "batch_as='tuples'"),
        ({"rank": 1}, "give both"),
        ({"rank": 5, "world_size": 2}, "rank from 0"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchLoader(counting_reader(10), **settings)


def test_weights_and_rows() -> None:
    loader = BatchLoader(counting_reader(10), 5, rows=[2, 4, 6], weights=[0, 1, 1])
    assert {row for batch in rows_of(loader) for row in batch} <= {4, 6}
    assert len(loader) == 1
    assert rows_of(BatchLoader(counting_reader(10), 5, rows=np.arange(10) % 2 == 0)) == [[0, 2, 4, 6, 8]]


def test_auto_shuffle_chooses_by_what_rows_cost() -> None:
    blocks = list(range(0, 101, 10))
    plans = [
        BatchLoader(reader, shuffle="auto").plan
        for reader in (
            counting_reader(100),
            counting_reader(100, blocks=blocks, cache_bytes=100 * 12 * 8 // 3),
            counting_reader(100, blocks=blocks, cache_bytes=50 * 12 * 8 // 3),
        )
    ]
    assert [plan.shuffle for plan in plans] == ["global", "global", "block"]
    assert plans[0].reason == "every row costs the same"
    assert "10 blocks that do not fit" in plans[2].reason
    assert "windows of 50 rows" in plans[2].reason


def test_ranks_get_the_same_number_of_batches_and_each_row_once() -> None:
    for world_size in (1, 2, 3, 4):
        loaders = [BatchLoader(counting_reader(145), 16, rank=r, world_size=world_size) for r in range(world_size)]
        batches = [rows_of(loader) for loader in loaders]
        assert {len(rank) for rank in batches} == {len(loaders[0])}
        assert sorted(row for rank in batches for batch in rank for row in batch) == list(range(145))


def test_stats_count_rows_and_seconds() -> None:
    loader = BatchLoader(counting_reader(20), 8, num_workers=2, transform=AddNoise())
    list(loader)
    assert (loader.stats.num_batches, loader.stats.num_rows) == (3, 20)
    assert loader.stats.read_s > 0
    assert loader.stats.transform_s > 0


@pytest.mark.parametrize(("batch_size", "num_workers"), [(8, 1), (65_536, 4)])
def test_automatic_threads_are_fewer_where_batches_are_tiny(
    batch_size: int, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_fastio.loader.batch_loader.cpu_allowance", lambda: 16.0)
    assert BatchLoader(counting_reader(20), batch_size).num_workers == num_workers
    transformed = BatchLoader(counting_reader(20), batch_size, transform=lambda batch: batch)
    assert transformed.num_workers == 4
