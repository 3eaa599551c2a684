"""For which GPUs a build compiles: options and environment variables, read by CudaArchitectures.cmake."""

import os
import subprocess
from pathlib import Path

import pytest

from .conftest import ROOT

SCRIPT = """
set(CMAKE_CUDA_COMPILER_VERSION {version})
include("{root}/cmake/CudaArchitectures.cmake")
message("${{DEEP_MOE_CUDA_ARCHITECTURES}}|${{DEEP_MOE_SM90_ARCHITECTURES}}|${{DEEP_MOE_CUDA_DEFINITIONS}}")
"""
VARIABLES = (
    "CUDAARCHS",
    "DEEP_MOE_CUDA_ARCHITECTURES",
    "CMAKE_CUDA_ARCHITECTURES",
    "TORCH_CUDA_ARCH_LIST",
    "DISABLE_SM90_FEATURES",
    "DISABLE_AGGRESSIVE_PTX_INSTRS",
)


def configure(folder: Path, *defines: str, version: str = "13.0", **variables: str) -> tuple[int, str]:
    """Exit status and last line of CMake with these definitions and environment variables."""
    script = folder / "script.cmake"
    script.write_text(SCRIPT.format(version=version, root=ROOT))
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    command = ["cmake", *(f"-D{one}" for one in defines), "-P", str(script)]
    result = subprocess.run(command, env=env, text=True, capture_output=True)
    return result.returncode, " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("version", "expected"),
    [("13.0", "80-real;90a-real;100a-real;90-virtual"), ("12.4", "80-real;90a-real;90-virtual")],
)
def test_default_is_what_the_compiler_knows(tmp_path: Path, version: str, expected: str) -> None:
    status, text = configure(tmp_path, version=version)
    assert (status, text.split("|")[0]) == (0, expected)
    assert text.split("|")[1:] == [expected.replace("80-real;", ""), ""]


def test_who_is_asked_first(tmp_path: Path) -> None:
    env = {
        "TORCH_CUDA_ARCH_LIST": "8.0",
        "CMAKE_CUDA_ARCHITECTURES": "86",
        "DEEP_MOE_CUDA_ARCHITECTURES": "89",
    }
    defines = ["CMAKE_CUDA_ARCHITECTURES=90", "DEEP_MOE_CUDA_ARCHITECTURES=100a"]
    seen = []
    while env:
        seen.append(configure(tmp_path, **env)[1].split("|")[0])
        env.popitem()
    assert seen == ["89", "86", "80-real"]
    assert configure(tmp_path, defines[0], DEEP_MOE_CUDA_ARCHITECTURES="89")[1].split("|")[0] == "90"
    assert configure(tmp_path, *defines)[1].split("|")[0] == "100a"


@pytest.mark.parametrize(
    ("torch_list", "expected"),
    [
        ("8.0;9.0a", "80-real;90a-real"),
        ("8.0 9.0 10.0a+PTX", "80-real;90-real;100a-real;100a-virtual"),
        ("9.0,9.0+PTX", "90-real;90-virtual"),
    ],
)
def test_torch_list(tmp_path: Path, torch_list: str, expected: str) -> None:
    status, text = configure(tmp_path, TORCH_CUDA_ARCH_LIST=torch_list)
    assert (status, text.split("|")[0]) == (0, expected)


@pytest.mark.parametrize(
    ("disabled", "sm90", "definition"),
    [
        ("0", "90a-real;100a-real;90-virtual", ""),
        ("1", "", "DEEP_MOE_DISABLE_SM90_FEATURES=1"),
        ("100", "90a-real;90-virtual", "DEEP_MOE_DISABLE_SM90_FEATURES=1000"),
        ("90a 100a", "", "DEEP_MOE_DISABLE_SM90_FEATURES=9001000"),
    ],
)
def test_sm90_features_off(tmp_path: Path, disabled: str, sm90: str, definition: str) -> None:
    status, text = configure(tmp_path, DISABLE_SM90_FEATURES=disabled)
    assert (status, text.split("|")[1:]) == (0, [sm90, definition])


def test_cache_hints_off(tmp_path: Path) -> None:
    _, text = configure(tmp_path, DISABLE_AGGRESSIVE_PTX_INSTRS="1")
    assert text.split("|")[2] == "DEEP_MOE_DISABLE_AGGRESSIVE_PTX_INSTRS"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TORCH_CUDA_ARCH_LIST", "Hopper"),
        ("TORCH_CUDA_ARCH_LIST", "7.0"),
        ("DEEP_MOE_CUDA_ARCHITECTURES", "sm_90"),
        ("DISABLE_SM90_FEATURES", "yes"),
        ("DISABLE_AGGRESSIVE_PTX_INSTRS", "yes"),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(tmp_path: Path, name: str, value: str) -> None:
    status, text = configure(tmp_path, **{name: value})
    assert status != 0
    assert "allowed" in text and (value in text or "'70-real'" in text)
