"""ci/check_wheel.py lets the installed wheel pass, and sees what is wrong with others."""

import base64
import hashlib
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from deep_moe import _C

from .conftest import ROOT, run

sys.path.insert(0, str(ROOT / "ci"))  # where its scripts find each other
import check_wheel

OWN = metadata.distribution("deep-moe")
Files = dict[str, bytes]


def files_of_the_wheel() -> Files:
    """What was in the wheel that is installed, without RECORD."""
    left_by_pip = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")
    files = {}
    for file in OWN.files or []:
        if file.parts[0] == ".." or "__pycache__" in file.parts or file.name in left_by_pip:
            continue
        data = Path(str(OWN.locate_file(file))).read_bytes()
        files[str(file)] = data
    return files


def write_wheel(folder: Path, files: Files) -> Path:
    info = next(name.split("/")[0] for name in files if ".dist-info/" in name)
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    )
    version = f"cp3{sys.version_info.minor}"
    tag = "cp312-abi3" if _C.build_info()["abi3"] else f"{version}-{version}"
    platform = sysconfig.get_platform().replace("-", "_")
    path = folder / f"{info.removesuffix('.dist-info')}-{tag}-{platform}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (files | {f"{info}/RECORD": (record + f"{info}/RECORD,,\n").encode()}).items():
            archive.writestr(name, data)
    return path


def find(files: Files, ending: str) -> str:
    (name,) = [name for name in files if name.endswith(ending)]
    return name


def needs_torch(files: Files, folder: Path) -> None:
    name = find(files, ".so")
    (folder / "module.so").write_bytes(files[name])
    run("patchelf", "--add-needed", "libtorch.so", folder / "module.so")
    files[name] = (folder / "module.so").read_bytes()


def without_types(files: Files, folder: Path) -> None:
    del files["deep_moe/py.typed"]


def another_version(files: Files, folder: Path) -> None:
    name = find(files, "/METADATA")
    files[name] = files[name].replace(b"\nVersion: ", b"\nVersion: 9.")


def another_requirement(files: Files, folder: Path) -> None:
    name = find(files, "/METADATA")
    files[name] = files[name].replace(b"\nRequires-Dist: numpy\n", b"\nRequires-Dist: numpy<2\n")


def tells_where_it_was_built(files: Files, folder: Path) -> None:
    files["deep_moe/include/deep_moe/buffer.hpp"] += f"// {ROOT}\n".encode()


def has_bytecode(files: Files, folder: Path) -> None:
    files["deep_moe/__pycache__/buffer.pyc"] = b""


def too_large(files: Files, folder: Path) -> None:
    files["deep_moe/data/more"] = b"0" * 60_000_000


def tells_other_gpus(files: Files, folder: Path) -> None:
    name = "deep_moe/lib/cmake/deep_moe/deep_moeConfig.cmake"
    files[name] = files[name].replace(b'_ARCHITECTURES "', b'_ARCHITECTURES "75-real;')


def test_the_wheel_passes(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, files_of_the_wheel())
    command = [sys.executable, ROOT / "ci" / "check_wheel.py", "--local", wheel]
    text = run(*command)
    assert "FAILED" not in text and text.count("  ok ") == len(check_wheel.CHECKS) - 1, text


@pytest.mark.parametrize(
    ("change", "check", "said"),
    [
        (another_version, "names", "Version is '9."),
        (another_requirement, "names", "requires ["),
        (without_types, "files", "deep_moe/py.typed is missing"),
        (tells_where_it_was_built, "files", f"buffer.hpp names {ROOT}"),
        (has_bytecode, "files", "does not belong into a wheel"),
        (too_large, "size", "the limit is 60000000"),
        (needs_torch, "needed", "needs ['libtorch.so']"),
        (tells_other_gpus, "instructions", "75"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, change: Callable[[Files, Path], None], check: str, said: str
) -> None:
    files = files_of_the_wheel()
    change(files, tmp_path)
    wheel = check_wheel.Wheel(write_wheel(tmp_path, files), local=True)
    found = getattr(check_wheel, f"check_{check}")(wheel)
    assert len(found) >= 1 and said in " ".join(found)


def test_a_wheel_for_this_machine_alone_is_none_for_others(tmp_path: Path) -> None:
    wheel = check_wheel.Wheel(write_wheel(tmp_path, files_of_the_wheel()), local=True)
    assert any("linux" in one for one in check_wheel.check_platform(wheel))
