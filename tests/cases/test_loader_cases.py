"""What went wrong for people with loaders of other packages (cases D and L), with the right value for each."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_fastio.datamodules import FastIODataModule
from lightning_fastio.errors import ConfigError, SchemaError
from lightning_fastio.loader import BatchLoader
from tests.memory import MemoryReader, counting_reader


class Counting(FastIODataModule):
    def open_reader(self, source: Any) -> MemoryReader:
        return counting_reader(int(source))


class Model(LightningModule):
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.fail_at = fail_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fail_at:
            raise RuntimeError("step 2 fails")
        return self.weight * batch["y"].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-4)


def quiet(tmp_path: Path, **settings: Any) -> Trainer:
    return Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


class Jitter:
    """An augmentation with a NumPy generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(1)

    def __call__(self, batch: Any) -> Any:
        return batch | {"noise": torch.from_numpy(self.rng.random(len(batch["x"])))}


def report_threads(batch: Any) -> Any:
    import pyarrow

    return batch | {"threads": torch.tensor([torch.get_num_threads(), pyarrow.cpu_count()])}


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_d3_no_draw_repeats_over_workers_and_epochs(worker_type: Any) -> None:
    def draws() -> list[float]:
        with BatchLoader(counting_reader(40), 5, num_workers=2, worker_type=worker_type, transform=Jitter()) as loader:
            found: list[float] = []
            for epoch in range(2):
                loader.set_epoch(epoch)
                for batch in loader:
                    found += batch["noise"].tolist()
            return found

    first = draws()
    assert len(set(first)) == len(first) == 80
    assert draws() == first


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("drop_last", "pad_last"), [(False, False), (True, False), (False, True)])
def test_d6_ranks_have_equal_batch_counts(world_size: int, drop_last: bool, pad_last: bool) -> None:
    loaders = [
        BatchLoader(counting_reader(145), 16, drop_last=drop_last, pad_last=pad_last, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    batches = [[batch["x"].tolist() for batch in loader] for loader in loaders]
    assert {len(of_rank) for of_rank in batches} == {len(loaders[0])}
    rows = [row for of_rank in batches for batch in of_rank for row in batch]
    if drop_last:
        assert len(rows) == len(set(rows)) == len(loaders[0]) * 16 * world_size
    elif pad_last:
        assert set(rows) == set(range(145))
        assert len(rows) == len(loaders[0]) * 16 * world_size
    else:
        assert sorted(rows) == list(range(145))


@pytest.mark.parametrize(("num_workers", "worker_type"), [(0, "thread"), (1, "thread"), (3, "thread"), (2, "process")])
@pytest.mark.parametrize(("drop_last", "expected"), [(False, 6), (True, 5)])
def test_d7_len_is_what_is_yielded(num_workers: int, worker_type: Any, drop_last: bool, expected: int) -> None:
    with BatchLoader(
        counting_reader(46), 8, drop_last=drop_last, num_workers=num_workers, worker_type=worker_type
    ) as loader:
        assert len(loader) == len(list(loader)) == expected


def test_d8_options_for_workers_do_no_harm_without_workers() -> None:
    data = Counting(train="16", num_workers=0, prefetch_factor=4, persistent_workers=True, batch_size=8)
    assert [batch["x"].tolist() for batch in data.train_dataloader()] != []
    with pytest.raises(ConfigError, match="prefetch_factor=0"):
        Counting(train="16", prefetch_factor=0).train_dataloader()


def test_d10_workers_use_one_core_each() -> None:
    with BatchLoader(counting_reader(8), 4, num_workers=2, worker_type="process", transform=report_threads) as loader:
        assert [batch["threads"].tolist() for batch in loader] == [[1, 1], [1, 1]]


def test_d11_a_lambda_is_named_and_the_default_travels() -> None:
    spawn: dict[str, Any] = {"num_workers": 1, "worker_type": "process", "multiprocessing_context": "spawn"}
    with BatchLoader(counting_reader(8), 4, **spawn) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ConfigError, match=r"transform=.*cannot be sent to worker processes"):
        next(iter(BatchLoader(counting_reader(8), 4, transform=lambda batch: batch, **spawn)))


def test_d12_nothing_is_pinned_without_cuda(tmp_path: Path) -> None:
    data = Counting(train="16", batch_size=8)
    data.trainer = quiet(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = data.train_dataloader()
        assert loader.pin_memory is False
        assert not next(iter(loader))["x"].is_pinned()


def test_d13_cuda_is_not_started() -> None:
    data = Counting(train="16", batch_size=8)
    data.setup("fit")
    list(data.train_dataloader())
    assert not torch.cuda.is_initialized()


def test_d14_two_shapes_are_named_with_field_and_rows() -> None:
    def one_grey(sample: Any) -> Any:
        return {"image": torch.zeros(1 if sample["x"] == 4 else 3, 8, 8)}

    loader = BatchLoader(counting_reader(8), 8, num_workers=2, sample_transform=one_grey)
    with pytest.raises(SchemaError, match=r"'image': row 0 has shape \(3, 8, 8\), but row 4 \(1, 8, 8\)"):
        list(loader)


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_d17_an_error_in_a_step_leaves_no_process(tmp_path: Path, worker_type: Any) -> None:
    data = Counting(train="64", batch_size=8, num_workers=2, worker_type=worker_type)
    with pytest.raises(RuntimeError, match="step 2 fails"):
        quiet(tmp_path).fit(Model(fail_at=2), data)
    data.teardown("fit")
    gc.collect()
    assert multiprocessing.active_children() == []


def test_d18_seeds_and_epochs_give_four_orders_that_repeat() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        loader = BatchLoader(counting_reader(50), 50, shuffle="global", seed=seed)
        loader.set_epoch(epoch)
        rows: list[int] = next(iter(loader))["x"].tolist()
        return rows

    orders = [order(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(rows) for rows in orders}) == 4
    assert orders == [order(seed, epoch) for seed in (1, 2) for epoch in (0, 1)]


def test_n11_a_flip_with_negative_strides_works() -> None:
    loader = BatchLoader(counting_reader(4), 4, transform=lambda batch: {"x": batch["x"].numpy()[..., ::-1]})
    assert next(iter(loader))["x"].tolist() == [3, 2, 1, 0]


def test_n13_a_loader_travels_as_a_description_not_as_data() -> None:
    data = Counting(train="10", transform=Jitter())
    data.setup("fit")
    assert len(pickle.dumps(data.hparams)) < 10_000


def test_l11_nothing_holds_a_batch_or_the_data_after_a_run(tmp_path: Path) -> None:
    data = Counting(train="64", batch_size=8, num_workers=2)
    seen: list[weakref.ref[torch.Tensor]] = []

    class Watching(Model):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append(weakref.ref(batch["x"]))
            return super().training_step(batch, batch_idx)

    trainer = quiet(tmp_path)
    trainer.fit(Watching(), data)
    reader = weakref.ref(data.stages.reader("train"))
    del trainer, data
    gc.collect()
    assert [ref for ref in seen if ref() is not None] == []
    assert reader() is None


def test_l12_a_limit_bounds_what_is_read(tmp_path: Path) -> None:
    data = Counting(train="800", batch_size=8, num_workers=0)
    read: list[int] = []
    reader = data.stages.reader("train")
    original = reader.read

    def read_and_count(rows: Any, out: Any = None) -> Any:
        read.append(len(rows))
        return original(rows, out)

    reader.read = read_and_count  # type: ignore[method-assign]
    quiet(tmp_path, limit_train_batches=2).fit(Model(), data)
    assert read == [8, 8]
