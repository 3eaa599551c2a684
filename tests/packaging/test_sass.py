"""Machine code for GPUs: what came with sm_90 is in the code for those chips and in no other."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import deep_moe
from ci import sass
from deep_moe import _C

from .conftest import ROOT, run

KERNELS = ROOT / "cpp" / "kernels" / "intranode" / "dispatch.cu"
WANTED = ("UBLKCP", "UTMACMDFLUSH", "SYNCS", "ACQBULK")  # dispatch has nothing to start early

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")


def compile_kernels(folder: Path, architectures: tuple[str, ...], *definitions: str) -> Path:
    target = folder / "kernels.o"
    flags = ["-std=c++20", "-O3", f"-I{ROOT / 'cpp'}", f"-I{ROOT / 'cpp' / 'include'}", *definitions]
    for one in architectures:
        flags += ["-gencode", f"arch=compute_{one},code=sm_{one}"]
    run("nvcc", *flags, "-c", KERNELS, "-o", target)
    return target


def test_installed_library_has_code_for_what_it_tells() -> None:
    told = _C.build_info()["cuda_archs"]
    if not told:
        pytest.skip("the installed build has no CUDA kernels")
    library = Path(deep_moe.__file__).parent / "lib" / "libdeep_moe.a"
    code = {one for one in told if not one.endswith("-virtual")}
    assert sass.architectures(library)[0] == code
    with_sm90 = set(_C.build_info()["sm90_archs"]) & code
    assert sass.problems(library, with_sm90, code - with_sm90) == []


@needs_nvcc
def test_instructions_are_where_they_belong(tmp_path: Path) -> None:
    release = re.search(r"release (\d+)\.(\d+)", subprocess.check_output(["nvcc", "--version"], text=True))
    assert release is not None
    new = ("90a", "100a") if (int(release[1]), int(release[2])) >= (12, 8) else ("90a",)
    kernels = compile_kernels(tmp_path, ("80", *new))
    assert sass.architectures(kernels) == ({"80", *new}, set())
    assert sass.problems(kernels, set(new), {"80"}, WANTED) == []
    # And the check sees it where they do not.
    assert {text.split(" ")[0] for text in sass.problems(kernels, {"80"}, set(new))} == {"sm_80"} | {
        f"sm_{one}" for one in new
    }


@needs_nvcc
@pytest.mark.parametrize("disabled", ["1", "8000900"])
def test_sm90_features_can_be_left_out(tmp_path: Path, disabled: str) -> None:
    kernels = compile_kernels(tmp_path, ("90a",), f"-DDEEP_MOE_DISABLE_SM90_FEATURES={disabled}")
    assert sass.problems(kernels, set(), {"90a"}) == []
