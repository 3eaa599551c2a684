"""DeepEP's names for deep_moe: there when asked for, and never in place of an installed DeepEP.

That programs run on them is the business of ``test_consumers_*``, which import everything from the shim.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deep_moe import deep_ep_shim

INSTALL = "import deep_moe.deep_ep_shim as shim; shim.install(); "


def run(
    *arguments: str, paths: tuple[Path | str, ...] = (), cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own, with ``paths`` in front of ``PYTHONPATH``."""
    given = [*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(given), **variables}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=environment, cwd=cwd
    )


def succeeds(*arguments: str, **options: object) -> str:
    done = run(*arguments, **options)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder in which a DeepEP is installed."""
    package = tmp_path / "site" / "deep_ep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("Buffer = 'the other'\n")
    (package / "utils.py").write_text("")
    return package.parent


def test_not_there_unless_asked_for() -> None:
    found = succeeds(
        "-c",
        "import importlib.util as u, sys, deep_moe, deep_moe.deep_ep_shim as shim\n"
        "print(u.find_spec('deep_ep'), u.find_spec('deep_ep_cpp'), shim.is_installed())",
    )
    assert found == "None None False"


def test_every_name_is_deep_moes_own() -> None:
    names = {
        "deep_ep": "Buffer Config EventHandle EventOverlap topk_idx_t",
        "deep_ep.buffer": "Buffer Config EventHandle EventOverlap",
        "deep_ep.buffers": "Buffer",
        "deep_ep.buffers.legacy": "Buffer Config EventHandle EventOverlap",
        "deep_ep.utils": "EventHandle EventOverlap",
        "deep_ep.utils.event": "EventHandle EventOverlap",
        "deep_ep_cpp": "Config EventHandle topk_idx_t",
    }
    checks = "".join(
        f"import {module}, deep_moe\nassert {module}.{name} is deep_moe.{name}, '{module}.{name}'\n"
        for module, some in names.items()
        for name in some.split()
    )
    sizes = (
        "assert deep_ep_cpp.get_low_latency_rdma_size_hint(128, 7168, 8, 256) == "
        "deep_moe.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256)\n"
        "assert deep_ep_cpp.is_sm90_compiled() == deep_moe.Buffer.is_sm90_compiled()\n"
        "assert not hasattr(deep_ep_cpp, 'Buffer')\n"
    )
    succeeds("-c", INSTALL + "\n" + checks + sizes)


def test_uninstall_takes_all_of_it_away() -> None:
    found = succeeds(
        "-c",
        INSTALL + "shim.install(); import deep_ep, deep_ep.utils, deep_ep_cpp, importlib.util as u, sys\n"
        "assert shim.is_installed() and u.find_spec('deep_ep') is not None\n"
        "shim.uninstall(); shim.uninstall()\n"
        "print(u.find_spec('deep_ep'), [name for name in sys.modules if 'deep_ep' in name])",
    )
    assert found == "None ['deep_moe.deep_ep_shim']"


def test_an_installed_deep_ep_stays(other: Path) -> None:
    done = run("-c", INSTALL, paths=(other,))
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"ImportError: deep_ep is installed, at {other / 'deep_ep' / '__init__.py'}")
    assert "install(replace=True)" in message and deep_ep_shim.REPLACE_VARIABLE in message
    then = "import deep_ep; print(deep_ep.Buffer)"
    assert succeeds("-c", f"import deep_moe.deep_ep_shim\n{then}", paths=(other,)) == "the other"


def test_an_imported_deep_ep_stays(other: Path) -> None:
    code = "import sys; import deep_ep; sys.path.remove(sys.argv[1]); " + INSTALL
    done = run("-c", code, str(other), paths=(other,))
    assert f"ImportError: deep_ep is imported already, from {other}" in done.stderr


@pytest.mark.parametrize("before", ["", "import deep_ep, deep_ep.utils; "], ids=["installed", "imported"])
def test_replaced_if_told_and_back_again(before: str, other: Path) -> None:
    found = succeeds(
        "-c",
        f"{before}import deep_moe, deep_moe.deep_ep_shim as shim; shim.install(replace=True)\n"
        "import deep_ep, deep_ep.utils\n"
        "assert deep_ep.Buffer is deep_moe.Buffer and deep_ep.utils.EventHandle is deep_moe.EventHandle\n"
        "shim.uninstall(); import deep_ep; print(deep_ep.Buffer)",
        paths=(other,),
    )
    assert found == "the other"


def test_on_pythonpath(other: Path) -> None:
    """The folder serves processes that know nothing of deep_moe, and refuses to hide another DeepEP."""
    folder = succeeds("-m", "deep_moe.deep_ep_shim", "--path")
    assert folder == deep_ep_shim.folder()
    code = "import deep_ep_cpp, deep_ep; print(deep_ep.Buffer.__module__)"
    assert succeeds("-c", code, paths=(folder,)) == "deep_moe.buffer"
    for module in ("deep_ep", "deep_ep_cpp", "deep_ep.utils"):
        done = run("-c", f"import {module}", paths=(folder, other))
        assert "ImportError: deep_ep is installed, at" in done.stderr, done.stderr
    told = {deep_ep_shim.REPLACE_VARIABLE: "1"}
    assert succeeds("-c", code, paths=(folder, other), **told) == "deep_moe.buffer"
    assert {entry.name for entry in Path(folder).iterdir()} - {"__pycache__"} == {"deep_ep", "deep_ep_cpp.py"}


PROGRAM = """
import subprocess, sys
import deep_ep
from beside import HERE
print(__name__, sys.argv[1:], deep_ep.Buffer.__module__, HERE)
print(subprocess.check_output([sys.executable, "-c", "import deep_ep; print(deep_ep.__name__)"], text=True))
"""


@pytest.mark.parametrize("as_module", [False, True], ids=["file", "module"])
@pytest.mark.parametrize("installed", [False, True], ids=["alone", "replace"])
def test_runs_a_program_and_its_children(
    as_module: bool, installed: bool, tmp_path: Path, other: Path
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "beside.py").write_text("HERE = 'beside'")
    what = ("-m", "program") if as_module else (str(tmp_path / "program.py"),)
    options = ("--replace",) if installed else ()
    printed = succeeds(
        *("-m", "deep_moe.deep_ep_shim", *options, *what, "--flag", "-m"),
        cwd=tmp_path,
        paths=(other,) if installed else (),
    )
    assert printed.split("\n") == ["__main__ ['--flag', '-m'] deep_moe.buffer beside", "deep_ep"]


def test_a_program_is_not_run_before_another_deep_ep(tmp_path: Path, other: Path) -> None:
    (tmp_path / "program.py").write_text("print('ran')")
    done = run("-m", "deep_moe.deep_ep_shim", str(tmp_path / "program.py"), paths=(other,))
    assert (done.returncode, done.stdout) == (1, "") and "deep_ep is installed" in done.stderr
    assert run("-m", "deep_moe.deep_ep_shim").returncode == 2
