"""ci/pipeline.sh's own rules catch what they are for; a wheel's bill of materials is right."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .conftest import ROOT, run

WORKFLOWS = ROOT / ".github" / "workflows"


def rules(file: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("ruamel.yaml", reason="needs the extra `pipeline`")
    command = [sys.executable, ROOT / "ci" / "check_workflows.py", file]
    return subprocess.run(command, text=True, capture_output=True)


@pytest.mark.parametrize("name", sorted(file.name for file in WORKFLOWS.glob("*.yml")))
def test_workflows_keep_the_rules(name: str) -> None:
    result = rules(WORKFLOWS / name)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("@3d3c42e5aac5ba805825da76410c181273ba90b1 # v7.0.1", "@v7", "not pinned"),
        ("90b1 # v7.0.1", "90b1", "not pinned"),
        ("run: ci/sdist.sh", "run: pip install build", "no script of ci/"),
        ("run: ci/sdist.sh", "run: ci/sdist.sh && true", "no script of ci/"),
        ("run: ci/sdist.sh", "run: ci/not_there.sh", "no script of ci/"),
        ("permissions:\n  contents: read", "permissions:\n  contents: write", "permissions are"),
        ("startsWith(github.ref, 'refs/tags/v')", "true", "publishes without a tag"),
        ("    timeout-minutes: 180\n", "", "no timeout-minutes"),
        (
            "    timeout-minutes: 180\n",
            "    timeout-minutes: 180\n    permissions: write-all\n",
            "job wheels has",
        ),
    ],
)
def test_a_workflow_that_breaks_a_rule_is_refused(old: str, new: str, problem: str, tmp_path: Path) -> None:
    text = (WORKFLOWS / "release.yml").read_text()
    assert old in text
    file = tmp_path / "release.yml"
    file.write_text(text.replace(old, new))
    result = rules(file)
    assert result.returncode == 1
    assert problem in result.stdout


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel with nothing but what a bill is made from."""
    file = tmp_path / "deep_moe_cu13-1.2.3-cp312-abi3-linux_x86_64.whl"
    header = "Metadata-Version: 2.4\nName: deep-moe-cu13\nVersion: 1.2.3\nLicense-Expression: Apache-2.0\n"
    requirements = 'Requires-Dist: torch>=2.4\nRequires-Dist: matplotlib; extra == "plot"\n'
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("deep_moe_cu13-1.2.3.dist-info/METADATA", header + requirements)
        archive.writestr("deep_moe/lib/deep_moe/libcudart_static.a", b"runtime")
        archive.writestr(
            "deep_moe/lib/cmake/deep_moe/deep_moeConfig.cmake", 'set(deep_moe_CUDA_VERSION "13.0.88")'
        )
    return file


def test_bill_of_materials(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx", reason="needs the extra `pipeline`")
    texts = []
    for name in ("first", "second"):
        run(sys.executable, ROOT / "ci" / "sbom.py", tmp_path / name, wheel)
        (file,) = (tmp_path / name).iterdir()
        texts.append(file.read_text())
    assert texts[0] == texts[1]
    bill = json.loads(texts[0])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    product = bill["metadata"]["component"]
    assert (product["name"], product["version"]) == ("deep-moe-cu13", "1.2.3")
    assert product["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    parts = {part["name"]: part for part in bill["components"]}
    assert set(parts) == {"libcudart_static", "nanobind", "torch"}
    assert parts["libcudart_static"]["version"] == "13.0.88"
    assert parts["libcudart_static"]["hashes"][0]["content"] == hashlib.sha256(b"runtime").hexdigest()
