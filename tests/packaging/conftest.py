"""What the packaging tests look at: the source tree, and the two places where CMake can find the library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(
    *command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, timeout: float = 240
) -> str:
    """Run a command; its output, or a failed test that shows it."""
    result = subprocess.run(
        [str(part) for part in command],
        env=env,
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
    )
    if result.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}: exit status {result.returncode}\n{result.stdout}")
    return result.stdout


def tree(kind: str) -> Path:
    """Folder of deep_moeConfig.cmake: in the installed wheel, in a C++ install tree, in a build tree."""
    if kind == "wheel":
        return Path(run(sys.executable, "-m", "deep_moe", "--cmake-dir").strip())
    variable = f"DEEP_MOE_{kind.upper()}"
    folder = os.environ.get(variable)
    if folder is None:
        pytest.skip(f"{variable} is not set; ci/packaging_tests.sh makes such a tree and sets it")
    return Path(folder) / "lib" / "cmake" / "deep_moe" if kind == "install_tree" else Path(folder)


@pytest.fixture(scope="session", params=["wheel", "install_tree"])
def cmake_dir(request: pytest.FixtureRequest) -> Path:
    return tree(request.param)


@pytest.fixture(scope="session", params=["wheel", "install_tree", "build_tree"])
def any_cmake_dir(request: pytest.FixtureRequest) -> Path:
    return tree(request.param)


@pytest.fixture(scope="session")
def include_dir(cmake_dir: Path) -> Path:
    """The folder with the public headers that goes with `cmake_dir`."""
    return cmake_dir.parents[2] / "include"
