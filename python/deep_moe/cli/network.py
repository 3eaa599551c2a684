"""What ``deep-moe doctor`` says of the network between nodes: docs/network.md explains each line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from .. import _C, _network
from .findings import Finding

INFINIBAND = Path("/sys/class/infiniband")
DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
PEER_MEMORY = Path("/sys/module/nvidia_peermem")


def find_network(info: dict[str, Any]) -> list[Finding]:
    """Describes the plug-in, how ranks would be put on nodes, the NICs and the settings that count."""
    nics = find_nics()
    active = any(finding.mark == "ok" for finding in nics)
    findings = [find_plugin(info), *find_nodes(), find_choice(active), find_addresses(), *nics]
    if active:
        findings += find_paths()
    return [*findings, find_settings()]


def find_plugin(info: dict[str, Any]) -> Finding:
    """Loads the plug-in of exchanges between nodes."""
    if not info["cuda_compiled"]:
        text = "this build has none: it has no CUDA code (nodes on one machine work without it)"
        return Finding("missing", "network part", text, "install a CUDA variant (not needed on the CPU)")
    status = _network.status()
    if status["problem"]:
        what, _, advice = status["problem"].rpartition(": ")
        return Finding("missing", "network part", what, advice)
    text = f"loaded, with NVSHMEM {status['library']} (built against {status['built_against']})"
    return Finding("ok", "network part", text)


def find_nodes() -> list[Finding]:
    """Settings that put ranks on other nodes than their hosts'."""
    findings = []
    for name, what in (
        ("DEEP_MOE_LOCAL_RANKS", "cuts the ranks of a host into nodes of so many"),
        ("DEEP_MOE_NODE", "is the node of ranks with this environment, in place of their host"),
        ("DEEP_MOE_HOST_ID", "is their machine: ranks with another one are reached by the network alone"),
    ):
        if value := os.environ.get(name):
            advice = f"unset {name} where hosts are the nodes"
            findings.append(Finding("warning", "nodes", f"{name}={value} {what}", advice))
    return findings


def find_choice(active_nic: bool) -> Finding:
    """What GPU Buffers on several nodes would take, as the environment is."""
    asked = os.environ.get("DEEP_MOE_NETWORK", "")
    transport = os.environ.get("NVSHMEM_REMOTE_TRANSPORT", "")
    if asked == "mapped":
        return Finding(
            "ok", "between nodes", "memory that all ranks map; only on one machine (DEEP_MOE_NETWORK)"
        )
    here = "NVSHMEM, GPU to GPU" if asked == "nvshmem" else "memory that all ranks map"
    ibgda = os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "0") not in ("", "0", "false")
    if transport:
        there = f"NVSHMEM by {transport}"
    elif not active_nic:
        text = f"on one machine {here}; several machines would be refused: no RDMA device here"
        return Finding("ok", "between nodes", text)
    else:
        there = "NVSHMEM, " + (
            "GPUs ring the NICs (IBGDA)" if ibgda else "a proxy thread rings the NICs (IBRC)"
        )
    return Finding("ok", "between nodes", f"on one machine {here}; between machines {there}")


def find_addresses() -> Finding:
    """Where ranks of other machines would look for those of this one."""
    try:
        addresses = _C.own_addresses()
    except ValueError as error:
        return Finding(
            "missing", "addresses", str(error), "the name of an interface that is up (ip -br address)"
        )
    chosen = "DEEP_MOE_SOCKET_IFNAME" if os.environ.get("DEEP_MOE_SOCKET_IFNAME") else "all interfaces"
    return Finding(
        "ok", "addresses", f"{', '.join(addresses)} ({chosen}): where other machines reach ranks here"
    )


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def find_nics(folder: Path = INFINIBAND) -> list[Finding]:
    """One line a port of each RDMA device."""
    ports = sorted(folder.glob("*/ports/*")) if folder.is_dir() else []
    if not ports:
        text = "no RDMA device: ranks on other hosts cannot be reached"
        advice = "look at ibv_devices and the NIC's driver (not needed on one host)"
        return [Finding("missing", "nics", text, advice)]
    findings = []
    for port in ports:
        state, rate = _read(port / "state").partition(": ")[2], _read(port / "rate")
        name = f"{port.parent.parent.name} port {port.name}"
        text = f"{name}: {_read(port / 'link_layer') or 'unknown link'}, {rate or 'unknown rate'}, {state}"
        up = state == "ACTIVE"
        findings.append(
            Finding("ok" if up else "warning", "nics", text, "" if up else "look at ibstat and the cable")
        )
    return findings


def driver_parameters(path: Path = DRIVER_PARAMETERS) -> dict[str, str]:
    """What the NVIDIA driver was loaded with, by name."""
    lines = [line.partition(":") for line in _read(path).splitlines()]
    return {name.strip(): value.strip().strip('"') for name, _, value in lines}


def find_paths() -> list[Finding]:
    """Whether NICs can reach the GPUs' memory, and GPUs the NICs."""
    if not DRIVER_PARAMETERS.exists():
        return []
    module = PEER_MEMORY.exists()
    text = "nvidia_peermem is loaded" if module else "nvidia_peermem is not loaded; DMA-BUF has to serve"
    findings = [Finding("ok", "gpu memory", text)]
    if os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "0") in ("", "0", "false"):
        return findings
    parameters = driver_parameters()
    mem_ops = parameters.get("EnableStreamMemOPs") == "1"
    mapping = "PeerMappingOverride=1" in parameters.get("RegistryDwords", "")
    if mem_ops and mapping:
        findings.append(Finding("ok", "ibgda", "the driver lets GPUs ring the NICs"))
    else:
        text = "the driver does not let GPUs ring the NICs; NVSHMEM falls back to help of the CPU"
        advice = "the module options of docs/network.md"
        findings.append(Finding("warning", "ibgda", text, advice))
    return findings


def find_settings() -> Finding:
    """The variables that choose transport, lane and NIC."""
    here = {name: value for name, value in sorted(os.environ.items()) if name.startswith("NVSHMEM_")}
    text = " ".join(f"{name}={value}" for name, value in here.items())
    return Finding("ok", "nvshmem env", text or "none set: the defaults of deep_moe and NVSHMEM")
