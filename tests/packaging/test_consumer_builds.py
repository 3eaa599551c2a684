"""Consumers that take long to build: CUDA with own kernels, and deep_moe as a part of a project."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from .conftest import ROOT
from .consumers import build_and_run, version, without_nvcc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ARCHITECTURE = "CMAKE_CUDA_ARCHITECTURES=90"


@pytest.fixture
def cuda_dir(any_cmake_dir: Path) -> Path:
    """deep_moe with CUDA kernels; needs nvcc here."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    if "set(deep_moe_CUDA ON)" not in (any_cmake_dir / "deep_moeConfig.cmake").read_text():
        pytest.skip(f"no CUDA kernels in the library at {any_cmake_dir}")
    return any_cmake_dir


def nvshmem_dir() -> str | None:
    """Folder with NVSHMEM's include/ and lib/: NVSHMEM_DIR, or the Python package that carries it."""
    if "NVSHMEM_DIR" in os.environ:
        return os.environ["NVSHMEM_DIR"]
    spec = importlib.util.find_spec("nvidia.nvshmem") if importlib.util.find_spec("nvidia") else None
    return next(iter(spec.submodule_search_locations or []), None) if spec else None


def test_cuda_project_with_its_own_kernel(cuda_dir: Path, tmp_path: Path) -> None:
    output = build_and_run("consumer_cuda", tmp_path, f"deep_moe_DIR={cuda_dir}", ARCHITECTURE)
    assert "own kernel: 42" in output or "no GPU: own kernel linked, not run" in output


def test_relocatable_cuda_project(cuda_dir: Path, tmp_path: Path) -> None:
    output = build_and_run("consumer_rdc", tmp_path, f"deep_moe_DIR={cuda_dir}", ARCHITECTURE)
    assert "own kernel: 42" in output or "no GPU: own kernel linked, not run" in output


def test_relocatable_cuda_project_with_its_own_nvshmem_kernel(cuda_dir: Path, tmp_path: Path) -> None:
    nvshmem = nvshmem_dir()
    if nvshmem is None:
        pytest.skip("no NVSHMEM: neither NVSHMEM_DIR nor the package nvidia-nvshmem-cu12 or -cu13")
    defines = (f"deep_moe_DIR={cuda_dir}", ARCHITECTURE, f"NVSHMEM_DIR={nvshmem}")
    assert "own kernels with NVSHMEM" in build_and_run("consumer_rdc", tmp_path, *defines)


def test_cpp_project_with_the_network(any_cmake_dir: Path, tmp_path: Path) -> None:
    """deep_moe::internode: the plug-in is part of the program, without nvcc."""
    nvshmem = nvshmem_dir()
    found = [folder / "libdeep_moe_nvshmem.so" for folder in (any_cmake_dir, *any_cmake_dir.parents[:3])]
    if nvshmem is None or not any(path.exists() for path in found):
        pytest.skip(f"no NVSHMEM, or no network plug-in in the build at {any_cmake_dir}")
    defines = (f"deep_moe_DIR={any_cmake_dir}", f"EXPECTED_VERSION={version()}", "NETWORK=ON")
    output = build_and_run(
        "consumer",
        tmp_path,
        *defines,
        env=without_nvcc(),
        run_env={"LD_LIBRARY_PATH": f"{nvshmem}/lib"},
    )
    assert "the network between nodes is here" in output


def test_project_that_builds_deep_moe_itself(tmp_path: Path) -> None:
    """By FetchContent, which is add_subdirectory inside; not optimised, to be quick."""
    env = without_nvcc() | {"CMAKE_BUILD_PARALLEL_LEVEL": os.environ.get("JOBS", "1")}
    defines = (f"DEEP_MOE_SOURCE={ROOT}", "DEEP_MOE_CUDA=OFF", "CMAKE_CXX_FLAGS=-O0")
    build_and_run("consumer_subdirectory", tmp_path, *defines, env=env)
