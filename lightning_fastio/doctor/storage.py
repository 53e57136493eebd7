"""Where the data lies: device, file system, mount options, queue, free space."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_fastio.doctor.machine import Finding, Machine, size

NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "9p",
    "wekafs",
    "afs",
    "virtiofs",
}
LOW_FREE_BYTES = 10 << 30


@dataclass(frozen=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: str
    """Where it is mounted."""
    device: str
    """Device number, such as ``259:2``."""
    type: str
    """File system."""
    source: str
    """What is mounted, such as ``/dev/nvme0n1p2`` or ``server:/export``."""
    options: frozenset[str]
    """Options of the mount and of the file system."""

    @property
    def is_network(self) -> bool:
        """Whether another machine holds the data."""
        return self.type in NETWORK or (self.type.startswith("fuse") and self.type != "fuseblk")


def mount_of(machine: Machine, path: Path) -> Mount | None:
    """The mount that holds an absolute path; None where mountinfo cannot be read."""
    best: Mount | None = None
    for line in machine.text("proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        words, tail = left.split(), right.split()
        if len(words) < 6 or len(tail) < 3:
            continue
        point = words[4].encode().decode("unicode_escape")
        holds = point == "/" or path == Path(point) or Path(point) in path.parents
        # Of mounts over the same point the last one is seen.
        if holds and (best is None or len(point) >= len(best.point)):
            options = frozenset(words[5].split(",") + tail[2].split(","))
            best = Mount(point, words[2], tail[0], tail[1].encode().decode("unicode_escape"), options)
    return best


@dataclass(frozen=True)
class BlockDevice:
    """What the kernel says about a disk."""

    name: str
    """Such as ``nvme0n1``."""
    kind: str
    """``NVMe``, ``SSD``, ``rotating disk`` or ``virtual disk``."""
    scheduler: str
    """The I/O scheduler in use; empty if unknown."""
    read_ahead_kib: int | None
    """What a sequential reader gets ahead."""


def block_device(machine: Machine, mount: Mount) -> BlockDevice | None:
    """The disk under a mount, or None (memory, network, layers of a container)."""
    for folder in (f"sys/dev/block/{mount.device}", f"sys/class/block/{os.path.basename(mount.source)}"):
        if not machine.folder(folder):
            continue
        resolved = os.path.realpath(machine.root / folder)
        # A partition has no queue; the disk is the folder above it.
        disk = resolved if os.path.isdir(f"{resolved}/queue") else os.path.dirname(resolved)
        slaves = os.path.join(disk, "slaves")
        if os.path.isdir(slaves) and os.listdir(slaves):
            below = os.path.realpath(os.path.join(slaves, sorted(os.listdir(slaves))[0]))
            disk = below if os.path.isdir(f"{below}/queue") else os.path.dirname(below)
        queue = f"{os.path.relpath(disk, os.path.realpath(machine.root))}/queue"
        if not machine.folder(queue):
            return None
        name = os.path.basename(disk)
        scheduler = machine.text(f"{queue}/scheduler")
        return BlockDevice(
            name,
            _kind(name, machine.text(f"{queue}/rotational")),
            scheduler.partition("[")[2].partition("]")[0] or scheduler,
            machine.number(f"{queue}/read_ahead_kb"),
        )
    return None


def _kind(name: str, rotational: str) -> str:
    if name.startswith("nvme"):
        return "NVMe"
    if name.startswith(("vd", "xvd")):
        # What is behind it, and its "rotational" flag, is the host's affair.
        return "virtual disk"
    return "rotating disk" if rotational == "1" else "SSD"


def check_device(machine: Machine, path: Path) -> Iterator[Finding]:
    """What kind of storage holds a path."""
    mount = mount_of(machine, path)
    if mount is None:
        return
    check = f"storage of {path}"
    device = block_device(machine, mount)
    where = f"{mount.type} at {mount.point}"
    if mount.is_network:
        yield Finding(
            check,
            f"{where} from {mount.source}: over the network",
            "each random row waits for a round trip, and other jobs share the server",
            "copy the data to a local disk before training, or use shuffle='block', which reads sequentially",
            "warning",
        )
    elif mount.type in ("tmpfs", "ramfs"):
        yield Finding(check, f"{where}: memory")
    elif mount.type == "overlay":
        yield Finding(
            check,
            f"{where}: a layer of the container's image",
            "the first write to a file copies all of it, and the layers add work to every open",
            "mount a folder of the host: docker run -v /data:/data",
            "info",
        )
    elif device is not None and device.kind == "rotating disk":
        yield Finding(
            check,
            f"{where} on {device.name}: rotating disk",
            "it reads about 100 random rows a second, whatever their size",
            "copy the data to an SSD, or use shuffle='block', which reads sequentially",
            "warning",
        )
    else:
        yield Finding(check, f"{where} on {device.name}: {device.kind}" if device else where)


def check_mount_options(machine: Machine, path: Path) -> Iterator[Finding]:
    """Options that cost time with every read."""
    mount = mount_of(machine, path)
    if mount is None:
        return
    check = f"mount of {path}"
    if "sync" in mount.options:
        yield Finding(
            check,
            f"{mount.point} is mounted with sync",
            "every write waits for the disk",
            _remount(mount, "async"),
            "warning",
        )
    if "strictatime" in mount.options:
        yield Finding(
            check,
            f"{mount.point} is mounted with strictatime",
            "every read writes too",
            _remount(mount, "noatime"),
            "info",
        )
    if mount.type in ("nfs", "nfs4"):
        read_sizes = [option.partition("=")[2] for option in mount.options if option.startswith("rsize=")]
        if read_sizes and read_sizes[0].isdecimal() and int(read_sizes[0]) < 1 << 20:
            yield Finding(
                check,
                f"NFS reads {size(int(read_sizes[0]))} at a time",
                "more round trips than needed for large rows",
                _remount(mount, "rsize=1048576"),
                "info",
            )
        if "noac" in mount.options:
            yield Finding(
                check, "NFS with noac", "every look at a file asks the server", _remount(mount, "ac"), "warning"
            )


def check_file_locking(machine: Machine, path: Path) -> Iterator[Finding]:
    """HDF5's file locks on a network file system."""
    mount = mount_of(machine, path)
    if mount is None or not mount.is_network:
        return
    value = machine.environ.get("HDF5_USE_FILE_LOCKING", "")
    if value.upper() in ("FALSE", "0", "BEST_EFFORT"):
        yield Finding(f"locks on {path}", f"HDF5_USE_FILE_LOCKING={value}")
    else:
        yield Finding(
            f"locks on {path}",
            f"HDF5_USE_FILE_LOCKING is {value or 'not set'}, and {mount.type} may have no locks",
            "opening an .h5 file fails with 'unable to lock file', errno 11, 37, 524",
            "export HDF5_USE_FILE_LOCKING=FALSE before Python starts, or open_reader(..., locking=False)",
            "info",
        )


def check_queue(machine: Machine, path: Path) -> Iterator[Finding]:
    """Scheduler and read-ahead of the disk."""
    mount = mount_of(machine, path)
    device = block_device(machine, mount) if mount else None
    if device is None:
        return
    text = f"{device.name}: scheduler {device.scheduler or '?'}, read-ahead {device.read_ahead_kib or '?'} KiB"
    if device.kind == "NVMe" and device.scheduler == "bfq":
        yield Finding(
            f"queue of {path}",
            text,
            "bfq sorts requests for rotating disks and limits a fast one",
            f"echo none | sudo tee /sys/block/{device.name}/queue/scheduler",
            "warning",
        )
    elif device.read_ahead_kib is not None and device.read_ahead_kib < 128:
        yield Finding(
            f"queue of {path}",
            text,
            "a sequential reader waits for the disk between small requests",
            f"echo 128 | sudo tee /sys/block/{device.name}/queue/read_ahead_kb",
            "info",
        )
    else:
        yield Finding(f"queue of {path}", text)


def check_free_space(machine: Machine, path: Path) -> Iterator[Finding]:
    """Free space where a path lies."""
    try:
        total, free = machine.disk_space(path)
    except OSError:
        return
    text = f"{size(free)} of {size(total)}"
    if free < LOW_FREE_BYTES or free < 0.03 * total:
        yield Finding(
            f"free space at {path}",
            text,
            "a conversion or a checkpoint ends half-way, and a full file system is slow",
            "make room, or write elsewhere",
            "warning",
        )
    else:
        yield Finding(f"free space at {path}", text)


def _remount(mount: Mount, option: str) -> str:
    return f"sudo mount -o remount,{option} {mount.point}"
