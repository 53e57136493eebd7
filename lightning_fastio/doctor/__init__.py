"""What keeps this machine from feeding its GPU, and what to do about it: `diagnose` and ``fastio doctor``.

    machine.py    what the checks look at (a root folder, environment, versions), and what they say
    storage.py    device, file system, options, queue, space
    layout.py     the data files themselves
    rates.py      measured: reading, and copying to the GPU
    memory.py  cpu.py  limits.py
    gpu.py        driver, CUDA libraries, PCIe
    network.py    NCCL, interfaces, start method
    software.py   versions
    command.py    fastio doctor: the table and the JSON

A check is a function that yields findings. It only reads, takes well under a second unless it measures, and starts no
CUDA context unless asked.
"""

from __future__ import annotations

from lightning_fastio.doctor.command import add_arguments, main
from lightning_fastio.doctor.diagnosis import diagnose
from lightning_fastio.doctor.machine import Finding, Machine

__all__ = ["Finding", "Machine", "add_arguments", "diagnose", "main"]
