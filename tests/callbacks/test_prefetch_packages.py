"""PrefetchCallback under loaders of other packages, and with their batches: the same run as without it."""

from __future__ import annotations

import io
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_fastio.callbacks import PrefetchCallback, prefetch
from lightning_fastio.prefetch import rows_in
from lightning_fastio.staging import tensors_in
from tests.callbacks.traced_runs import FEATURES, QUIET, Net, Rows, Scenario, Trace, assert_same, load, run_traced
from tests.recording_backend import RecordingBackend

pytestmark = [
    *QUIET,
    # webdataset leaves it to the garbage collector to close shards.
    pytest.mark.filterwarnings("ignore:.*rows-[01].tar:pytest.PytestUnraisableExceptionWarning"),
    # What they, and Lightning of them, have to say.
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning"),
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.with_length.. only sets the value:UserWarning"),
]


def import_or_skip(name: str) -> Any:
    """A package that these tests can do without; what it warns of while it is imported is its own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def check(make: Callable[[], Any], folder: Path, net: type[Net] = Net, **options: Any) -> Trace:
    """Run with new loaders each time, stock and ahead; the trace of the stock run."""
    scenario = Scenario(lambda trainer, net: trainer.fit(net, make(), load(2)), options, net=net)
    stock, _ = run_traced(scenario, folder, [])
    for depth in (1, 3):
        ahead, _ = run_traced(scenario, folder, [PrefetchCallback(depth, summary=False)])
        assert_same_run(stock, ahead)
    return stock


def assert_same_run(stock: Trace, ahead: Trace) -> None:
    """Equal in all but where the loaders stand after fit."""
    # Lightning asks loaders that start anew for it; with the callback it is where they stood after the last step.
    for trace in (stock, ahead):
        trace.progress["state_dict"].pop("combined_loader", None)
    assert_same(stock, ahead)


def rows_of(trace: Trace) -> list[float]:
    """First feature of every row that was trained on, in order."""
    steps = [details[0] for name, _, *details in trace.events if name == "training_step"]
    return [row for step in steps for row in step[::FEATURES]]


# torchdata


@pytest.mark.parametrize("options", [{}, {"shuffle": True}, {"num_workers": 1, "shuffle": True}])
def test_stateful_data_loader(options: dict[str, Any], tmp_path: Path) -> None:
    stateful = import_or_skip("torchdata.stateful_dataloader")
    trace = check(lambda: stateful.StatefulDataLoader(Rows(8), batch_size=2, **options), tmp_path)
    assert sorted(rows_of(trace)) == sorted([*range(8)] * 2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stateful_data_loader_goes_on_with_the_rows_not_seen(num_workers: int, tmp_path: Path) -> None:
    stateful = import_or_skip("torchdata.stateful_dataloader")

    class Saves(Net):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and not self.trainer.ckpt_path:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

    def make() -> Any:
        return stateful.StatefulDataLoader(Rows(16), batch_size=2, num_workers=num_workers)

    for depth in (1, 3):
        run_traced(
            Scenario(lambda trainer, net: trainer.fit(net, make()), {"max_epochs": 1}, net=Saves),
            tmp_path,
            [PrefetchCallback(depth, summary=False)],
        )
        resumed, _ = run_traced(
            Scenario(
                lambda trainer, net: trainer.fit(net, make(), ckpt_path=tmp_path / "middle.ckpt"), {"max_epochs": 1}
            ),
            tmp_path,
            [PrefetchCallback(depth, summary=False)],
        )
        assert rows_of(resumed) == [*range(6, 16)]


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_validation_end"])
def test_stateful_data_loader_starts_the_next_epoch(hook: str, tmp_path: Path) -> None:
    stateful = import_or_skip("torchdata.stateful_dataloader")
    path = tmp_path / "end.ckpt"

    class Saves(Net):
        pass

    def save(net: Net) -> None:
        if not net.trainer.sanity_checking:
            net.trainer.save_checkpoint(path)

    setattr(Saves, hook, save)

    def make() -> Any:
        return stateful.StatefulDataLoader(Rows(8), batch_size=2)

    resumed: list[Trace] = []
    for callbacks in ([], [PrefetchCallback(3, summary=False)]):
        first = Scenario(lambda trainer, net: trainer.fit(net, make(), load(1)), {"max_epochs": 1}, net=Saves)
        run_traced(first, tmp_path, callbacks)
        again = Scenario(lambda trainer, net: trainer.fit(net, make(), load(1), ckpt_path=path), {"max_epochs": 3})
        resumed.append(run_traced(again, tmp_path, callbacks)[0])
    assert rows_of(resumed[0]) == [*range(8)] * 2
    assert_same_run(*resumed)


# webdataset


@pytest.fixture
def shards(tmp_path: Path) -> str:
    """Two tar files of six samples each."""
    for shard in range(2):
        with tarfile.open(tmp_path / f"rows-{shard}.tar", "w") as tar:
            for row in range(6 * shard, 6 * shard + 6):
                content = io.BytesIO()
                np.save(content, np.full(FEATURES, row, np.float32))
                member = tarfile.TarInfo(f"{row:04}.x.npy")
                member.size = content.tell()
                content.seek(0)
                tar.addfile(member, content)
    return str(tmp_path / "rows-{0..1}.tar")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sized", [False, True])
def test_web_loader(sized: bool, num_workers: int, shards: str, tmp_path: Path) -> None:
    wds = import_or_skip("webdataset")

    def make() -> Any:
        dataset = wds.WebDataset(shards, shardshuffle=False, empty_check=False).decode().to_tuple("x.npy").batched(2)
        loader = wds.WebLoader(dataset, batch_size=None, num_workers=num_workers)
        return loader.with_epoch(5).with_length(5) if sized else loader

    class FirstField(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(torch.as_tensor(batch[0]), batch_idx)

    trace = check(make, tmp_path, FirstField)
    if num_workers == 0:
        assert rows_of(trace)[:10] == [*range(10)]
    assert len(rows_of(trace)) == 2 * (10 if sized else 12)


# litdata, which is not among the test requirements: the versions of its own requirements clash with constraints.txt


def full_row(row: int) -> torch.Tensor:
    """What is stored as a row."""
    return torch.full((FEATURES,), float(row))


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of twelve rows in chunks."""
    litdata = import_or_skip("litdata")
    folder = str(tmp_path_factory.mktemp("litdata") / "optimized")
    litdata.optimize(full_row, list(range(12)), folder, chunk_size=5, num_workers=1)
    return folder


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_streaming_data_loader(shuffle: bool, num_workers: int, chunks: str, tmp_path: Path) -> None:
    litdata = import_or_skip("litdata")

    def make() -> Any:
        dataset = litdata.StreamingDataset(chunks, shuffle=shuffle)
        return litdata.StreamingDataLoader(dataset, batch_size=2, num_workers=num_workers)

    trace = check(make, tmp_path)
    assert sorted(rows_of(trace)) == sorted([*range(12)] * 2)


# Batches


class TensorDictNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert type(batch).__name__ == "TensorDict"
        return super().training_step({"x": batch["x"], "deep": batch["inner", "y"]}, batch_idx)


def tensor_dicts() -> DataLoader[Any]:
    """Batches of two rows, with a field in a field."""
    tensordict = import_or_skip("tensordict")

    def collate(rows: list[torch.Tensor]) -> Any:
        x = torch.stack(rows)
        return tensordict.TensorDict({"x": x, "inner": {"y": 2 * x}}, batch_size=[len(rows)])

    return DataLoader(Rows(8), batch_size=2, shuffle=True, collate_fn=collate)


class GraphNet(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert batch.num_graphs == 2
        return super().training_step({"x": batch.x, "edges": batch.edge_index.float().mean().expand(1, 4)}, batch_idx)


def graphs() -> Any:
    """Batches of two graphs of three nodes each."""
    data = import_or_skip("torch_geometric.data")
    loader = import_or_skip("torch_geometric.loader")
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    rows = [data.Data(x=torch.full((3, FEATURES), float(row)), edge_index=edges) for row in range(8)]
    return loader.DataLoader(rows, batch_size=2, shuffle=True)


BATCHES = {"TensorDict": (tensor_dicts, TensorDictNet), "PyG": (graphs, GraphNet)}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_other_packages(name: str, tmp_path: Path) -> None:
    make, net = BATCHES[name]
    check(make, tmp_path, net)


@pytest.mark.parametrize("name", BATCHES)
def test_batches_of_other_packages_are_copied_ahead(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = RecordingBackend()
    monkeypatch.setattr(prefetch, "open_backend", lambda device: backend)
    make, net = BATCHES[name]
    check(make, tmp_path, net)
    num_batches = 2 * 2 * 4
    kind = type(next(iter(make()))).__name__
    num_tensors = len(list(tensors_in(next(iter(make())))))
    assert num_tensors == {"TensorDict": 2, "PyG": 4}[name]
    pinned = [type(value).__name__ for value in backend.pinned]
    assert pinned.count(kind) == num_batches
    # Two depths, and of the evaluation and sanity check one tensor for each batch.
    num_evaluated = 2 * (2 + 2 * 2)
    assert len(backend.recorded) == num_batches * num_tensors + num_evaluated
    assert len(pinned) == num_batches + num_evaluated


def test_memory_of_a_lazy_stack_is_that_of_its_parts() -> None:
    tensordict = import_or_skip("tensordict")
    parts = [tensordict.TensorDict({"x": torch.full((3,), float(row))}, []) for row in range(2)]
    stack = tensordict.LazyStackedTensorDict(*parts, stack_dim=0)
    assert [id(tensor) for tensor in tensors_in(stack)] == [id(part["x"]) for part in parts]


def test_rows_of_a_graph_batch_are_its_graphs() -> None:
    batch = next(iter(graphs()))
    assert len(batch.x) == 6
    assert rows_in(batch) == 2
    assert rows_in(next(iter(tensor_dicts()))) == 2
