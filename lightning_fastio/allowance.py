"""What this process may use of the machine: CPUs and memory, as affinity, cgroups and SLURM limit them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path("/")

_MAX_CPUS = 1 << 16


def cpu_allowance(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> float:
    """CPUs that this process may keep busy; a fraction where a cgroup has a quota.

    Args:
        root: Stands for ``/``.
        environ: Environment variables.
    """
    limits = [float(os.cpu_count() or 1)]
    status = _read(root / "proc/self/status").splitlines()
    affinities = [line.split(":", 1)[1] for line in status if line.startswith("Cpus_allowed_list:")]
    limits += [float(len(parse_cpu_list(text))) for text in affinities]
    limits += _cpu_quotas(root)
    if environ.get("SLURM_CPUS_PER_TASK", "").isdecimal():
        limits.append(float(environ["SLURM_CPUS_PER_TASK"]))
    return min(limit for limit in limits if limit > 0)


def memory_allowance(root: Path = ROOT) -> int | None:
    """Bytes of memory that this process may use: the machine's, or a cgroup's where that is less; None if unknown."""
    limits = []
    total = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    if total:
        limits.append(int(total[1]) * 1024)
    texts = [*cgroup_texts(root, "", "memory.max"), *cgroup_texts(root, "memory", "memory.limit_in_bytes")]
    limits += [int(text) for text in texts if text.isdecimal()]
    return min(limits, default=None)


def cgroup_texts(root: Path, controller: str, name: str) -> Iterator[str]:
    """What a control file says in the cgroup of this process and in all groups around it, innermost first.

    Inside a container, the innermost path is often not visible and its mount stands for it.

    Args:
        root: Stands for ``/``.
        controller: Of cgroup v1, such as ``memory``; empty for v2.
        name: Of the file, such as ``memory.max``.
    """
    group = "/"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path and controller in controllers.split(","):
            group = path
    top = root / "sys/fs/cgroup" / controller
    inner = top / group.lstrip("/")
    while True:
        text = _read(inner / name).strip()
        if text:
            yield text
        if inner == top or top not in inner.parents:
            return
        inner = inner.parent


def parse_cpu_list(text: str) -> set[int]:
    """CPU numbers of the kernel's notation, such as ``0-3,8``; empty where it is not understood."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal() and int(last or first) < _MAX_CPUS:
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def _cpu_quotas(root: Path) -> Iterator[float]:
    pairs = [text.partition(" ")[::2] for text in cgroup_texts(root, "", "cpu.max")]
    quotas = cgroup_texts(root, "cpu", "cpu.cfs_quota_us")
    pairs += zip(quotas, cgroup_texts(root, "cpu", "cpu.cfs_period_us"), strict=False)
    for quota, period in pairs:
        # No quota is written as "max" or -1.
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
