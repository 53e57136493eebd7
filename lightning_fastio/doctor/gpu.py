"""The GPU stack: driver, the CUDA of torch, and the link between host and device. Starts no CUDA context."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lightning_fastio.doctor.machine import Finding, Machine

FIRST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""CUDA's major version to the first driver that runs it, whatever the minor one (NVIDIA, "CUDA compatibility")."""

_WHEELS = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"


@dataclass(frozen=True)
class TorchBuild:
    """What torch was built with."""

    version: str
    """Such as ``2.8.0+cu126``."""
    cuda: str | None
    """Version of CUDA, or None for a build without it."""
    cudnn: int | None = None
    """cuDNN as a number, such as 91002, as it was loaded."""
    nccl: tuple[int, ...] | None = None
    """NCCL as it was loaded."""


def torch_build() -> TorchBuild:
    """The torch of this process; asks no device."""
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None  # type: ignore[no-untyped-call]
    nccl = torch.cuda.nccl.version() if torch.version.cuda and torch.distributed.is_nccl_available() else None  # type: ignore[no-untyped-call]
    return TorchBuild(torch.__version__, torch.version.cuda, cudnn, nccl)


def nvidia_devices(machine: Machine) -> list[str]:
    """PCI addresses of the NVIDIA GPUs."""
    devices = "sys/bus/pci/devices"
    return [
        address
        for address in machine.folder(devices)
        if machine.text(f"{devices}/{address}/vendor") == "0x10de"
        and machine.text(f"{devices}/{address}/class").startswith(("0x0300", "0x0302"))
    ]


def driver_version(machine: Machine) -> tuple[int, ...] | None:
    """Version of NVIDIA's kernel module, or None where it is not loaded."""
    found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", machine.text("proc/driver/nvidia/version") + " ")
    text = found[1] if found else machine.text("sys/module/nvidia/version")
    return tuple(map(int, text.split("."))) if re.fullmatch(r"\d+(\.\d+)+", text) else None


def check_driver(machine: Machine, build: TorchBuild) -> Iterator[Finding]:
    """Driver against the CUDA of torch."""
    devices, driver = nvidia_devices(machine), driver_version(machine)
    name = f"torch {build.version}" + (f", CUDA {build.cuda}" if build.cuda else ", built without CUDA")
    if driver is None:
        if devices:
            yield Finding(
                "GPU driver",
                f"{len(devices)} NVIDIA GPUs, but no driver; {name}",
                "torch.cuda.is_available() is False: training runs on the CPU",
                "install the driver (sudo apt install nvidia-driver-580-server, or your distribution's package)",
                "error",
            )
        else:
            yield Finding("GPU driver", f"no NVIDIA GPU; {name}")
        return
    text = f"driver {'.'.join(map(str, driver))}; {name}"
    if build.cuda is None:
        yield Finding("GPU driver", text, "torch cannot use the GPU", _WHEELS, "error")
        return
    if not any(re.fullmatch(r"nvidia\d+", entry) for entry in machine.folder("dev")):
        yield Finding(
            "GPU driver",
            f"{text}; no /dev/nvidia0 here",
            "the driver is loaded, but this container was given no GPU",
            "docker run --gpus all; SLURM: --gres=gpu:1",
            "error",
        )
        return
    major = int(build.cuda.split(".")[0])
    needed = FIRST_DRIVER.get(major)
    if needed is not None and driver[:2] < needed:
        yield Finding(
            "GPU driver",
            text,
            f"CUDA {major} needs driver {needed[0]}.{needed[1]} or later: 'NVIDIA driver on your system is too old'",
            "update the driver, or install a torch built for an older CUDA: see https://pytorch.org/get-started",
            "error",
        )
    else:
        yield Finding("GPU driver", text)


def check_cuda_libraries(machine: Machine, build: TorchBuild, requirements: list[str]) -> Iterator[Finding]:
    """CUDA libraries that are installed against those that torch was built for.

    Args:
        machine: The machine.
        build: What torch loaded.
        requirements: Requirements of the installed torch, as its metadata lists them.
    """
    if build.cuda is None:
        return
    wrong = []
    for requirement in requirements:
        found = re.match(r"(nvidia-[\w-]+)\s*==\s*([\w.]+)", requirement)
        installed = machine.version(found[1]) if found else None
        if found and installed is not None and installed != found[2]:
            wrong.append(f"{found[1]} {installed} instead of {found[2]}")
    text = f"CUDA {build.cuda}"
    if build.cudnn:
        text += f", cuDNN {build.cudnn}"
    if build.nccl:
        text += f", NCCL {'.'.join(map(str, build.nccl))}"
    if "LD_LIBRARY_PATH" in machine.environ and "cuda" in machine.environ["LD_LIBRARY_PATH"].lower():
        text += f"; LD_LIBRARY_PATH={machine.environ['LD_LIBRARY_PATH']} may put others before them"
    if wrong:
        yield Finding(
            "CUDA libraries",
            f"{text}; {'; '.join(wrong)}",
            "torch was built and tested with other versions: undefined symbols, slow or wrong kernels",
            f"pip install --force-reinstall torch=={build.version.split('+')[0]}",
            "warning",
        )
    else:
        yield Finding("CUDA libraries", text)


def check_wheel(build: TorchBuild) -> Iterator[Finding]:
    """Whether torch is a wheel of pytorch.org or was built elsewhere."""
    local = build.version.partition("+")[2]
    if not re.fullmatch(r"|cpu|cu\d+|rocm[\d.]+|xpu", local) or "a0" in build.version or "dev" in build.version:
        yield Finding(
            "torch build",
            f"{build.version} is not a released wheel",
            "vendors and nightly builds differ in cuDNN, NCCL and allocator: compare speed with a released wheel first",
            "",
            "info",
        )


def check_pcie(machine: Machine) -> Iterator[Finding]:
    """Width and generation of each GPU's link against what the GPU can do."""
    for address in nvidia_devices(machine):
        folder = f"sys/bus/pci/devices/{address}"
        width, max_width = (machine.number(f"{folder}/{name}_link_width") for name in ("current", "max"))
        speed, max_speed = (_transfers(machine.text(f"{folder}/{name}_link_speed")) for name in ("current", "max"))
        if not width or not max_width:
            continue
        text = f"GPU {address}: x{width} of x{max_width}, {speed or '?'} of {max_speed or '?'} GT/s"
        if width < max_width:
            yield Finding(
                "PCIe",
                text,
                f"copies to this GPU run at {width / max_width:.0%} of its speed",
                "use a slot with more lanes, reseat the card, look for risers and shared slots (lspci -vv)",
                "warning",
            )
        elif speed and max_speed and speed < max_speed:
            yield Finding(
                "PCIe",
                text,
                "normal while the GPU is idle; under load it would be a slow slot",
                "look again during training, or measure: fastio doctor --gpu",
                "info",
            )
        else:
            yield Finding("PCIe", text)


def check_persistence(machine: Machine) -> Iterator[Finding]:
    """Whether the driver stays loaded between processes."""
    if driver_version(machine) is None:
        return
    if "socket" in machine.folder("run/nvidia-persistenced") or "socket" in machine.folder(
        "var/run/nvidia-persistenced"
    ):
        yield Finding("persistence", "nvidia-persistenced runs")
    else:
        yield Finding(
            "persistence",
            "nvidia-persistenced is not seen here (a container does not show it)",
            "without it, the driver starts the GPU anew for each process, one to several seconds",
            "sudo nvidia-smi -pm 1",
            "info",
        )


def _transfers(text: str) -> float | None:
    """Transfers a second, in GT/s, as in ``16.0 GT/s PCIe``."""
    found = re.match(r"([\d.]+) GT/s", text)
    return float(found[1]) if found else None
