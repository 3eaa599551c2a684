"""C++ users: the library is found, links without nvcc and runs; each public header stands alone."""

import re
import shutil
from pathlib import Path

import pytest

from .conftest import ROOT, run
from .consumers import FOLDER, build_and_run, cxx, version, without_nvcc

WRITTEN_HEADERS = [path.name for path in (ROOT / "cpp" / "include" / "deep_moe").glob("*.hpp")]
HEADERS = sorted([*WRITTEN_HEADERS, "version.hpp"])


def test_plain_cpp_project_builds_and_runs_without_nvcc(any_cmake_dir: Path, tmp_path: Path) -> None:
    env = without_nvcc()
    assert shutil.which("nvcc", path=env["PATH"]) is None
    output = build_and_run(
        "consumer", tmp_path, f"deep_moe_DIR={any_cmake_dir}", f"EXPECTED_VERSION={version()}", env=env
    )
    assert f"headers {version()}, library {version()}" in output


def find(cmake_dir: Path, folder: Path, arguments: str, tail: str = "") -> str:
    """Output of a project that looks for deep_moe."""
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(find LANGUAGES CXX)\n"
        'set(reason mine)\nset(component "mine too")\n'
        f"find_package(deep_moe CONFIG {arguments})\n{tail}\n"
    )
    return run("cmake", "-S", folder, "-B", folder / "build", f"-Ddeep_moe_DIR={cmake_dir}")


@pytest.mark.parametrize(
    ("component", "reason"),
    [("internode", "no network plug-in"), ("typo", "there are: deep_moe, cuda, internode")],
)
def test_missing_component_is_an_error_that_says_why(
    cmake_dir: Path, component: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        find(cmake_dir, tmp_path, f"REQUIRED COMPONENTS deep_moe {component}")
    text = " ".join(str(failure.value).split())
    assert f"component '{component}'" in text
    assert reason in text


def test_optional_component_is_reported(cmake_dir: Path, tmp_path: Path) -> None:
    tail = """
if(NOT reason STREQUAL "mine" OR NOT component STREQUAL "mine too")
  message(FATAL_ERROR "the caller's variables are changed")
endif()
if(deep_moe_internode_FOUND OR NOT deep_moe_FOUND OR NOT TARGET deep_moe::deep_moe)
  message(FATAL_ERROR "wrong result variables")
endif()
message(STATUS "ABI ${deep_moe_ABI_VERSION}")"""
    output = find(cmake_dir, tmp_path, "REQUIRED OPTIONAL_COMPONENTS internode", tail)
    assert "optional component 'internode' is not there" in " ".join(output.split())
    assert re.search(r"ABI \d+", output)


def test_another_minor_version_is_refused(cmake_dir: Path, tmp_path: Path) -> None:
    major, minor, _ = version().split(".")
    with pytest.raises(pytest.fail.Exception, match=re.escape(version())):
        find(cmake_dir, tmp_path, f"{major}.{int(minor) + 1} REQUIRED")


def test_install_tree_names_no_folder_of_the_build(cmake_dir: Path) -> None:
    text = "".join(path.read_text() for path in cmake_dir.glob("*.cmake"))
    assert text and str(ROOT) not in text


def test_archive_keeps_to_its_namespace(cmake_dir: Path) -> None:
    """Strong symbols are all in deep_moe, and no device link is left for the program to do."""
    archive = cmake_dir.parents[1] / "libdeep_moe.a"
    symbols = [
        line.split(maxsplit=2) for line in run("nm", "-C", "-g", archive).splitlines() if " T " in line
    ]
    assert symbols and [name for _, _, name in symbols if "deep_moe" not in name] == []
    lines = run("nm", "--undefined-only", archive).splitlines()
    undefined = [line.split()[-1] for line in lines if " U " in line]  # the others name object files
    assert undefined
    assert [name for name in undefined if re.search("RegisterLinkedBinary|fatbinwrap|nvshmem", name)] == []


def test_installed_headers_are_the_public_ones(include_dir: Path) -> None:
    assert WRITTEN_HEADERS
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
    flags = ["-std=c++20", "-Werror", "all-warnings", f"-I{include_dir}"]
    run("nvcc", *flags, "-c", source, "-o", tmp_path / "headers.o")


def test_consumers_are_all_tested() -> None:
    text = "".join(path.read_text() for path in FOLDER.glob("test_consumer*.py"))
    assert [path.name for path in FOLDER.glob("consumer*/") if f'"{path.name}"' not in text] == []
