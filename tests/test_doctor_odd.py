"""Whatever stands in the files of a machine, every check answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_fastio.allowance import cpu_allowance, memory_allowance
from lightning_fastio.doctor import Machine, diagnose, storage
from tests.fake_root import write_root

DISK = "sys/devices/virtual/block/sda"
CARD = "sys/bus/pci/devices/0000:01:00.0"

SENSIBLE = {
    "proc/meminfo": "MemTotal: 100 kB",
    "proc/swaps": "Filename Type Size Used Priority\n/dev/sda partition 4 2 1",
    "proc/self/limits": "Max open files 10 20 files\nMax processes 5 5 x\nMax locked memory 7 8 bytes",
    "proc/self/status": "Cpus_allowed_list:\t0-3",
    "proc/self/cgroup": "0::/a\n4:memory:/b\n1:cpu,cpuacct:/c",
    "proc/self/mountinfo": "20 1 8:1 / / rw,relatime - nfs srv:/x rw,rsize=5",
    "proc/sys/vm/swappiness": "60",
    "proc/sys/vm/dirty_ratio": "20",
    "proc/sys/vm/overcommit_memory": "2",
    "proc/driver/nvidia/version": "NVRM: Kernel Module  550.10.01  x",
    "sys/fs/cgroup/a/memory.max": "100",
    "sys/fs/cgroup/a/memory.current": "99",
    "sys/fs/cgroup/a/memory.stat": "inactive_file 5",
    "sys/fs/cgroup/a/cpu.max": "100 100",
    "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "10",
    "sys/fs/cgroup/cpu/c/cpu.cfs_period_us": "10",
    "sys/fs/cgroup/a/pids.max": "10",
    "sys/kernel/mm/transparent_hugepage/enabled": "[always]",
    "sys/kernel/mm/transparent_hugepage/defrag": "[always]",
    "sys/devices/system/node/node0/cpulist": "0-1",
    "sys/devices/system/node/node1/cpulist": "2-3",
    "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
    f"{CARD}/vendor": "0x10de",
    f"{CARD}/class": "0x030000",
    f"{CARD}/numa_node": "1",
    f"{CARD}/current_link_width": "8",
    f"{CARD}/max_link_width": "16",
    f"{CARD}/current_link_speed": "8.0 GT/s",
    "sys/class/net/eth0/operstate": "up",
    "sys/class/net/eth0/device/x": "",
    "sys/class/net/eth0/speed": "100000",
    "sys/class/net/eth0/mtu": "1500",
    f"{DISK}/queue/rotational": "1",
    f"{DISK}/queue/scheduler": "[bfq]",
    f"{DISK}/queue/read_ahead_kb": "4",
}

ODD = st.one_of(
    st.sampled_from(["", "\n", "0", "-1", "max", "[", "]", ":", "0 0", "0-", " - ", "1e9", "\u0661", "²", "9" * 30]),
    st.text(st.characters(codec="utf-8"), max_size=40),
)


@pytest.mark.parametrize("name", sorted(SENSIBLE))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=ODD, keeps_start=st.booleans())
def test_one_odd_file(tmp_path: Path, name: str, text: str, keeps_start: bool) -> None:
    odd = SENSIBLE[name][: len(SENSIBLE[name]) // 2] + text if keeps_start else text
    root = write_root(tmp_path, {**SENSIBLE, name: odd})
    block = root / "sys/dev/block"
    if not block.exists():
        block.mkdir(parents=True)
        (block / "8:1").symlink_to(root / DISK)
    machine = Machine(root, environ={}, disk_space=lambda path: (0, 0))
    assert [each for each in diagnose(machine=machine) if each.check == "doctor"] == []
    path = Path("/data")
    for check in (storage.check_device, storage.check_mount_options, storage.check_queue, storage.check_file_locking):
        assert all(each.severity != "error" for each in check(machine, path))
    assert cpu_allowance(root, {}) > 0
    assert (memory_allowance(root) or 0) >= 0
