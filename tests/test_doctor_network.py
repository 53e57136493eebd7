"""NCCL's environment, interfaces, start method, versions."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from lightning_fastio.doctor import network, software
from lightning_fastio.doctor.machine import Machine
from tests.fake_root import write_root

INTERFACES = {"sys/class/net/lo/mtu": "65536", "sys/class/net/eth0/mtu": "1500", "sys/class/net/docker0/mtu": "1500"}
INFINIBAND = {"sys/class/infiniband/mlx5_0/node_type": "1"}


def severities(findings: Any) -> list[str]:
    return [each.severity for each in findings]


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, {}, []),
        ({"NCCL_P2P_DISABLE": "0"}, {}, []),
        ({"NCCL_P2P_DISABLE": "1"}, {}, ["warning"]),
        ({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}, {}, ["warning", "warning"]),
        ({"NCCL_IB_DISABLE": "1"}, {}, []),
        ({"NCCL_IB_DISABLE": "1"}, INFINIBAND, ["warning"]),
        ({"NCCL_DEBUG": "info"}, {}, ["info"]),
        ({"NCCL_DEBUG": "WARN"}, {}, []),
        ({"NCCL_SOCKET_IFNAME": "eth"}, INTERFACES, []),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, INTERFACES, ["error"]),
        ({"NCCL_SOCKET_IFNAME": "^docker0"}, INTERFACES, []),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, INTERFACES, ["error"]),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, {}, []),
        ({"NCCL_SOCKET_IFNAME": "lo"}, INTERFACES, ["warning"]),
        ({"GLOO_SOCKET_IFNAME": "eth"}, INTERFACES, ["error"]),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, INTERFACES, []),
    ],
)
def test_nccl_environment(tmp_path: Path, environ: Any, files: dict[str, str], expected: list[str]) -> None:
    machine = Machine(write_root(tmp_path, files), environ=environ)
    assert severities(network.check_nccl_environment(machine)) == expected


def interface(speed: str, mtu: str, state: str = "up") -> dict[str, str]:
    folder = "sys/class/net/eth0"
    return {
        f"{folder}/speed": speed,
        f"{folder}/mtu": mtu,
        f"{folder}/operstate": state,
        f"{folder}/device/vendor": "x",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, []),
        (interface("10000", "1500"), [("ok", "eth0: 10 Gb/s, MTU 1500")]),
        (interface("100000", "1500"), [("info", "eth0: 100 Gb/s, MTU 1500")]),
        (interface("100000", "9000"), [("ok", "eth0: 100 Gb/s, MTU 9000")]),
        (interface("-1", "odd"), [("ok", "eth0: speed unknown, MTU ?")]),
        (interface("100000", "1500", "down"), []),
        ({"sys/class/net/br0/operstate": "up", "sys/class/net/br0/mtu": "1500"}, []),
    ],
)
def test_interfaces(tmp_path: Path, files: dict[str, str], expected: Any) -> None:
    findings = network.check_interfaces(Machine(write_root(tmp_path, files)))
    assert [(each.severity, each.finding) for each in findings] == expected


@pytest.mark.parametrize(
    ("start_method", "modules", "expected"),
    [
        ("fork", {"cv2", "numpy"}, ["info"]),
        (None, {"grpc"}, ["info"]),
        ("fork", {"numpy"}, []),
        ("spawn", {"cv2"}, []),
        ("forkserver", {"cv2"}, []),
    ],
)
def test_start_method(start_method: str | None, modules: set[str], expected: list[str]) -> None:
    findings = network.check_start_method(Machine(), start_method=start_method, modules=modules)
    assert severities(findings) == expected


@pytest.mark.parametrize(
    ("version", "today", "expected"),
    [
        ((3, 9), date(2026, 1, 1), ["warning"]),
        ((3, 10), date(2026, 1, 1), ["ok"]),
        ((3, 10), date(2027, 1, 1), ["warning"]),
        ((3, 99), date(2027, 1, 1), ["ok"]),
    ],
)
def test_python(version: tuple[int, int], today: date, expected: list[str]) -> None:
    assert severities(software.check_python(today, version)) == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.13.0+cpu", ["ok"]), ("2.4.1", ["ok"]), ("2.3.1+cu121", ["error"]), ("1.13.1", ["error"]), (None, ["error"])],
)
def test_torch(version: str | None, expected: list[str]) -> None:
    assert severities(software.check_torch(Machine(version={"torch": version}.get))) == expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.6.1", ["ok"]), ("2.6.2", ["error"]), ("2.6.3", ["error"]), ("2.6.6", ["ok"]), (None, [])],
)
@pytest.mark.parametrize("name", ["lightning", "pytorch-lightning"])
def test_compromised_releases_are_errors(name: str, version: str | None, expected: list[str]) -> None:
    assert severities(software.check_lightning(Machine(version={name: version}.get))) == expected
