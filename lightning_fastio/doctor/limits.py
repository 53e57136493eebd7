"""Limits that end a run half-way: shared memory, open files, processes."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_fastio.allowance import cgroup_texts
from lightning_fastio.doctor.machine import Finding, Load, Machine, size
from lightning_fastio.quantities import counted

OPEN_FILES = 4096
NUM_PROCESSES = 4096


def check_shared_memory(machine: Machine, load: Load) -> Iterator[Finding]:
    """/dev/shm against the batches that worker processes put there."""
    needed = load.num_workers * load.prefetch_factor * load.batch_bytes
    workers, batches = counted(load.num_workers, "worker"), counted(load.prefetch_factor, "batch", "batches")
    text = f"{workers} x {batches} x {size(load.batch_bytes)} = {size(needed)}"
    try:
        total, free = machine.disk_space(machine.root / "dev/shm")
    except OSError:
        yield Finding(
            "/dev/shm",
            "missing",
            "worker processes hand batches over through it",
            "mount -t tmpfs tmpfs /dev/shm; worker_type='thread' does not need it",
            "warning",
        )
        return
    text = f"{size(free)} free of {size(total)}; {text}"
    if free < needed:
        flag = f"{max(1, -(-2 * needed // (1 << 30)))}g"
        yield Finding(
            "/dev/shm",
            text,
            "when it is full a worker process dies with 'Bus error'",
            f"docker run --shm-size={flag} (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm; "
            "worker_type='thread' does not use it",
            "warning",
        )
    else:
        yield Finding("/dev/shm", text)


def check_open_files(machine: Machine) -> Iterator[Finding]:
    """How many files the process may have open."""
    limit = machine.soft_limit("Max open files")
    if limit is None:
        return
    if limit < OPEN_FILES:
        yield Finding(
            "open files",
            f"at most {limit}",
            "every tensor from a worker process and every file of a large data set takes one: 'Too many open files', "
            "'received 0 items of ancdata', 'Pin memory thread exited'",
            "ulimit -n 65535 (docker run --ulimit nofile=65535:65535), or "
            "torch.multiprocessing.set_sharing_strategy('file_system')",
            "warning",
        )
    else:
        yield Finding("open files", f"at most {limit}")


def check_processes(machine: Machine) -> Iterator[Finding]:
    """How many processes and threads may exist."""
    limits = [machine.soft_limit("Max processes")]
    limits += [int(text) for text in cgroup_texts(machine.root, "", "pids.max") if text.isdecimal()]
    limits += [int(text) for text in cgroup_texts(machine.root, "pids", "pids.max") if text.isdecimal()]
    limit = min((number for number in limits if number is not None), default=None)
    if limit is None:
        return
    if limit < NUM_PROCESSES:
        yield Finding(
            "processes",
            f"at most {limit}, threads included",
            "each rank starts workers, and each library in them its threads: 'can't start new thread'",
            "ulimit -u 65535 (docker run --pids-limit=-1)",
            "warning",
        )
    else:
        yield Finding("processes", f"at most {limit}, threads included")
