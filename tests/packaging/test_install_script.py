"""install.sh: what it finds on a machine, what it says to do about it, and that it installs."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from .conftest import ROOT, run
from .consumers import version, without_nvcc

GCC_9 = '#!/bin/sh\necho "#define __GNUC__ 9"\necho "#define __GNUC_MINOR__ 4"\n'


class Machine:
    """This machine with other programs before its own on PATH."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.env = without_nvcc()
        self.env["PATH"] = f"{self.programs}{os.pathsep}{self.env['PATH']}"
        for name in ("CXX", "PYTHON", "TORCH_CUDA_ARCH_LIST", "DEEP_MOE_CUDA_ARCHITECTURES"):
            self.env.pop(name, None)

    def program(self, name: str, text: str) -> Path:
        file = self.programs / name
        file.write_text(text)
        file.chmod(0o755)
        return file

    def nvcc(self, release: str, compiles: bool = True) -> None:
        version = f"Cuda compilation tools, release {release}, V{release}.1"
        compile_line = "exit 0" if compiles else 'echo "error: unsupported GNU version" >&2; exit 1'
        text = f'#!/bin/sh\ncase $* in *--version*) echo "{version}" ;; *) {compile_line} ;; esac\n'
        self.env["CUDACXX"] = str(self.program("nvcc", text))

    def gpu(self, driver: str, *capabilities: str) -> None:
        table = f'echo "| Driver Version: 1.2  CUDA Version: {driver} |"'
        lines = "; ".join(f"echo {capability}" for capability in capabilities)
        self.program("nvidia-smi", f"#!/bin/sh\ncase $* in *compute_cap*) {lines} ;; *) {table} ;; esac\n")

    def look(self, *options: str, status: int = 0) -> str:
        """Output of a dry run, which must end with `status`."""
        result = subprocess.run(
            [ROOT / "install.sh", "--dry-run", "--python", sys.executable, *options],
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=120,
        )
        assert result.returncode == status, result.stdout
        return result.stdout


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_this_machine_can_build_for_the_cpu(machine: Machine) -> None:
    output = machine.look("--cuda", "off", "--jobs", "1")
    assert "ok       compiler" in output and "ok       torch" in output
    assert f"deep_moe {version()}: CPU backend" in output and "no CUDA kernels" in output
    assert "Nothing was done (--dry-run)" in output


def test_old_compiler_is_refused_with_a_remedy(machine: Machine) -> None:
    machine.program("c++", GCC_9)
    output = machine.look("--cuda", "off", status=1)
    assert "gcc 9.4 is too old" in output and "set CXX=g++-12" in output
    assert "Nothing was done (--force goes on all the same)" in output


def test_force_goes_on(machine: Machine) -> None:
    machine.program("c++", GCC_9)
    assert "1 problem(s)" in machine.look("--cuda", "off", "--force")


def test_missing_compiler(machine: Machine) -> None:
    machine.env["CXX"] = "no-such-compiler"
    assert "'no-such-compiler' is not there" in machine.look("--cuda", "off", status=1)


def test_old_python_is_refused(machine: Machine) -> None:
    old = machine.program(
        "python3.8",
        f'#!/bin/sh\ncase $2 in *version_info*) echo 3.8.1 ;; *) exec {sys.executable} "$@" ;; esac\n',
    )
    assert "3.8.1 is too old" in machine.look("--cuda", "off", "--python", str(old), status=1)


def test_kernels_are_for_the_gpus_of_this_machine(machine: Machine) -> None:
    machine.nvcc("12.8")
    machine.gpu("12.8", "9.0", "8.6", "7.5")
    output = machine.look()
    assert "CUDA kernels for: 86-real;90a-real" in output
    assert "sm_75 is older than sm_80" in output


def test_architectures_of_the_environment_are_kept(machine: Machine) -> None:
    machine.nvcc("12.8")
    machine.gpu("12.8", "9.0")
    machine.env["TORCH_CUDA_ARCH_LIST"] = "8.0"
    assert "CUDA kernels for: as the environment says" in machine.look()
    assert "CUDA kernels for: 100a" in machine.look("--archs", "100a")


def test_old_nvcc_means_the_cpu_alone_or_an_error(machine: Machine) -> None:
    machine.nvcc("11.8")
    output = machine.look()
    assert "is 11.8; 12.4 is the oldest that serves" in output and "no CUDA kernels" in output
    assert "PROBLEM  nvcc" in machine.look("--cuda", "on", status=1)


def test_nvcc_that_compiles_nothing_is_told_with_its_words(machine: Machine) -> None:
    machine.nvcc("12.8", compiles=False)
    output = machine.look("--cuda", "on", status=1)
    assert "unsupported GNU version" in output and "set CUDAHOSTCXX to an older compiler" in output


def test_driver_older_than_nvcc(machine: Machine) -> None:
    machine.nvcc("13.0")
    machine.gpu("12.4", "9.0")
    output = machine.look(status=1)
    assert "is for CUDA 12.4, nvcc is 13.0" in output and "an nvcc of CUDA 12" in output


def test_little_disk_and_memory(machine: Machine) -> None:
    table = "Filesystem 1024-blocks Used Available Capacity Mounted\\n/dev/x 1 1 100000 99%% /"
    machine.program("df", f'#!/bin/sh\nprintf "{table}\\n"\n')
    output = machine.look("--cuda", "off", "--jobs", "100000", status=1)
    assert "0 GiB free, 1 needed" in output
    assert "jobs take up to" in output and "--jobs " in output


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--cuda", "maybe"], "allowed: auto, on, off"),
        (["--jobs", "0"], "1 and more"),
        (["--typo"], "unknown option"),
    ],
)
def test_wrong_options(machine: Machine, options: list[str], reason: str) -> None:
    assert reason in machine.look(*options, status=2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_installs_into_a_virtual_environment(tmp_path: Path) -> None:
    """The environment sees the packages of this one, torch among them, but gets its own deep_moe."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    packages = [folder for folder in sys.path if folder.endswith("-packages")]
    Path(site, "these.pth").write_text("\n".join(packages))
    run(python, "-c", "import torch")  # else pip would get one
    options = ["--venv", folder, "--cuda", "off", "--jobs", os.environ.get("JOBS", str(os.cpu_count()))]
    output = run(ROOT / "install.sh", *options, env=without_nvcc(), timeout=1800)
    assert "Installed. Next:" in output
    found = run(python, "-c", "import deep_moe; print(deep_moe.__file__)", cwd=tmp_path)
    assert found.startswith(site)
