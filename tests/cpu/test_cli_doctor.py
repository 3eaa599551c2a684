"""The doctor: its probes, its lines, and the whole command."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deep_moe.cli import doctor, network, probes
from deep_moe.cli.doctor import Finding, find_all, version_numbers
from deep_moe.cli.network import driver_parameters as read_parameters

INFO: dict[str, Any] = {
    "version": "0.1.0",
    "variant": "cpu",
    "cuda_compiled": False,
    "cuda_archs": [],
    "simd": "scalar",
    "compiler": "a compiler",
    "abi3": False,
}


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_shared_memory_is_really_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert probes.try_shared_memory() == ""
    assert len(os.listdir("/proc/self/fd")) == before

    def refuse(*_: object) -> int:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "PermissionError" in probes.try_shared_memory()
    line = by_name(doctor.find_shared_memory())["shared memory"]
    assert (line.mark, "Linux 3.17" in line.advice) == ("missing", True)


def test_huge_page_setting_is_the_word_in_brackets(tmp_path: Path) -> None:
    (tmp_path / "setting").write_text("always within_size [advise] never deny force\n")
    assert probes.huge_page_setting(tmp_path / "setting") == "advise"
    assert probes.huge_page_setting(tmp_path / "none") == ""


def test_versions_are_read_as_numbers() -> None:
    assert version_numbers("2.13.0+cpu") == (2, 13, 0)
    assert version_numbers("3.4.5rc1") == (3, 4, 5)
    assert version_numbers("dev") == ()


@pytest.mark.parametrize(
    ("version", "mark"), [("3.4.5", "ok"), ("3.4.9", "ok"), ("3.3.9", "warning"), ("3.5.1", "warning")]
)
def test_nvshmem_outside_its_range_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, version: str, mark: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    line = doctor.find_nvshmem(INFO)[0]
    assert line.mark == mark
    assert version in line.text


def test_cuda_lines_for_a_build_and_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = probes.CudaProbe(version=13000, gpus=["GPU A", "GPU B"], blocked=[(0, 1)])
    monkeypatch.setattr(probes, "probe_cuda", lambda: probe)
    lines = by_name(doctor.find_cuda(INFO | {"cuda_compiled": True, "cuda_archs": ["80", "90a"]}))
    assert lines["cuda build"].text == "compiled in, for 80, 90a"
    assert lines["cuda transport"].mark == "missing"
    assert lines["cuda driver"].text == "for CUDA 13.0"
    assert lines["gpus"].text == "0: GPU A, 1: GPU B"
    assert (lines["peer access"].mark, "0-1" in lines["peer access"].text) == ("warning", True)
    assert "cuda transport" not in by_name(
        doctor.find_cuda(INFO | {"cuda_compiled": True, "cuda_transport": True})
    )


def test_a_missing_driver_is_one_line_with_advice() -> None:
    assert "is not on this machine" in probes.probe_cuda("libno_such_driver.so.1").problem


DRIVER = """
static int status = STATUS;
int cuInit(unsigned flags) { return flags ? 1 : status; }
int cuDriverGetVersion(int* version) { *version = 12040; return 0; }
int cuDeviceGetCount(int* count) { *count = 3; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = 70 + ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int device) {
  name[0] = 'G';
  name[1] = device - 22;
  name[2] = 0;
  return size < 3;
}
int cuDeviceCanAccessPeer(int* can, int device, int peer) { *can = device + peer != 70 + 72; return 0; }
"""


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0, probes.CudaProbe(version=12040, gpus=["G0", "G1", "G2"], blocked=[(0, 2), (2, 0)])),
        (100, probes.CudaProbe(version=12040)),
        (803, probes.CudaProbe(problem="cuInit failed with error 803")),
    ],
)
def test_driver_is_asked_for_gpus_and_peer_access(
    tmp_path: Path, status: int, expected: probes.CudaProbe
) -> None:
    library = tmp_path / "libdriver.so"
    (tmp_path / "driver.c").write_text(DRIVER.replace("STATUS", str(status)))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "driver.c"], check=True)
    assert probes.probe_cuda(str(library)) == expected


def test_limits_that_are_low_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "limit", lambda name: 256)
    lines = by_name(doctor.find_limits())
    assert (lines["open files"].mark, lines["locked memory"].mark) == ("warning", "warning")
    assert "ulimit -n" in lines["open files"].advice
    monkeypatch.setattr(probes, "limit", lambda name: -1)
    assert [finding.line() for finding in doctor.find_limits()] == [
        "ok       open files     no limit",
        "ok       locked memory  no limit",
    ]


# ---- the network between nodes ----
def rdma_port(folder: Path, device: str, state: str, rate: str = "400 Gb/sec (4X NDR)") -> None:
    port = folder / device / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("state", state), ("rate", rate), ("link_layer", "InfiniBand")):
        (port / name).write_text(text + "\n")


def test_every_port_of_a_nic_is_a_line(tmp_path: Path) -> None:
    assert network.find_nics(tmp_path / "none")[0].mark == "missing"
    rdma_port(tmp_path, "mlx5_0", "4: ACTIVE")
    rdma_port(tmp_path, "mlx5_1", "1: DOWN")
    up, down = network.find_nics(tmp_path)
    assert (up.mark, up.text) == ("ok", "mlx5_0 port 1: InfiniBand, 400 Gb/sec (4X NDR), ACTIVE")
    assert (down.mark, "DOWN" in down.text, "ibstat" in down.advice) == ("warning", True, True)


@pytest.mark.parametrize(
    ("parameters", "mark"),
    [
        ('EnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n', "ok"),
        ('EnableStreamMemOPs: 0\nRegistryDwords: "PeerMappingOverride=1;"\n', "warning"),
        ('EnableStreamMemOPs: 1\nRegistryDwords: ""\n', "warning"),
    ],
)
def test_driver_options_of_ibgda_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parameters: str, mark: str
) -> None:
    (tmp_path / "params").write_text(parameters)
    monkeypatch.setattr(network, "DRIVER_PARAMETERS", tmp_path / "params")
    monkeypatch.setattr(network, "driver_parameters", lambda: read_parameters(tmp_path / "params"))
    monkeypatch.setattr(network, "PEER_MEMORY", tmp_path)
    monkeypatch.delenv("NVSHMEM_IB_ENABLE_IBGDA", raising=False)
    assert [finding.name for finding in network.find_paths()] == ["gpu memory"]
    monkeypatch.setenv("NVSHMEM_IB_ENABLE_IBGDA", "1")
    line = by_name(network.find_paths())["ibgda"]
    assert line.mark == mark and bool(line.advice) == (mark != "ok")


def test_settings_of_nodes_and_of_nvshmem_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.find_nodes() == []
    monkeypatch.setenv("DEEP_MOE_LOCAL_RANKS", "4")
    monkeypatch.setenv("NVSHMEM_IB_SL", "3")
    lines = by_name(network.find_network(INFO))
    assert (lines["nodes"].mark, "DEEP_MOE_LOCAL_RANKS=4" in lines["nodes"].text) == ("warning", True)
    assert "NVSHMEM_IB_SL=3" in lines["nvshmem env"].text
    assert lines["network part"].mark == "missing" and "CUDA variant" in lines["network part"].advice


@pytest.mark.parametrize(
    ("environment", "nic", "says"),
    [
        ({}, False, "refused: no RDMA device"),
        ({}, True, "between machines NVSHMEM, a proxy thread"),
        ({"NVSHMEM_IB_ENABLE_IBGDA": "1"}, True, "IBGDA"),
        ({"NVSHMEM_REMOTE_TRANSPORT": "libfabric"}, False, "NVSHMEM by libfabric"),
        ({"DEEP_MOE_NETWORK": "nvshmem"}, True, "on one machine NVSHMEM"),
        ({"DEEP_MOE_NETWORK": "mapped"}, True, "only on one machine"),
    ],
)
def test_what_nodes_would_exchange_over_is_shown(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], nic: bool, says: str
) -> None:
    for name in ("DEEP_MOE_NETWORK", "NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_IB_ENABLE_IBGDA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert says in network.find_choice(nic).text


def test_addresses_of_this_machine_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.find_addresses().mark == "ok" and "all interfaces" in network.find_addresses().text
    monkeypatch.setenv("DEEP_MOE_SOCKET_IFNAME", "lo")
    assert network.find_addresses().text.startswith("127.0.0.1 (DEEP_MOE_SOCKET_IFNAME)")
    monkeypatch.setenv("DEEP_MOE_SOCKET_IFNAME", "none0")
    wrong = network.find_addresses()
    assert wrong.mark == "missing" and "none0" in wrong.text and " lo" in wrong.text


def test_a_machine_that_is_another_by_name_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_MOE_HOST_ID", "b")
    (line,) = network.find_nodes()
    assert (line.mark, "DEEP_MOE_HOST_ID=b" in line.text) == ("warning", True)


STATUS = "from deep_moe import _network; print(_network.status()['problem'])"


@pytest.mark.parametrize("file", ["none", "text", "other library"])
def test_a_network_part_that_is_not_there_names_the_package(tmp_path: Path, file: str) -> None:
    """Importing and asking work; the one line says what to install."""
    plugin = tmp_path / "libdeep_moe_nvshmem.so"
    if file == "text":
        plugin.write_text("no library")
    if file == "other library":
        subprocess.run(["cc", "-shared", "-o", plugin, "-x", "c", os.devnull], check=True)
    environment = os.environ | {"DEEP_MOE_NVSHMEM_PLUGIN": str(plugin)}
    run = [sys.executable, "-c", STATUS]
    said = subprocess.run(run, capture_output=True, text=True, check=True, env=environment).stdout
    assert len(said.splitlines()) == 1 and str(plugin) in said
    assert (
        "is not the network part of deep_moe"
        if file == "other library"
        else "nvidia-nvshmem-cu13>=3.4.5,<3.5"
    ) in said


def test_an_old_module_and_a_broken_probe_are_lines_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(probes, "try_cpu_backend", broken)
    lines = by_name(find_all(INFO | {"version": "0.0.0"}))
    assert lines["versions"].mark == "warning"
    assert lines["cpu backend"].mark == "missing"
    assert "RuntimeError: no such thing" in lines["cpu backend"].text


def test_doctor_says_that_the_cpu_backend_works() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deep_moe", "doctor"], capture_output=True, text=True, timeout=120, check=False
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(line.split()[0] in ("ok", "warning", "missing") for line in lines)
    marks = {line[9:23].strip(): line.split()[0] for line in lines}
    assert marks["cpu backend"] == "ok"
    assert marks["shared memory"] == "ok"
    assert {"package", "torch", "processor", "simd", "cuda build", "nvshmem", "matplotlib", "mpi4py"} <= set(
        marks
    )
    assert all(" -> " in line for line in lines if line.startswith("missing"))


def test_a_backend_that_fails_makes_the_command_fail(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(doctor, "build_info", lambda: INFO)
    monkeypatch.setattr(probes, "try_cpu_backend", lambda: "rank 0: it broke")
    assert not doctor.run_doctor()
    assert "missing  cpu backend    rank 0: it broke" in capsys.readouterr().out
