"""Builds and runs the programs in tests/packaging/consumer*."""

import os
import shutil
from importlib import metadata
from pathlib import Path

from .conftest import ROOT, run

FOLDER = ROOT / "tests" / "packaging"


def cxx() -> str:
    return os.environ.get("CXX", "c++")


def without_nvcc() -> dict[str, str]:
    """This environment with no CUDA compiler to be found."""
    folders = [d for d in os.environ["PATH"].split(os.pathsep) if not (Path(d) / "nvcc").exists()]
    hidden = {"CUDACXX", "CUDA_HOME", "CUDA_PATH", "CMAKE_GENERATOR"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    return env | {"PATH": os.pathsep.join(folders)}


def configure(name: str, build: Path, *defines: str, env: dict[str, str] | None = None) -> str:
    path = (env or os.environ)["PATH"]
    # Found here, as the PATH that the compiler is run with may lack their folder.
    tools = {tool: shutil.which(tool) for tool in ("cmake", "make", cxx())}
    missing = [tool for tool, found in tools.items() if found is None]
    assert not missing, f"not on PATH: {missing} ({path})"
    return run(
        tools["cmake"] or "",
        *("-S", FOLDER / name, "-B", build, "-G", "Unix Makefiles"),
        f"-DCMAKE_MAKE_PROGRAM={tools['make']}",
        f"-DCMAKE_CXX_COMPILER={tools[cxx()]}",
        *(f"-D{define}" for define in defines),
        env=env,
    )


def build_and_run(
    name: str,
    build: Path,
    *defines: str,
    env: dict[str, str] | None = None,
    run_env: dict[str, str] | None = None,
) -> str:
    """What the program prints; `run_env` is added to its environment."""
    configure(name, build, *defines, env=env)
    run(shutil.which("cmake") or "", "--build", build, env=env, timeout=900)
    output = run(build / "consumer", env={**(env or os.environ), **(run_env or {})})
    assert "rank 0: 2 rows received" in output
    assert "rank 1: 4 rows received" in output
    return output


def version() -> str:
    """Of the installed package, which may be that of a CUDA wheel."""
    return metadata.version(metadata.packages_distributions()["deep_moe"][0])
