"""What has to be in a source distribution, and in a wheel built from it.

check_sdist.py ARCHIVE          every file under version control, and metadata as in pyproject.toml
check_sdist.py --wheel WHEEL    every file of python/deep_moe, the module, the library and its headers
"""

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = re.compile(r"\.(ci/|gitignore$|gitattributes$)")


def fail(text: str) -> None:
    raise SystemExit(f"check_sdist.py: {text}")


def project_line(key: str) -> str:
    found = re.search(rf'^{key} = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        fail(f"pyproject.toml has no line {key} = ...")
    return found[1] if found else ""


def check_sdist(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        members = [member for member in tar.getmembers() if not member.isdir()]
        names = {str(PurePosixPath(*PurePosixPath(member.name).parts[1:])) for member in members}
        top = {PurePosixPath(member.name).parts[0] for member in members}
        name, version = project_line("name").replace("-", "_"), project_line("version")
        if top != {f"{name}-{version}"} or archive.name != f"{name}-{version}.tar.gz":
            fail(f"{archive.name} unpacks to {top}; expected one folder {name}-{version}")
        info = tar.extractfile(f"{name}-{version}/PKG-INFO")
        metadata = email.message_from_bytes(info.read() if info else b"")
        modes = {PurePosixPath(member.name).name: member.mode for member in members}
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    tracked = {
        file for file in listed.split("\0") if file and (ROOT / file).exists() and not LEFT_OUT.match(file)
    }
    if not tracked:
        fail("version control lists no files")
    if missing := sorted(tracked - names):
        fail(f"{archive.name} lacks {', '.join(missing)}")
    extra = sorted(name for name in names - tracked - {"PKG-INFO"} if not LEFT_OUT.match(name))
    if extra:
        fail(f"{archive.name} has files that are not under version control: {', '.join(extra)}")
    expected = {
        "Name": project_line("name"),
        "Version": version,
        "License-Expression": project_line("license"),
    }
    expected |= {"Summary": project_line("description"), "Requires-Python": project_line("requires-python")}
    for key, value in expected.items():
        if metadata[key] != value:
            fail(f"{key} is {metadata[key]!r}, expected {value!r}")
    if (ROOT / "README.md").read_text().strip() not in metadata.get_payload(decode=False):
        fail("README.md is not the long description")
    if not modes["install.sh"] & 0o100:
        fail("install.sh is not executable")
    print(f"{archive.name}: {len(names)} files, complete; {archive.stat().st_size / 1e6:.2f} MB")


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = [file for file in (ROOT / "python").rglob("*") if file.is_file() and file.suffix != ".pyc"]
    wanted = {str(file.relative_to(ROOT / "python")) for file in sources}
    headers = [file.name for file in (ROOT / "cpp/include/deep_moe").glob("*.hpp")] + ["version.hpp"]
    wanted |= {f"deep_moe/include/deep_moe/{name}" for name in headers}
    wanted |= {"deep_moe/lib/libdeep_moe.a", "deep_moe/lib/cmake/deep_moe/deep_moeConfig.cmake"}
    if missing := sorted(wanted - names):
        fail(f"{wheel.name} lacks {', '.join(missing)}")
    if not [name for name in names if re.fullmatch(r"deep_moe/_C\..*so", name)]:
        fail(f"{wheel.name} has no module _C")
    print(f"{wheel.name}: {len(names)} files, complete")


if __name__ == "__main__":
    if sys.argv[1] == "--wheel":
        check_wheel(Path(sys.argv[2]))
    else:
        check_sdist(Path(sys.argv[1]))
