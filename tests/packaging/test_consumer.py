"""C++ users: an installed library is found, links without nvcc and runs; each public header stands alone."""

import os
import shutil
from importlib import metadata
from pathlib import Path

import pytest

from .conftest import ROOT, run

HEADERS = sorted(path.name for path in (ROOT / "cpp" / "include" / "deep_moe").glob("*.hpp"))


def cxx() -> str:
    return os.environ.get("CXX", "c++")


def without_nvcc() -> dict[str, str]:
    """This environment with no CUDA compiler to be found."""
    folders = [d for d in os.environ["PATH"].split(os.pathsep) if not (Path(d) / "nvcc").exists()]
    hidden = {"CUDACXX", "CUDA_HOME", "CUDA_PATH", "CMAKE_GENERATOR"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    return env | {"PATH": os.pathsep.join(folders)}


def test_plain_cpp_project_builds_and_runs_without_nvcc(cmake_dir: Path, tmp_path: Path) -> None:
    env = without_nvcc()
    assert shutil.which("nvcc", path=env["PATH"]) is None
    tools = {name: shutil.which(name) for name in ("cmake", cxx(), "make")}
    missing = [name for name, path in tools.items() if path is None]
    assert not missing, f"not on PATH: {missing}"
    version = metadata.version("deep-moe")
    run(
        tools["cmake"] or "",
        "-S",
        ROOT / "tests" / "packaging" / "consumer",
        "-B",
        tmp_path,
        f"-Ddeep_moe_DIR={cmake_dir}",
        f"-DEXPECTED_VERSION={version}",
        f"-DCMAKE_MAKE_PROGRAM={tools['make']}",
        f"-DCMAKE_CXX_COMPILER={tools[cxx()]}",
        env=env,
    )
    run(tools["cmake"] or "", "--build", tmp_path, env=env)
    output = run(tmp_path / "consumer", env=env)
    assert "rank 0: 2 rows received" in output
    assert "rank 1: 4 rows received" in output


def test_installed_headers_are_the_public_ones(include_dir: Path) -> None:
    assert HEADERS
    installed = sorted(
        str(path.relative_to(include_dir)) for path in include_dir.rglob("*") if path.is_file()
    )
    assert installed == [f"deep_moe/{name}" for name in HEADERS]


@pytest.mark.parametrize("header", HEADERS)
def test_header_compiles_alone(include_dir: Path, header: str, tmp_path: Path) -> None:
    source = tmp_path / "header.cc"
    line = f"#include <deep_moe/{header}>\n"
    source.write_text(line + line + "int main() {}\n")
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
    run(cxx(), *flags, f"-I{include_dir}", source)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_headers_compile_in_cuda_code(include_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "headers.cu"
    source.write_text("".join(f"#include <deep_moe/{header}>\n" for header in HEADERS))
    run(
        "nvcc",
        "-std=c++20",
        "-Werror",
        "all-warnings",
        f"-I{include_dir}",
        "-c",
        source,
        "-o",
        tmp_path / "headers.o",
    )
