"""What the packaging tests look at: the source tree, and the two places where CMake can find the library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command; its output, or a failed test that shows it."""
    result = subprocess.run(
        [str(part) for part in command],
        env=env,
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
    )
    if result.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}: exit status {result.returncode}\n{result.stdout}")
    return result.stdout


@pytest.fixture(scope="session", params=["wheel", "install_tree"])
def cmake_dir(request: pytest.FixtureRequest) -> Path:
    """Folder of deep_moeConfig.cmake: in the installed wheel, and in a C++ install tree."""
    if request.param == "wheel":
        return Path(run(sys.executable, "-m", "deep_moe", "--cmake-dir").strip())
    prefix = os.environ.get("DEEP_MOE_INSTALL_TREE")
    if prefix is None:
        pytest.skip(
            "DEEP_MOE_INSTALL_TREE is not set; ci/packaging_tests.sh makes an install tree and sets it"
        )
    return Path(prefix) / "lib" / "cmake" / "deep_moe"


@pytest.fixture(scope="session")
def include_dir(cmake_dir: Path) -> Path:
    """The folder with the public headers that goes with `cmake_dir`."""
    return cmake_dir.parents[2] / "include"
