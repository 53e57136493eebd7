"""`diagnose`: all checks in turn."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

from lightning_fastio.allowance import cpu_allowance
from lightning_fastio.doctor import cpu, layout, limits, memory, network, rates, software, storage
from lightning_fastio.doctor import gpu as gpu_stack
from lightning_fastio.doctor.machine import Finding, Load, Machine
from lightning_fastio.formats.base import Reader

Check = Callable[[], Iterator[Finding]]

DEFAULT_BATCH_BYTES = 64 << 20
MAX_AUTO_WORKERS = 4


def diagnose(
    *paths: str | Path,
    batch_size: int = 256,
    num_workers: int | None = None,
    prefetch_factor: int = 2,
    measure: bool = True,
    gpu: bool = False,
    machine: Machine | None = None,
) -> list[Finding]:
    """Look at this machine, and at data that lies on it.

    Nothing is changed. With ``measure``, a second or two of reading for each path.

    Args:
        paths: Data files or folders.
        batch_size: Rows of a batch, for the memory that batches take.
        num_workers: Worker threads or processes of a loader; None for the number that ``auto`` would take here.
        prefetch_factor: Batches that each worker reads ahead.
        measure: Measure the read rate of each path, with its page cache dropped.
        gpu: Measure copies to the GPUs, which starts CUDA in this process; do not fork afterwards.
        machine: Another machine than this one, for tests.

    Returns:
        Findings in the order of the checks.

    Example:
        >>> for finding in diagnose("train.h5"):
        ...     print(finding.severity, finding.check, finding.finding)
    """
    machine = machine or Machine()
    findings: list[Finding] = []
    batch_bytes = 0
    for path in (Path(path).absolute() for path in paths):
        data = layout.open_data(path)
        if isinstance(data, Finding):
            findings.append(data)
        else:
            batch_bytes = max(batch_bytes, data.schema.row_bytes * batch_size)
        for check in _path_checks(machine, path, data, measure=measure, batch_size=batch_size):
            findings += _run(check)
        if not isinstance(data, Finding):
            data.close()
    if num_workers is None:
        num_workers = max(1, min(MAX_AUTO_WORKERS, int(cpu_allowance(machine.root, machine.environ))))
    load = Load(num_workers, prefetch_factor, batch_bytes or DEFAULT_BATCH_BYTES)
    for check in _machine_checks(machine, load):
        findings += _run(check)
    if gpu:
        findings += _run(rates.check_gpu)
    return findings


def _path_checks(
    machine: Machine, path: Path, data: Reader | Finding, *, measure: bool, batch_size: int
) -> Iterator[Check]:
    yield lambda: storage.check_device(machine, path)
    yield lambda: storage.check_mount_options(machine, path)
    yield lambda: storage.check_queue(machine, path)
    yield lambda: storage.check_free_space(machine, path)
    yield lambda: storage.check_file_locking(machine, path)
    if not isinstance(data, Finding):
        reader = data
        yield lambda: layout.check_layout(path, reader)
    if measure:
        rows = None if isinstance(data, Finding) else _rows(data, batch_size)
        yield lambda: rates.check_read_rate(path, rows)


def _rows(reader: Reader, batch_size: int) -> rates.Rows | None:
    num_rows = len(reader)
    num_units = num_rows if reader.blocks is None else len(reader.blocks) - 1
    return rates.Rows(num_rows, num_units, batch_size) if num_rows else None


def _machine_checks(machine: Machine, load: Load) -> Iterator[Check]:
    build = gpu_stack.torch_build()
    yield lambda: memory.check_memory_limit(machine)
    yield lambda: memory.check_swap(machine)
    yield lambda: memory.check_dirty_pages(machine)
    yield lambda: memory.check_huge_pages(machine)
    yield lambda: memory.check_overcommit(machine)
    yield lambda: memory.check_locked_memory(machine)
    yield lambda: cpu.check_threads(machine, torch_threads=torch.get_num_threads())
    yield lambda: cpu.check_workers(machine, load)
    yield lambda: cpu.check_numa(machine)
    yield lambda: cpu.check_governor(machine)
    yield lambda: limits.check_shared_memory(machine, load)
    yield lambda: limits.check_open_files(machine)
    yield lambda: limits.check_processes(machine)
    yield lambda: gpu_stack.check_driver(machine, build)
    yield lambda: gpu_stack.check_cuda_libraries(machine, build, metadata.requires("torch") or [])
    yield lambda: gpu_stack.check_wheel(build)
    yield lambda: gpu_stack.check_pcie(machine)
    yield lambda: gpu_stack.check_persistence(machine)
    yield lambda: network.check_nccl_environment(machine)
    yield lambda: network.check_interfaces(machine)
    yield lambda: network.check_start_method(
        machine, start_method=multiprocessing.get_start_method(allow_none=True), modules=sys.modules
    )
    yield lambda: software.check_python(date.today())
    yield lambda: software.check_torch(machine)
    yield lambda: software.check_lightning(machine)


def _run(check: Check) -> list[Finding]:
    """The findings of one check; a machine that answers in an unknown way must not hide those of the others."""
    try:
        return list(check())
    except (OSError, ValueError, RuntimeError, ArithmeticError, LookupError) as error:
        return [Finding("doctor", "one check could not be made", f"{type(error).__name__}: {error}", "", "info")]
