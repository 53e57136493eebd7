"""Memory, CPU and limits, on machines made of files: good, bad, missing, odd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_fastio.doctor import cpu, limits, memory
from lightning_fastio.doctor.machine import Finding, Load, Machine, size
from tests.fake_root import write_root

GIB = 1 << 30
MEMINFO = "MemTotal:       65536000 kB\nMemFree: 1 kB\n"


def look(check: Callable[..., Iterator[Finding]], root: Path, files: dict[str, str], *args: Any, **options: Any) -> Any:
    """Severity and text of each finding of a check."""
    machine = Machine(write_root(root, files), environ=options.pop("environ", {}))
    return [(each.severity, each.finding) for each in check(machine, *args, **options)]


SWAPS = "Filename\tType\tSize\tUsed\tPriority\n/dev/sda2 partition {total} {used} -2\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ("ok", "none")),
        ({"proc/swaps": "Filename\tType\tSize\tUsed\tPriority\n"}, ("ok", "none")),
        ({"proc/swaps": "garbage\nmore garbage"}, ("ok", "none")),
        (
            {"proc/swaps": SWAPS.format(total=4194304, used=0), "proc/sys/vm/swappiness": "1"},
            ("ok", "0 B of 4.0 GiB used, vm.swappiness 1"),
        ),
        (
            {"proc/swaps": SWAPS.format(total=4194304, used=0), "proc/sys/vm/swappiness": "60"},
            ("info", "0 B of 4.0 GiB used, vm.swappiness 60"),
        ),
        (
            {"proc/swaps": SWAPS.format(total=4194304, used=0)},
            ("info", "0 B of 4.0 GiB used, vm.swappiness ?"),
        ),
        (
            {"proc/swaps": SWAPS.format(total=4194304, used=1048576), "proc/sys/vm/swappiness": "1"},
            ("warning", "1.0 GiB of 4.0 GiB used, vm.swappiness 1"),
        ),
    ],
)
def test_swap(tmp_path: Path, files: dict[str, str], expected: tuple[str, str]) -> None:
    assert look(memory.check_swap, tmp_path, files) == [expected]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"proc/sys/vm/dirty_ratio": "20"}, []),
        ({"proc/meminfo": MEMINFO, "proc/sys/vm/dirty_ratio": "20"}, [("ok", "up to 12.5 GiB may wait to be written")]),
        (
            {"proc/meminfo": MEMINFO, "proc/sys/vm/dirty_ratio": "60", "proc/sys/vm/dirty_bytes": "0"},
            [("info", "up to 37.5 GiB may wait to be written")],
        ),
        (
            {"proc/meminfo": MEMINFO, "proc/sys/vm/dirty_ratio": "0", "proc/sys/vm/dirty_bytes": str(GIB)},
            [("ok", "up to 1.0 GiB may wait to be written")],
        ),
    ],
)
def test_dirty_pages(tmp_path: Path, files: dict[str, str], expected: Any) -> None:
    assert look(memory.check_dirty_pages, tmp_path, files) == expected


@pytest.mark.parametrize(
    ("enabled", "defrag", "expected"),
    [
        (None, None, []),
        ("always [madvise] never", "always defer [madvise] never", [("ok", "madvise, defrag madvise")]),
        ("[always] madvise never", "[always] defer never", [("warning", "always, defrag always")]),
        ("[always] madvise never", None, [("ok", "always, defrag ?")]),
        ("always madvise [never]", "always [madvise]", [("info", "never, defrag madvise")]),
        ("?", "?", []),
    ],
)
def test_huge_pages(tmp_path: Path, enabled: str | None, defrag: str | None, expected: Any) -> None:
    folder = "sys/kernel/mm/transparent_hugepage"
    files = {f"{folder}/{name}": text for name, text in (("enabled", enabled), ("defrag", defrag)) if text}
    assert look(memory.check_huge_pages, tmp_path, files) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        ({"proc/meminfo": MEMINFO}, [("ok", "62.5 GiB")]),
        ({"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "max"}, [("ok", "62.5 GiB")]),
        (
            {"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": str(8 * GIB)},
            [("ok", "the cgroup allows 8.0 GiB of the machine's 62.5 GiB")],
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory.max": str(8 * GIB),
                "sys/fs/cgroup/memory.current": str(8 * GIB),
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {6 * GIB}\n",
            },
            [("ok", "the cgroup allows 8.0 GiB of the machine's 62.5 GiB, 2.0 GiB taken")],
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 * GIB),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(8 * GIB),
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 1024\n",
            },
            [("warning", "the cgroup allows 8.0 GiB of the machine's 62.5 GiB, 8.0 GiB taken")],
        ),
    ],
)
def test_memory_limit(tmp_path: Path, files: dict[str, str], expected: Any) -> None:
    assert look(memory.check_memory_limit, tmp_path, files) == expected


@pytest.mark.parametrize(("setting", "severities"), [("0", []), ("1", []), ("2", ["warning"]), ("x", []), (None, [])])
def test_overcommit(tmp_path: Path, setting: str | None, severities: list[str]) -> None:
    files = {} if setting is None else {"proc/sys/vm/overcommit_memory": setting}
    assert [severity for severity, _ in look(memory.check_overcommit, tmp_path, files)] == severities


LIMITS = "Limit   Soft Limit   Hard Limit  Units\n{name}   {value}   {value}  files\n"


@pytest.mark.parametrize(
    ("value", "infiniband", "expected"),
    [
        ("unlimited", True, []),
        ("65536", False, [("ok", "at most 64.0 KiB")]),
        ("65536", True, [("error", "at most 64.0 KiB, and there is InfiniBand")]),
    ],
)
def test_locked_memory(tmp_path: Path, value: str, infiniband: bool, expected: Any) -> None:
    files = {"proc/self/limits": LIMITS.format(name="Max locked memory", value=value)}
    if infiniband:
        files["sys/class/infiniband/mlx5_0/node_type"] = "1"
    assert look(memory.check_locked_memory, tmp_path, files) == expected


@pytest.mark.parametrize(
    ("value", "severities"),
    [("1024", ["warning"]), ("64", ["warning"]), ("65535", ["ok"]), ("unlimited", []), (None, [])],
)
def test_open_files(tmp_path: Path, value: str | None, severities: list[str]) -> None:
    files = {} if value is None else {"proc/self/limits": LIMITS.format(name="Max open files", value=value)}
    assert [severity for severity, _ in look(limits.check_open_files, tmp_path, files)] == severities


def test_processes_are_bounded_by_the_smallest_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/limits": LIMITS.format(name="Max processes", value="90000"),
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/pids.max": "100\n",
        "sys/fs/cgroup/pids.max": "max\n",
    }
    assert look(limits.check_processes, tmp_path, files) == [("warning", "at most 100, threads included")]
    assert look(limits.check_processes, tmp_path / "empty", {}) == []


STATUS = {"proc/self/status": "Cpus_allowed_list:\t0-3\n"}


@pytest.mark.parametrize(
    ("threads", "environ", "expected"),
    [
        (4, {}, ("ok", "4 CPUs allowed; torch uses 4 threads, OMP_NUM_THREADS is not set")),
        (1, {}, ("ok", "4 CPUs allowed; torch uses 1 thread, OMP_NUM_THREADS is not set")),
        (16, {}, ("warning", "4 CPUs allowed; torch uses 16 threads, OMP_NUM_THREADS is not set")),
        (2, {"OMP_NUM_THREADS": "2"}, ("ok", "4 CPUs allowed; torch uses 2 threads, OMP_NUM_THREADS is 2")),
    ],
)
def test_threads(
    tmp_path: Path, threads: int, environ: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert look(cpu.check_threads, tmp_path, STATUS, torch_threads=threads, environ=environ) == [expected]


def test_half_a_cpu_still_is_one_thread(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/cpu.max": "50000 100000"}
    assert look(cpu.check_threads, tmp_path, files, torch_threads=1)[0][0] == "ok"
    machine = Machine(tmp_path, environ={})
    (finding,) = cpu.check_threads(machine, torch_threads=2)
    assert finding.fix == "export OMP_NUM_THREADS=1 before Python starts"


@pytest.mark.parametrize(("num_workers", "severity"), [(4, "ok"), (5, "warning")])
def test_workers(tmp_path: Path, num_workers: int, severity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    findings = look(cpu.check_workers, tmp_path, STATUS, Load(num_workers=num_workers))
    assert findings == [(severity, f"num_workers={num_workers} on 4 CPUs")]


GPU = "sys/bus/pci/devices/0000:81:00.0"


def numa(allowed: str, node: str) -> dict[str, str]:
    return {
        "proc/self/status": f"Cpus_allowed_list:\t{allowed}\n",
        "sys/devices/system/node/node0/cpulist": "0-7\n",
        "sys/devices/system/node/node1/cpulist": "8-15\n",
        "sys/devices/system/node/possible": "0-1\n",
        f"{GPU}/vendor": "0x10de\n",
        f"{GPU}/class": "0x030200\n",
        f"{GPU}/numa_node": node,
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (numa("0-7", "1"), [("warning", "GPU 0000:81:00.0 is on node 1; 0 of 8 allowed CPUs are there")]),
        (numa("0-15", "1"), [("ok", "GPU 0000:81:00.0 is on node 1; 8 of 16 allowed CPUs are there")]),
        (numa("0-7", "-1"), []),
        ({"sys/devices/system/node/node0/cpulist": "0-7"}, []),
        ({}, []),
    ],
)
def test_numa(tmp_path: Path, files: dict[str, str], expected: Any) -> None:
    assert look(cpu.check_numa, tmp_path, files) == expected


@pytest.mark.parametrize(
    ("governor", "driver", "expected"),
    [
        ("performance", "acpi-cpufreq", [("ok", "performance (acpi-cpufreq)")]),
        ("powersave", "acpi-cpufreq", [("warning", "powersave (acpi-cpufreq)")]),
        ("powersave", "intel_pstate", [("ok", "powersave (intel_pstate)")]),
        ("powersave", "amd-pstate-epp", [("ok", "powersave (amd-pstate-epp)")]),
        ("powersave", "", [("warning", "powersave")]),
        ("", "", []),
    ],
)
def test_governor(tmp_path: Path, governor: str, driver: str, expected: Any) -> None:
    folder = "sys/devices/system/cpu/cpu0/cpufreq"
    files = {f"{folder}/scaling_governor": governor, f"{folder}/scaling_driver": driver}
    assert look(cpu.check_governor, tmp_path, files) == expected


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64.0 MiB"), (1 << 41, "2.0 TiB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
