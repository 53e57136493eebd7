"""What the package shows to the outside, what it imports, and in which direction its modules depend on each other."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import lightning_fastio

ROOT = Path(lightning_fastio.__file__).parent

# From the lowest to the highest: a module imports from its own line and the lines before it. A package stands for
# the modules in it.
LAYERS = (
    ("errors", "schema", "allowance", "arguments", "quantities", "drawing"),
    ("formats",),
    ("plan",),
    ("loader", "staging", "prefetch", "waits", "verdict", "adjusting", "report"),
    ("_lightning", "stages", "datamodules", "callbacks"),
    ("convert", "doctor", "inspection", "misspelled", "trainer_cli"),
    ("tuning", "bench", "demo", "cli"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Imported by the features that need them, not by everybody.
LAZY = ("h5py", "pyarrow.dataset", "pyarrow.parquet", "matplotlib", "PIL", "sklearn", "scipy", "hdf5plugin", "ray")


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package, as its path below the package, with its syntax tree."""
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(), str(path))


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Modules of this package that a module imports anywhere, functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            if node.module and node.module.split(".")[0] == "lightning_fastio":
                yield node.module if "." in node.module else f"{node.module}.{node.names[0].name}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("lightning_fastio."))


def test_every_module_has_a_layer():
    names = {path.split("/")[0].removesuffix(".py") for path, _ in modules()} - {"__init__"}
    assert names == set(RANK)


def test_imports_run_downward():
    upward = []
    for path, tree in modules():
        own = path.split("/")[0].removesuffix(".py")
        others = {name.split(".")[1] for name in imported_names(tree)} & set(RANK)
        upward += [f"{path} imports {other}" for other in others if own in RANK and RANK[other] > RANK[own]]
    assert not upward


def test_private_parts_of_lightning_are_touched_in_one_place():
    private = re.compile(r"\b(?:trainer|pl_module|strategy|fit_loop|epoch_loop|loop)\._[a-z]\w*")
    found = {path for path, _ in modules() if private.search((ROOT / path).read_text())}
    assert all(path.startswith("_lightning") for path in found), found


def test_public_names():
    assert lightning_fastio.__all__ == [
        "BatchLoader",
        "DevicePrefetcher",
        "FastIODataModule",
        "FastIOError",
        "HDF5DataModule",
        "MemoryHygieneCallback",
        "NumpyDataModule",
        "ParquetDataModule",
        "PrefetchCallback",
        "convert",
        "diagnose",
        "open_reader",
        "open_writer",
        "tune",
    ]
    for name in lightning_fastio.__all__:
        assert getattr(lightning_fastio, name).__name__ == name
        assert name in dir(lightning_fastio)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lightning_fastio.nothing  # noqa: B018


def test_version_is_that_of_the_distribution():
    assert lightning_fastio.__version__ == metadata.version("lightning_fastio")


def loaded_by(code: str, after: str = "pass") -> set[str]:
    """The modules that a new process loads for some code, beyond those that it loaded before."""
    script = f"import sys\n{after}\nbefore = set(sys.modules)\n{code}\nprint(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_else():
    assert not loaded_by("import lightning_fastio") & {"torch", "numpy", "lightning", "rich", *LAZY}


def test_public_names_load_no_storage_library():
    names = ", ".join(lightning_fastio.__all__)
    assert not loaded_by(f"from lightning_fastio import {names}", after="import lightning.pytorch") & set(LAZY)


def test_inspecting_does_not_load_lightning():
    assert not loaded_by("import lightning_fastio.inspection, lightning_fastio.cli") & {"lightning", *LAZY}
