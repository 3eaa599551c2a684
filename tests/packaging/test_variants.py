"""Two of deep-moe, deep-moe-cu12 and deep-moe-cu13 in one folder: said at import and by the doctor."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from deep_moe import _C
from deep_moe._variants import NAMES

OWN = metadata.distribution("deep-moe")


def install(site: Path, name: str) -> None:
    """Leaves in `site` what pip leaves of the wheel `name`."""
    for file in OWN.files or []:
        if file.parts[0] == "..":
            continue
        info = file.parts[0].endswith(".dist-info")
        place = site / str(file).replace("deep_moe-", name.replace("-", "_") + "-") if info else site / file
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(str(OWN.locate_file(file)), place)
    (written,) = site.glob(name.replace("-", "_") + "-*.dist-info/METADATA")
    written.write_text(re.sub("^Name: .*$", f"Name: {name}", written.read_text(), count=1, flags=re.M))


def run_with(site: Path, *arguments: str, others: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (site, *others)))}
    return subprocess.run([sys.executable, *arguments], env=env, text=True, capture_output=True, timeout=120)


def import_with(site: Path, *others: Path) -> str:
    code = "import warnings; warnings.simplefilter('error'); import torch, deep_moe; print(deep_moe.__file__)"
    result = run_with(site, "-c", code, others=others)
    if result.returncode == 0:
        assert Path(result.stdout.strip()).parent == site / "deep_moe"
    return result.stderr


def test_one_wheel_says_nothing(tmp_path: Path) -> None:
    install(tmp_path, "deep-moe-cu12")
    assert import_with(tmp_path) == ""


@pytest.mark.parametrize("second", ["deep-moe-cu12", "deep-moe-cu13"])
def test_two_wheels_are_said_with_the_way_out(tmp_path: Path, second: str) -> None:
    install(tmp_path, "deep-moe")
    install(tmp_path, second)
    said = import_with(tmp_path)
    variant = _C.build_info()["variant"]
    assert "RuntimeWarning" in said
    assert (
        f"deep-moe {OWN.version} and {second} {OWN.version} are installed over each other in {tmp_path}"
        in said
    )
    assert f"what runs is variant {variant}" in said
    assert f"pip uninstall -y deep-moe {second} && pip install {NAMES[variant]}" in said

    doctor = run_with(tmp_path, "-m", "deep_moe", "doctor")
    text = " ".join(doctor.stdout.split())
    assert "warning wheels" in text and second in text


def test_a_wheel_in_another_folder_is_no_conflict(tmp_path: Path) -> None:
    install(tmp_path / "first", "deep-moe-cu13")
    install(tmp_path / "second", "deep-moe")
    assert import_with(tmp_path / "first", tmp_path / "second") == ""
