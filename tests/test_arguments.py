"""Arguments of the wrong type or out of range: an error that names the argument, its value, and what it may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_fastio import BatchLoader, NumpyDataModule, open_reader
from lightning_fastio.arguments import source_of
from lightning_fastio.errors import ConfigError
from tests.memory import counting_reader


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("batch_size", "8"),
        ("batch_size", 1.5),
        ("batch_size", True),
        ("batch_size", 0),
        ("num_workers", None),
        ("num_workers", 1.5),
        ("num_workers", -1),
        ("num_workers", "many"),
        ("prefetch_factor", "2"),
        ("prefetch_factor", 0),
        ("seed", None),
        ("seed", 1.5),
        ("seed", -1),
        ("pin_memory", "q"),
        ("transform", 5),
        ("transform", [5]),
        ("sample_transform", 5),
        ("weights", 5),
    ],
)
def test_of_a_loader(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*expected"):
        BatchLoader(counting_reader(10), **{name: value})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.arange(10))
    return tmp_path / "x.npy"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("val_split", float("nan")),
        ("val_split", "0.2"),
        ("val_split", True),
        ("val_split", 1.0),
        ("test_split", -1),
        ("split_seed", None),
        ("max_rows", "5"),
        ("max_rows", 2.5),
        ("max_rows", 0),
        ("eval_batch_size", 0),
        ("batch_size", True),
    ],
)
def test_of_a_data_module(path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*expected"):
        NumpyDataModule(train=str(path), **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("cache_bytes", -1), ("cache_bytes", "1GB"), ("window", True), ("window", 1.5), ("stride", "2"), ("fields", 5)],
)
def test_of_a_reader(path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.*expected"):
        open_reader(path, **{name: value})


def test_a_source_that_is_none() -> None:
    with pytest.raises(ConfigError, match="5 is no source: expected a file"):
        open_reader(5)  # type: ignore[arg-type]


def test_integers_of_numpy_are_whole_numbers() -> None:
    loader = BatchLoader(counting_reader(10), np.int64(4), seed=np.int32(3), num_workers=np.int8(0))  # type: ignore[arg-type]
    assert len(list(loader)) == 3


@pytest.mark.parametrize(
    ("paths", "source"),
    [
        (["a.npy"], "a.npy"),
        (["a.npy", "b.npy"], ["a.npy", "b.npy"]),
        (["image=x.npy", "label=y.npy"], {"image": "x.npy", "label": "y.npy"}),
        (["x=1.npy", "y=3.npy", "x=2.npy"], {"x": ["1.npy", "2.npy"], "y": "3.npy"}),
        (["x=data/year=2024/a.npy"], {"x": "data/year=2024/a.npy"}),
        (["data/year=2024"], "data/year=2024"),
        (["year=2023"], "year=2023"),
        (["year=*/*.npy", "year=2023/a.npy"], ["year=*/*.npy", "year=2023/a.npy"]),
        (["x=", "=y"], ["x=", "=y"]),
    ],
)
def test_sources_on_a_command_line(
    paths: list[str], source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "year=2023").mkdir()
    (tmp_path / "year=2023" / "a.npy").touch()
    assert source_of(paths) == source


def test_fields_of_some_files_only() -> None:
    with pytest.raises(ConfigError, match=r"^image=x.npy y.npy: name the field of every file, as in image=x.npy"):
        source_of(["image=x.npy", "y.npy"])
