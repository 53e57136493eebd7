"""Damaged HDF5 files: right data or a clear error, never a crash. Child processes read them, so that one would show."""

from __future__ import annotations

import pickle
import subprocess
import sys

import h5py
import numpy as np
import pytest

READ = """
import pickle, sys
from lightning_fastio.errors import FastIOError
from lightning_fastio.formats import open_reader

whole, right = pickle.load(sys.stdin.buffer)
path = sys.argv[1]
outcomes = []
for cut, flips in right["damages"]:
    damaged = bytearray(whole[:cut])
    for position in flips:
        damaged[position] ^= 1 << position % 8
    with open(path, "wb") as file:
        file.write(damaged)
    try:
        reader = open_reader(path)
        batch = reader.read(range(len(reader)))
        reader.close()
        is_right = all(
            name in right and values.shape == right[name].shape and (values.numpy() == right[name]).all()
            for name, values in batch.items()
        )
        outcomes.append("right" if is_right else "wrong")
    except FastIOError as error:
        assert path in str(error), error
        outcomes.append("error")
print(*outcomes)
"""


def outcomes_of(tmp_path, fill, damages, **options):
    """What becomes of a file under each damage: a length to cut it to, and positions of bits to flip."""
    path = tmp_path / "whole.h5"
    with h5py.File(path, "w", **options) as file:
        fill(file)
    whole = path.read_bytes()
    with h5py.File(path) as file:
        right = {name: dataset[...] for name, dataset in file.items()}
    right["damages"] = damages(len(whole))
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", READ, str(tmp_path / "damaged.h5")],
        input=pickle.dumps((whole, right)),
        capture_output=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr.decode()[-2000:]
    return result.stdout.decode().split()


def contiguous(file):
    file["x"] = np.arange(60, dtype="<i4").reshape(20, 3)


def compressed(file):
    data = np.arange(60, dtype="<i4").reshape(20, 3)
    file.create_dataset("x", data=data, chunks=(6, 3), compression="gzip", shuffle=True, fletcher32=True)


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("fill", [contiguous, compressed])
def test_every_truncation(tmp_path, fill, libver):
    def damages(size):
        return [(cut, ()) for cut in range(0, size, max(1, size // 150))]

    outcomes = outcomes_of(tmp_path, fill, damages, libver=libver)
    assert "wrong" not in outcomes
    assert outcomes.count("error") > 100


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("fill", [contiguous, compressed])
def test_random_bit_flips(tmp_path, fill, libver):
    def damages(size):
        rng = np.random.default_rng(0)
        return [(size, tuple(rng.integers(0, size, rng.integers(1, 4)).tolist())) for _ in range(200)]

    outcomes = outcomes_of(tmp_path, fill, damages, libver=libver)
    assert len(outcomes) == 200
    if fill is compressed and libver == "latest":  # Both metadata and data carry checksums.
        assert outcomes.count("wrong") == 0
