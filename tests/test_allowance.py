"""CPUs and memory that a process may use, from files that stand for /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fastio.allowance import cgroup_texts, cpu_allowance, memory_allowance, parse_cpu_list
from tests.fake_root import write_root


@pytest.fixture(autouse=True)
def _many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)


STATUS = "Name:\tpython\nCpus_allowed_list:\t0-15,32-47\n"


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        ({}, {}, 64),
        ({"proc/self/status": STATUS}, {}, 32),
        ({"proc/self/status": STATUS}, {"SLURM_CPUS_PER_TASK": "8"}, 8),
        ({"proc/self/status": STATUS}, {"SLURM_CPUS_PER_TASK": "?"}, 32),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, {}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, {}, 64),
        ({"sys/fs/cgroup/cpu.max": "garbage"}, {}, 64),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, {}, 4),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, {}, 64),
    ],
)
def test_cpu_allowance(tmp_path: Path, files: dict[str, str], environ: dict[str, str], expected: float) -> None:
    assert cpu_allowance(write_root(tmp_path, files), environ) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal:  1000 kB\n"}, 1_024_000),
        ({"proc/meminfo": "MemTotal:  1000 kB\n", "sys/fs/cgroup/memory.max": "max"}, 1_024_000),
        ({"proc/meminfo": "MemTotal:  1000 kB\n", "sys/fs/cgroup/memory.max": "5000"}, 5000),
        (
            {"proc/self/cgroup": "4:memory:/job/1\n", "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "7000"},
            7000,
        ),
    ],
)
def test_memory_allowance(tmp_path: Path, files: dict[str, str], expected: int | None) -> None:
    assert memory_allowance(write_root(tmp_path, files)) == expected


def test_the_groups_around_count_as_well(tmp_path: Path) -> None:
    root = write_root(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": "5\n",
            "sys/fs/cgroup/memory.max": "9\n",
        },
    )
    assert list(cgroup_texts(root, "", "memory.max")) == ["max", "5", "9"]


def test_a_group_that_the_container_hides_is_its_mount(tmp_path: Path) -> None:
    root = write_root(tmp_path, {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"})
    assert cpu_allowance(root, {}) == 2


@pytest.mark.parametrize(("text", "cpus"), [("0-2,7", {0, 1, 2, 7}), ("5\n", {5}), ("", set()), ("a-b,3-", {3})])
def test_cpu_lists(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus
