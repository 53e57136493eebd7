"""Distributed training: NCCL's environment, network interfaces, how processes start."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from lightning_fastio.doctor.machine import Finding, Machine

NOT_FORK_SAFE = ("grpc", "cv2", "jax", "tensorflow", "ray")
"""Libraries with threads of their own, which a forked process inherits as locks that nobody opens."""

_SWITCHES = {
    "NCCL_P2P_DISABLE": "GPUs of one machine talk through host memory instead of NVLink or PCIe",
    "NCCL_SHM_DISABLE": "ranks of one machine talk through the network instead of shared memory",
}


def check_nccl_environment(machine: Machine) -> Iterator[Finding]:
    """Variables that slow NCCL down or name what does not exist."""
    environ = machine.environ
    for name, consequence in _SWITCHES.items():
        if environ.get(name, "0") not in ("", "0"):
            yield Finding("NCCL", f"{name}={environ[name]}", consequence, f"unset {name}", "warning")
    if environ.get("NCCL_IB_DISABLE", "0") not in ("", "0") and machine.folder("sys/class/infiniband"):
        yield Finding(
            "NCCL",
            f"NCCL_IB_DISABLE={environ['NCCL_IB_DISABLE']}, but there is InfiniBand",
            "gradients go over sockets, several times slower",
            "unset NCCL_IB_DISABLE",
            "warning",
        )
    if environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE"):
        yield Finding(
            "NCCL", f"NCCL_DEBUG={environ['NCCL_DEBUG']}", "every collective is logged", "NCCL_DEBUG=WARN", "info"
        )
    yield from _check_interface_choice(machine)


def _check_interface_choice(machine: Machine) -> Iterator[Finding]:
    interfaces = machine.folder("sys/class/net")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        choice = machine.environ.get(name, "")
        if not choice or choice.startswith("^") or not interfaces:
            continue
        exact = choice.startswith("=") or name == "GLOO_SOCKET_IFNAME"
        for wanted in choice.lstrip("=").split(","):
            found = [each for each in interfaces if each == wanted or (not exact and each.startswith(wanted))]
            if not found:
                yield Finding(
                    "NCCL",
                    f"{name}={choice}, but the interfaces are {', '.join(interfaces)}",
                    "the ranks do not find one another: 'no socket interface found', or a wait without end",
                    f"unset {name}, or name one of them",
                    "error",
                )
            elif all(each.startswith(("lo", "docker")) for each in found):
                yield Finding(
                    "NCCL",
                    f"{name}={choice}",
                    "this interface does not leave the machine: ranks on other machines are not reached",
                    f"unset {name}, or name one of {', '.join(interfaces)}",
                    "warning",
                )


def check_interfaces(machine: Machine) -> Iterator[Finding]:
    """Speed and packet size of the network interfaces that are up."""
    for name in machine.folder("sys/class/net"):
        folder = f"sys/class/net/{name}"
        # A folder "device" tells hardware from bridges, tunnels and the like.
        if machine.text(f"{folder}/operstate") != "up" or not machine.folder(f"{folder}/device"):
            continue
        speed, mtu = machine.number(f"{folder}/speed"), machine.number(f"{folder}/mtu")
        text = f"{name}: {f'{speed / 1000:g} Gb/s' if speed and speed > 0 else 'speed unknown'}, MTU {mtu or '?'}"
        if speed and speed >= 25_000 and mtu and mtu < 9000:
            yield Finding(
                "network",
                text,
                "small packets keep a fast interface from its speed, in network storage and in gradients over sockets",
                f"sudo ip link set {name} mtu 9000, if every switch and host on the way has it too",
                "info",
            )
        else:
            yield Finding("network", text)


def check_start_method(machine: Machine, *, start_method: str | None, modules: Collection[str]) -> Iterator[Finding]:
    """Whether worker processes are forked from a process that must not be.

    Args:
        machine: The machine.
        start_method: The start method of multiprocessing, or None where the platform chooses; it forks on Linux up to
            Python 3.13.
        modules: Names of loaded modules.
    """
    loaded = [name for name in NOT_FORK_SAFE if name in modules]
    if start_method not in (None, "fork") or not loaded:
        return
    yield Finding(
        "start method",
        f"worker processes are forked, with {', '.join(loaded)} loaded",
        "a forked worker inherits the locks of threads that it does not have, and may wait for ever",
        "DataLoader(multiprocessing_context='forkserver'); this package's loaders do so by themselves",
        "info",
    )
