"""Memory: swap, write-back, huge pages, limits."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_fastio.allowance import cgroup_texts, memory_allowance
from lightning_fastio.doctor.machine import Finding, Machine, size

GIB = 1 << 30
DIRTY_BYTES = 16 * GIB
"""More unwritten data than this makes the end of a conversion stall for seconds."""


def meminfo_bytes(machine: Machine, name: str) -> int | None:
    """An entry of /proc/meminfo, such as ``MemTotal``."""
    for line in machine.text("proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if key == name and words and words[0].isdecimal():
            return int(words[0]) * 1024
    return None


def check_swap(machine: Machine) -> Iterator[Finding]:
    """Swap and how readily it is used."""
    devices = [line.split() for line in machine.text("proc/swaps").splitlines()[1:]]
    devices = [words for words in devices if len(words) >= 4 and words[2].isdecimal() and words[3].isdecimal()]
    if not devices:
        yield Finding("swap", "none")
        return
    total, used = (sum(int(words[column]) for words in devices) * 1024 for column in (2, 3))
    swappiness = machine.number("proc/sys/vm/swappiness")
    text = f"{size(used)} of {size(total)} used, vm.swappiness {'?' if swappiness is None else swappiness}"
    if used > 0.05 * total:
        yield Finding(
            "swap",
            text,
            "pages of this or other processes come back from disk one by one: steps stall at random",
            "free memory (fewer workers, smaller caches), then: sudo swapoff -a && sudo swapon -a",
            "warning",
        )
    elif swappiness is None or swappiness > 10:
        yield Finding(
            "swap",
            text,
            "with much page cache from reading, Linux swaps idle memory of the training process out",
            "sudo sysctl vm.swappiness=1",
            "info",
        )
    else:
        yield Finding("swap", text)


def check_dirty_pages(machine: Machine) -> Iterator[Finding]:
    """How much may be written before a writer has to wait."""
    limit = machine.number("proc/sys/vm/dirty_bytes") or 0
    if not limit:
        ratio, total = machine.number("proc/sys/vm/dirty_ratio"), meminfo_bytes(machine, "MemTotal")
        if ratio is None or total is None:
            return
        limit = total * ratio // 100
    if limit > DIRTY_BYTES:
        yield Finding(
            "write-back",
            f"up to {size(limit)} may wait to be written",
            "a conversion or checkpoint runs fast at first and then stalls, readers with it, while all is written",
            "sudo sysctl vm.dirty_background_bytes=1073741824 vm.dirty_bytes=4294967296",
            "info",
        )
    else:
        yield Finding("write-back", f"up to {size(limit)} may wait to be written")


def check_huge_pages(machine: Machine) -> Iterator[Finding]:
    """Transparent huge pages."""
    folder = "sys/kernel/mm/transparent_hugepage"
    enabled, defrag = (_chosen(machine.text(f"{folder}/{name}")) for name in ("enabled", "defrag"))
    if not enabled:
        return
    text = f"{enabled}, defrag {defrag or '?'}"
    if enabled == "never":
        yield Finding(
            "huge pages",
            text,
            "large batches are spread over 4-KiB pages: gathering random rows misses the TLB more often",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
            "info",
        )
    elif enabled == "always" and defrag == "always":
        yield Finding(
            "huge pages",
            text,
            "an allocation may wait while the kernel compacts memory",
            "echo defer+madvise | sudo tee /sys/kernel/mm/transparent_hugepage/defrag",
            "warning",
        )
    else:
        yield Finding("huge pages", text)


def check_memory_limit(machine: Machine) -> Iterator[Finding]:
    """Memory that this process may use, and how much of it is taken."""
    limit, total = memory_allowance(machine.root), meminfo_bytes(machine, "MemTotal")
    if limit is None:
        return
    if total is None or limit >= total:
        yield Finding("memory", size(limit))
        return
    used = _cgroup_use(machine)
    text = f"the cgroup allows {size(limit)} of the machine's {size(total)}" + (f", {size(used)} taken" if used else "")
    if used > 0.9 * limit:
        yield Finding(
            "memory",
            text,
            "at the limit the kernel ends a process, often a worker, without a message",
            "raise the limit (docker run --memory, SLURM --mem), or use fewer workers and a smaller cache_bytes",
            "warning",
        )
    else:
        yield Finding("memory", text)


def check_overcommit(machine: Machine) -> Iterator[Finding]:
    """Whether maps larger than memory are refused."""
    if machine.number("proc/sys/vm/overcommit_memory") == 2:
        yield Finding(
            "overcommit",
            "vm.overcommit_memory is 2",
            "large files are mapped copy-on-write, which counts as if all of it were used: opening them, or starting "
            "worker processes, fails with 'Cannot allocate memory'",
            "sudo sysctl vm.overcommit_memory=0",
            "warning",
        )


def check_locked_memory(machine: Machine) -> Iterator[Finding]:
    """Memory that may be locked, which InfiniBand needs."""
    limit = machine.soft_limit("Max locked memory")
    if limit is None:
        return
    has_infiniband = bool(machine.folder("sys/class/infiniband"))
    if has_infiniband and limit < GIB:
        yield Finding(
            "locked memory",
            f"at most {size(limit)}, and there is InfiniBand",
            "NCCL cannot register its buffers: 'ibv_reg_mr failed', or it falls back to sockets",
            "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1",
            "error",
        )
    else:
        yield Finding("locked memory", f"at most {size(limit)}")


def _chosen(text: str) -> str:
    """The setting in brackets, as in ``always [madvise] never``."""
    return text.partition("[")[2].partition("]")[0]


def _cgroup_use(machine: Machine) -> int:
    """Memory that the cgroup holds and cannot give back: without the page cache."""
    for controller, usage, cache in (
        ("", "memory.current", "inactive_file"),
        ("memory", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        used = next(cgroup_texts(machine.root, controller, usage), "")
        statistics = next(cgroup_texts(machine.root, controller, "memory.stat"), "")
        if used.isdecimal():
            entries = dict(line.split(" ", 1) for line in statistics.splitlines() if " " in line)
            cached = entries.get(cache, "0")
            return max(0, int(used) - (int(cached) if cached.isdecimal() else 0))
    return 0
