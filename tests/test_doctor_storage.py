"""Storage of a path, on machines made of files, and measured rates on a real file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_fastio.doctor import rates, storage
from lightning_fastio.doctor.machine import Finding, Machine
from tests.fake_root import write_root

ROOT_LINE = "20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"
DATA = Path("/data/train.h5")


def mountinfo(line: str) -> dict[str, str]:
    return {"proc/self/mountinfo": ROOT_LINE + line + "\n"}


def disk(number: str, name: str, **queue: str) -> dict[str, str]:
    """A whole disk under its device number."""
    return {f"sys/dev/block/{number}/queue/{key}": value for key, value in queue.items()} | {
        f"sys/dev/block/{number}/uevent": f"DEVNAME={name}"
    }


def look(check: Any, root: Path, files: dict[str, str], path: Path = DATA, **options: Any) -> list[tuple[str, str]]:
    machine = Machine(write_root(root, files), **{"environ": {}, **options})
    return [(each.severity, each.finding) for each in check(machine, path)]


def linked_disk(root: Path, name: str, **queue: str) -> Path:
    """A disk with one partition, 259:2, linked from /sys/dev/block as the kernel does."""
    base = f"sys/devices/pci0000:00/{name}"
    write_root(
        root, {f"{base}/queue/{key}": value for key, value in queue.items()} | {f"{base}/{name}p2/partition": "2"}
    )
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block/259:2").symlink_to(root / base / f"{name}p2")
    return root


@pytest.mark.parametrize(
    ("name", "rotational", "expected"),
    [
        ("nvme0n1", "0", ("ok", "ext4 at /data on nvme0n1: NVMe")),
        ("sdb", "0", ("ok", "ext4 at /data on sdb: SSD")),
        ("sdb", "1", ("warning", "ext4 at /data on sdb: rotating disk")),
        ("vda", "1", ("ok", "ext4 at /data on vda: virtual disk")),
    ],
)
def test_kind_of_disk_behind_a_partition(tmp_path: Path, name: str, rotational: str, expected: Any) -> None:
    linked_disk(tmp_path, name, rotational=rotational, scheduler="[none] mq-deadline", read_ahead_kb="128")
    files = mountinfo("30 20 259:2 / /data rw,noatime - ext4 /dev/x rw")
    assert look(storage.check_device, tmp_path, files) == [expected]
    assert look(storage.check_queue, tmp_path, files) == [("ok", f"{name}: scheduler none, read-ahead 128 KiB")]


def test_a_mapped_device_is_the_disk_below_it(tmp_path: Path) -> None:
    linked_disk(tmp_path, "nvme1n1", rotational="0", scheduler="none", read_ahead_kb="256")
    files = mountinfo("30 20 253:0 / /data rw - xfs /dev/mapper/v rw") | {"sys/dev/block/253:0/queue/rotational": "0"}
    (tmp_path / "sys/dev/block/253:0/slaves").mkdir(parents=True)
    (tmp_path / "sys/dev/block/253:0/slaves/nvme1n1p2").symlink_to(tmp_path / "sys/dev/block/259:2")
    assert look(storage.check_device, tmp_path, files) == [("ok", "xfs at /data on nvme1n1: NVMe")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "30 20 0:50 / /data rw - nfs4 srv:/export rw,rsize=65536",
            ("warning", "nfs4 at /data from srv:/export: over the network"),
        ),
        ("30 20 0:50 / /data rw - fuse.s3fs s3fs rw", ("warning", "fuse.s3fs at /data from s3fs: over the network")),
        ("30 20 0:50 / /data rw - tmpfs tmpfs rw", ("ok", "tmpfs at /data: memory")),
        ("30 20 0:50 / / rw - overlay overlay rw", ("info", "overlay at /: a layer of the container's image")),
        ("30 20 0:50 / /data rw - zfs pool/data rw", ("ok", "zfs at /data")),
        ("30 20 0:50 / /dat rw - tmpfs tmpfs rw", ("ok", "ext4 at /")),
        ("30 20 0:50 broken line", ("ok", "ext4 at /")),
    ],
)
def test_storage_without_a_disk(tmp_path: Path, line: str, expected: Any) -> None:
    assert look(storage.check_device, tmp_path, mountinfo(line)) == [expected]


def test_mount_points_with_blanks(tmp_path: Path) -> None:
    files = mountinfo(r"30 20 0:50 / /my\040data rw - tmpfs tmpfs rw")
    assert look(storage.check_device, tmp_path, files, Path("/my data/x.npy")) == [("ok", "tmpfs at /my data: memory")]


def test_the_last_mount_over_a_point_is_seen(tmp_path: Path) -> None:
    files = mountinfo("30 20 0:50 / /data rw - tmpfs tmpfs rw\n31 20 0:51 / /data rw - nfs srv:/x rw")
    assert look(storage.check_device, tmp_path, files)[0][1].startswith("nfs at /data")


@pytest.mark.parametrize("check", [storage.check_device, storage.check_mount_options, storage.check_queue])
def test_without_mountinfo_nothing_is_said(tmp_path: Path, check: Any) -> None:
    assert look(check, tmp_path, {}) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("30 20 8:2 / /data rw,noatime - ext4 /dev/sda2 rw", []),
        ("30 20 8:2 / /data rw,sync - ext4 /dev/sda2 rw", [("warning", "/data is mounted with sync")]),
        ("30 20 8:2 / /data rw,strictatime - ext4 /dev/sda2 rw", [("info", "/data is mounted with strictatime")]),
        ("30 20 0:5 / /data rw - nfs s:/x rw,rsize=32768", [("info", "NFS reads 32.0 KiB at a time")]),
        ("30 20 0:5 / /data rw - nfs s:/x rw,rsize=1048576", []),
        ("30 20 0:5 / /data rw - nfs s:/x rw,rsize=odd", []),
        ("30 20 0:5 / /data rw - nfs s:/x rw,noac", [("warning", "NFS with noac")]),
    ],
)
def test_mount_options(tmp_path: Path, line: str, expected: Any) -> None:
    assert look(storage.check_mount_options, tmp_path, mountinfo(line)) == expected


@pytest.mark.parametrize(
    ("scheduler", "read_ahead", "severity"),
    [("[none] bfq", "128", "ok"), ("none [bfq]", "128", "warning"), ("[none]", "4", "info"), ("", "odd", "ok")],
)
def test_queue(tmp_path: Path, scheduler: str, read_ahead: str, severity: str) -> None:
    linked_disk(tmp_path, "nvme0n1", rotational="0", scheduler=scheduler, read_ahead_kb=read_ahead)
    files = mountinfo("30 20 259:2 / /data rw,noatime - ext4 /dev/x rw")
    ((found, text),) = look(storage.check_queue, tmp_path, files)
    assert found == severity
    assert text.startswith("nvme0n1: scheduler ")


@pytest.mark.parametrize(
    ("total_gib", "free_gib", "severity"), [(1000, 500, "ok"), (1000, 5, "warning"), (10_000, 200, "warning")]
)
def test_free_space(tmp_path: Path, total_gib: int, free_gib: int, severity: str) -> None:
    space = (total_gib << 30, free_gib << 30)
    ((found, _),) = look(storage.check_free_space, tmp_path, {}, disk_space=lambda path: space)
    assert found == severity


def test_free_space_of_a_path_that_is_not_there(tmp_path: Path) -> None:
    assert look(storage.check_free_space, tmp_path, {}, tmp_path / "none") == []


@pytest.mark.parametrize(
    ("type", "value", "severities"),
    [("nfs4", "", ["info"]), ("lustre", "TRUE", ["info"]), ("nfs4", "FALSE", ["ok"]), ("ext4", "", [])],
)
def test_file_locking(tmp_path: Path, type: str, value: str, severities: list[str]) -> None:
    files = mountinfo(f"30 20 0:5 / /data rw - {type} s:/x rw")
    environ = {"HDF5_USE_FILE_LOCKING": value} if value else {}
    findings = look(storage.check_file_locking, tmp_path, files, environ=environ)
    assert [severity for severity, _ in findings] == severities


def test_rates_of_a_real_folder(tmp_path: Path) -> None:
    for name, num_bytes in (("small.bin", 1 << 20), ("large.bin", 8 << 20), ("empty.bin", 0)):
        (tmp_path / name).write_bytes(os.urandom(num_bytes))
    assert {path.name: num_bytes for path, num_bytes in rates.file_sizes(tmp_path).items()} == {
        "large.bin": 8 << 20,
        "small.bin": 1 << 20,
    }
    descriptors = len(os.listdir("/proc/self/fd"))
    (finding,) = rates.check_read_rate(tmp_path, rates.Rows(num_rows=9 << 10, num_units=9 << 7, batch_size=16))
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert "random 8.0 KiB" in finding.finding
    assert finding.finding.endswith("batches of 16 rows a second on first reading")


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(8 << 20))
    return path


@pytest.mark.parametrize(
    ("sequential", "scattered", "severity"), [(1 << 30, 1 << 29, "ok"), (1 << 30, 80 << 20, "info")]
)
def test_slow_random_reads_are_named(
    large_file: Path, monkeypatch: pytest.MonkeyPatch, sequential: float, scattered: float, severity: str
) -> None:
    monkeypatch.setattr(rates, "sequential_rate", lambda path: sequential)
    monkeypatch.setattr(rates, "random_rate", lambda path, request_bytes: scattered)
    (finding,) = rates.check_read_rate(large_file, rates.Rows(num_rows=8192, num_units=8192, batch_size=64))
    assert finding.severity == severity
    in_order, shuffled = sequential / 1024 / 64, scattered / 1024 / 64
    assert f"{in_order:,.1f} and {shuffled:,.1f} batches of 64 rows a second" in finding.finding


def test_small_files_are_not_measured(tmp_path: Path) -> None:
    assert list(rates.check_read_rate(tmp_path, None)) == []
    (tmp_path / "small").write_bytes(bytes(1 << 20))
    assert list(rates.check_read_rate(tmp_path, None)) == []
    assert list(rates.check_read_rate(tmp_path / "none", None)) == []


def test_unknown_rows_are_read_in_pieces_of_64_kib(large_file: Path) -> None:
    (finding,) = rates.check_read_rate(large_file, None)
    assert "random 64.0 KiB" in finding.finding
    assert "batches" not in finding.finding


def test_measuring_stops_in_time(large_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    real = os.preadv
    monkeypatch.setattr(rates, "MAX_SECONDS", -1.0)
    monkeypatch.setattr(os, "preadv", lambda *args: reads.append(args) or real(*args))
    assert rates.sequential_rate(large_file) > 0
    assert len(reads) == 1


def test_finding_is_a_plain_record() -> None:
    assert Finding("a", "b") == Finding(check="a", finding="b", why="", fix="", severity="ok")
