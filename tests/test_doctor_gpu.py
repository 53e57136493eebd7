"""Driver, CUDA libraries and PCIe on machines made of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fastio.doctor import gpu, rates
from lightning_fastio.doctor.gpu import TorchBuild
from lightning_fastio.doctor.machine import Machine
from tests.fake_root import write_root

ADDRESS = "0000:3b:00.0"
FOLDER = f"sys/bus/pci/devices/{ADDRESS}"
CARD = {f"{FOLDER}/vendor": "0x10de\n", f"{FOLDER}/class": "0x030200\n"}
NODE = {"dev/nvidia0": ""}
CUDA_12 = TorchBuild("2.8.0+cu126", "12.6", 91002, (2, 27, 3))


def driver(version: str) -> dict[str, str]:
    return {
        "proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue Jan 7 2025\n"
        "GCC version:  gcc version 12.2.0\n"
    }


def summary(findings: Any) -> list[tuple[str, str]]:
    return [(each.severity, each.finding) for each in findings]


@pytest.mark.parametrize(
    ("files", "build", "severity", "text"),
    [
        ({}, CUDA_12, "ok", "no NVIDIA GPU; torch 2.8.0+cu126, CUDA 12.6"),
        ({}, TorchBuild("2.8.0+cpu", None), "ok", "no NVIDIA GPU; torch 2.8.0+cpu, built without CUDA"),
        (CARD, CUDA_12, "error", "1 NVIDIA GPUs, but no driver; torch 2.8.0+cu126, CUDA 12.6"),
        (CARD | NODE | driver("570.86.15"), CUDA_12, "ok", "driver 570.86.15; torch 2.8.0+cu126, CUDA 12.6"),
        (
            CARD | driver("570.86.15"),
            CUDA_12,
            "error",
            "driver 570.86.15; torch 2.8.0+cu126, CUDA 12.6; no /dev/nvidia0 here",
        ),
        (CARD | NODE | driver("470.82.01"), CUDA_12, "error", "driver 470.82.1; torch 2.8.0+cu126, CUDA 12.6"),
        (
            CARD | NODE | driver("570.86.15"),
            TorchBuild("2.8.0+cpu", None),
            "error",
            "driver 570.86.15; torch 2.8.0+cpu, built without CUDA",
        ),
        (
            CARD | NODE | {"sys/module/nvidia/version": "580.65.06\n"},
            TorchBuild("2.9.0+cu130", "13.0"),
            "ok",
            "driver 580.65.6; torch 2.9.0+cu130, CUDA 13.0",
        ),
        (
            CARD | NODE | {"proc/driver/nvidia/version": "odd", "sys/module/nvidia/version": "odd"},
            CUDA_12,
            "error",
            "1 NVIDIA GPUs, but no driver; torch 2.8.0+cu126, CUDA 12.6",
        ),
        (CARD | NODE | driver("600.1"), TorchBuild("3.0", "99.0"), "ok", "driver 600.1; torch 3.0, CUDA 99.0"),
    ],
)
def test_driver(tmp_path: Path, files: dict[str, str], build: TorchBuild, severity: str, text: str) -> None:
    assert summary(gpu.check_driver(Machine(write_root(tmp_path, files)), build)) == [(severity, text)]


def test_open_kernel_module_is_read_too(tmp_path: Path) -> None:
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  565.57.01  Release Build  (root@x)\n"
    machine = Machine(write_root(tmp_path, {"proc/driver/nvidia/version": text}))
    assert gpu.driver_version(machine) == (565, 57, 1)


REQUIREMENTS = ["filelock", "nvidia-nccl-cu12==2.27.3; platform_system == 'Linux'", "nvidia-cudnn-cu12==9.10.2.21"]


@pytest.mark.parametrize(
    ("nccl", "severity", "text"),
    [
        ("2.27.3", "ok", "CUDA 12.6, cuDNN 91002, NCCL 2.27.3"),
        (None, "ok", "CUDA 12.6, cuDNN 91002, NCCL 2.27.3"),
        ("2.20.5", "warning", "CUDA 12.6, cuDNN 91002, NCCL 2.27.3; nvidia-nccl-cu12 2.20.5 instead of 2.27.3"),
    ],
)
def test_cuda_libraries(nccl: str | None, severity: str, text: str) -> None:
    versions = {"nvidia-nccl-cu12": nccl, "nvidia-cudnn-cu12": "9.10.2.21"}
    machine = Machine(environ={}, version=versions.get)
    assert summary(gpu.check_cuda_libraries(machine, CUDA_12, REQUIREMENTS)) == [(severity, text)]


def test_cuda_libraries_of_a_cpu_build_do_not_matter() -> None:
    assert summary(gpu.check_cuda_libraries(Machine(environ={}), TorchBuild("2.8.0+cpu", None), REQUIREMENTS)) == []


@pytest.mark.parametrize(
    ("version", "severities"),
    [
        ("2.8.0", []),
        ("2.8.0+cu126", []),
        ("2.8.0+cpu", []),
        ("2.8.0+rocm6.4", []),
        ("2.8.0a0+5228986c39.nv25.06", ["info"]),
        ("2.9.0.dev20250901+cu128", ["info"]),
        ("2.8.0+gitabc", ["info"]),
    ],
)
def test_rebuilt_wheels_are_named(version: str, severities: list[str]) -> None:
    assert [each.severity for each in gpu.check_wheel(TorchBuild(version, "12.6"))] == severities


def link(width: str, max_width: str, speed: str, max_speed: str) -> dict[str, str]:
    return {
        f"{FOLDER}/current_link_width": width,
        f"{FOLDER}/max_link_width": max_width,
        f"{FOLDER}/current_link_speed": speed,
        f"{FOLDER}/max_link_speed": max_speed,
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        (CARD, []),
        (
            CARD | link("16", "16", "32.0 GT/s PCIe", "32.0 GT/s PCIe"),
            [("ok", f"GPU {ADDRESS}: x16 of x16, 32.0 of 32.0 GT/s")],
        ),
        (
            CARD | link("4", "16", "16.0 GT/s PCIe", "16.0 GT/s PCIe"),
            [("warning", f"GPU {ADDRESS}: x4 of x16, 16.0 of 16.0 GT/s")],
        ),
        (
            CARD | link("16", "16", "2.5 GT/s PCIe", "16.0 GT/s PCIe"),
            [("info", f"GPU {ADDRESS}: x16 of x16, 2.5 of 16.0 GT/s")],
        ),
        (CARD | link("16", "16", "Unknown", ""), [("ok", f"GPU {ADDRESS}: x16 of x16, ? of ? GT/s")]),
        (CARD | link("0", "255", "Unknown", "Unknown"), []),
        ({f"{FOLDER}/vendor": "0x8086", f"{FOLDER}/class": "0x030000"} | link("1", "16", "", ""), []),
    ],
)
def test_pcie(tmp_path: Path, files: dict[str, str], expected: Any) -> None:
    assert summary(gpu.check_pcie(Machine(write_root(tmp_path, files)))) == expected


@pytest.mark.parametrize(
    ("files", "severities"),
    [
        ({}, []),
        (driver("570.86.15"), ["info"]),
        (driver("570.86.15") | {"run/nvidia-persistenced/socket": ""}, ["ok"]),
    ],
)
def test_persistence(tmp_path: Path, files: dict[str, str], severities: list[str]) -> None:
    findings = gpu.check_persistence(Machine(write_root(tmp_path, files)))
    assert [each.severity for each in findings] == severities


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_without_a_gpu() -> None:
    assert summary(rates.check_gpu()) == [("info", "torch finds none")]
