"""docs/cpp.md: its programs are built by its CMakeLists.txt and run; what is for CUDA compiles."""

import os
import re
import shutil
from pathlib import Path

import pytest

from .conftest import ROOT, run, tree
from .consumers import cxx
from .test_docs import FENCE

PAGE = ROOT / "docs" / "cpp.md"
WRITTEN = [(kind.split(), code) for kind, code in FENCE.findall(PAGE.read_text(encoding="utf-8"))]
PROGRAMS = [code for kind, code in WRITTEN if kind == ["cpp", "run"]]
FOR_CUDA = [code for kind, code in WRITTEN if kind == ["cpp", "cuda"]]


def test_every_block_of_code_is_tested() -> None:
    kinds = {" ".join(kind) for kind, _ in WRITTEN}
    assert kinds == {"cmake build", "cpp run", "cpp cuda", "bash"}
    assert len(PROGRAMS) == 3


@pytest.mark.parametrize("code", PROGRAMS, ids=["layer", "errors", "low latency"])
def test_program_is_built_as_the_page_says_and_runs(code: str, tmp_path: Path) -> None:
    (cmake,) = [code for kind, code in WRITTEN if kind == ["cmake", "build"]]
    (tmp_path / "CMakeLists.txt").write_text(cmake)
    (tmp_path / "my_moe.cc").write_text(code)
    build = tmp_path / "build"
    flags = "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror"
    run("cmake", "-S", tmp_path, "-B", build, f"-Ddeep_moe_DIR={tree('wheel')}", flags)
    run("cmake", "--build", build)
    printed = run(build / "my_moe", timeout=60)
    assert sorted(re.findall(r"^rank (\d)(?: of 2)?: all right$", printed, re.MULTILINE)) == ["0", "1"]


def cuda_headers() -> Path | None:
    """The folder of cuda_runtime_api.h: the nvcc on PATH has one, or CUDA_HOME."""
    nvcc = shutil.which("nvcc")
    homes = [Path(nvcc).resolve().parents[1]] if nvcc else []
    homes += [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    found = [file.parent for home in homes for file in home.rglob("cuda_runtime_api.h")]
    return found[0] if found else None


@pytest.mark.skipif(cuda_headers() is None, reason="no CUDA toolkit: neither nvcc on PATH nor CUDA_HOME")
@pytest.mark.parametrize("code", FOR_CUDA)
def test_block_for_cuda_compiles(code: str, tmp_path: Path) -> None:
    source = tmp_path / "block.cc"
    source.write_text(code)
    includes = [f"-I{tree('wheel').parents[2] / 'include'}", "-isystem", str(cuda_headers())]
    run(cxx(), "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", *includes, source)
