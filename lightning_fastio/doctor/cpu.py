"""CPUs: how many this process really has, against how many its libraries assume."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_fastio.allowance import cpu_allowance, parse_cpu_list
from lightning_fastio.doctor.gpu import nvidia_devices
from lightning_fastio.doctor.machine import Finding, Load, Machine
from lightning_fastio.quantities import counted


def check_threads(machine: Machine, *, torch_threads: int) -> Iterator[Finding]:
    """The allowance against what torch and OpenMP would start.

    Args:
        machine: The machine.
        torch_threads: Threads that torch uses inside one operation in this process.
    """
    allowance = cpu_allowance(machine.root, machine.environ)
    openmp = machine.environ.get("OMP_NUM_THREADS", "")
    text = f"{counted(allowance, 'CPU')} allowed; torch uses {counted(torch_threads, 'thread')}"
    text += f", OMP_NUM_THREADS is {openmp}" if openmp else ", OMP_NUM_THREADS is not set"
    if torch_threads > max(1, allowance):
        yield Finding(
            "threads",
            text,
            "threads beyond the allowance are paused in the middle of a batch, and the others wait for them",
            f"export OMP_NUM_THREADS={max(1, int(allowance))} before Python starts",
            "warning",
        )
    else:
        yield Finding("threads", text)


def check_workers(machine: Machine, load: Load) -> Iterator[Finding]:
    """The worker count against the allowance."""
    allowance = cpu_allowance(machine.root, machine.environ)
    text = f"num_workers={load.num_workers} on {counted(allowance, 'CPU')}"
    if load.num_workers > allowance:
        yield Finding(
            "workers",
            text,
            "more workers than CPUs read no faster and disturb the training thread",
            f"num_workers={max(1, int(allowance))}, or num_workers='auto'",
            "warning",
        )
    else:
        yield Finding("workers", text)


def check_numa(machine: Machine) -> Iterator[Finding]:
    """Whether the process runs on CPUs near its GPU."""
    nodes = {
        int(name.removeprefix("node")): parse_cpu_list(machine.text(f"sys/devices/system/node/{name}/cpulist"))
        for name in machine.folder("sys/devices/system/node")
        if name.removeprefix("node").isdecimal()
    }
    if len(nodes) < 2:
        return
    status = machine.text("proc/self/status").splitlines()
    affinity = next((line.split(":", 1)[1] for line in status if line.startswith("Cpus_allowed_list:")), "")
    allowed = parse_cpu_list(affinity)
    for address in nvidia_devices(machine):
        node = machine.number(f"sys/bus/pci/devices/{address}/numa_node")
        if node is None or node not in nodes:
            continue
        near = len(allowed & nodes[node])
        text = f"GPU {address} is on node {node}; {near} of {len(allowed)} allowed CPUs are there"
        if allowed and not near:
            yield Finding(
                "NUMA",
                text,
                "each batch crosses the link between the sockets twice: into host memory and to the GPU",
                f"numactl --cpunodebind={node} --preferred={node} python ...",
                "warning",
            )
        else:
            yield Finding("NUMA", text)


def check_governor(machine: Machine) -> Iterator[Finding]:
    """How the CPUs choose their frequency."""
    cpus = [name for name in machine.folder("sys/devices/system/cpu") if name.removeprefix("cpu").isdecimal()]
    governors = {machine.text(f"sys/devices/system/cpu/{name}/cpufreq/scaling_governor") for name in cpus} - {""}
    if not governors:
        return
    driver = machine.text(f"sys/devices/system/cpu/{cpus[0]}/cpufreq/scaling_driver")
    text = f"{', '.join(sorted(governors))}" + (f" ({driver})" if driver else "")
    # With these drivers the hardware chooses, and "powersave" is merely the name of the ordinary policy.
    adapts_itself = driver.startswith(("intel_pstate", "amd-pstate"))
    if "powersave" in governors and not adapts_itself:
        yield Finding(
            "frequency",
            text,
            "the CPUs stay at their lowest frequency: decoding and gathering take two to three times as long",
            "sudo cpupower frequency-set -g performance",
            "warning",
        )
    else:
        yield Finding("frequency", text)
