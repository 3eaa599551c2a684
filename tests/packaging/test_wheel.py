"""What pip installed: complete, typed, and tied to no torch, driver or toolkit."""

import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import deep_moe
import deep_moe._C

from .conftest import ROOT, run

PACKAGE_FILES = sorted(
    str(path.relative_to(ROOT / "python"))
    for path in (ROOT / "python" / "deep_moe").rglob("*")
    if path.is_file() and "__pycache__" not in path.parts
)


def test_version_is_written_once() -> None:
    line = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert line is not None
    assert deep_moe.__version__ == metadata.version("deep-moe") == line[1]


@pytest.mark.parametrize("name", ["deep_moe/py.typed", "deep_moe/_C.pyi", "deep_moe/models.json"])
def test_package_has_its_data_files(name: str) -> None:
    assert name in PACKAGE_FILES


def test_every_package_file_is_installed() -> None:
    installed = {str(path) for path in metadata.files("deep-moe") or []}
    missing = [name for name in PACKAGE_FILES if name not in installed]
    assert PACKAGE_FILES and not missing


def test_licence_and_library_are_in_the_wheel() -> None:
    installed = {str(path) for path in metadata.files("deep-moe") or []}
    assert any(name.endswith("licenses/LICENSE") for name in installed)
    assert "deep_moe/lib/libdeep_moe.a" in installed
    assert metadata.metadata("deep-moe")["License-Expression"] == "Apache-2.0"


def test_module_needs_only_the_c_and_cpp_runtimes() -> None:
    module = Path(deep_moe._C.__file__)
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", run("readelf", "-d", module))
    allowed = r"(libstdc\+\+|libgcc_s|libc|libm|libdl|librt|libpthread|ld-linux-[\w-]+)\.so\.\d+"
    assert needed and [name for name in needed if not re.fullmatch(allowed, name)] == []


def test_module_exports_nothing_but_its_entry_point() -> None:
    table = run("nm", "-D", "--defined-only", deep_moe._C.__file__)
    assert [line.split()[-1] for line in table.splitlines()] == ["PyInit__C"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the SIMD files are for x86-64")
def test_simd_objects_lend_no_code_to_others() -> None:
    """A weak symbol compiled for AVX could be the copy that the linker keeps, also where there is no AVX."""
    archive = Path(deep_moe.__file__).parent / "lib" / "libdeep_moe.a"
    weak: dict[str, list[str]] = {}
    for member in run("nm", "-C", "--defined-only", archive).split("\n\n"):
        name, *symbols = member.strip().splitlines() or [""]
        if "_avx" in name:
            weak[name] = [line for line in symbols if re.match(r"\w+ [WVu] ", line)]
    assert len(weak) == 2
    assert [symbols for symbols in weak.values() if symbols] == []


def test_command_line_is_installed() -> None:
    script = Path(sys.executable).parent / "deep-moe"
    assert "bench" in run(script, "--help")


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, torch; old = set(sys.modules); import deep_moe; print(*set(sys.modules) - old)"
    new = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert "deep_moe._C" in new
    heavy = {"rich", "typer", "click", "matplotlib", "mpi4py", "pandas", "scipy"}
    assert heavy.isdisjoint(name.split(".")[0] for name in new)
