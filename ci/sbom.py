"""A software bill of materials (CycloneDX, JSON) for each wheel: `sbom.py FOLDER WHEEL...`

What is in the wheel (the module's statically linked parts) and what it asks for (its requirements); checked
against the schema. The same wheel gives the same bytes.
"""

import email
import hashlib
import os
import re
import sys
import uuid
import zipfile
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "deep_moe/lib/cmake/deep_moe/deep_moeConfig.cmake"
CUDART = "deep_moe/lib/deep_moe/libcudart_static.a"


def sha256(data: bytes) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(data).hexdigest())


def nanobind_version() -> str:
    """That of the release's constraints, or that installed beside this script."""
    constraints = ROOT / "ci" / "wheel_constraints.txt"
    found = re.search(r"^nanobind==(\S+)$", constraints.read_text(), re.M) if constraints.exists() else None
    return found[1] if found else metadata.version("nanobind")


def bundled(archive: zipfile.ZipFile) -> list[Component]:
    """Other people's code inside the wheel."""
    version = nanobind_version()
    parts = [
        Component(
            type=ComponentType.LIBRARY,
            name="nanobind",
            version=version,
            bom_ref="nanobind",
            purl=PackageURL("pypi", name="nanobind", version=version),
            licenses=[DisjunctiveLicense(id="BSD-3-Clause")],
            scope=ComponentScope.REQUIRED,
        )
    ]
    if CUDART in archive.namelist():
        found = re.search(r'deep_moe_CUDA_VERSION "([\d.]+)"', archive.read(CONFIG).decode())
        parts.append(
            Component(
                type=ComponentType.LIBRARY,
                name="libcudart_static",
                version=found[1] if found else None,
                bom_ref="libcudart_static",
                description="CUDA runtime; the version is that of the compiler it came with",
                licenses=[DisjunctiveLicense(name="NVIDIA CUDA Toolkit EULA")],
                hashes=[sha256(archive.read(CUDART))],
                scope=ComponentScope.REQUIRED,
            )
        )
    return parts


def required(headers: "email.message.Message[str, str]") -> list[Component]:
    """What pip installs beside the wheel; extras are left out."""
    components = []
    for line in headers.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.marker is not None and "extra" in str(requirement.marker):
            continue
        components.append(
            Component(
                type=ComponentType.LIBRARY,
                name=requirement.name,
                bom_ref=requirement.name,
                purl=PackageURL("pypi", name=requirement.name),
                properties=[Property(name="deep_moe:requirement", value=line)],
                scope=ComponentScope.REQUIRED,
            )
        )
    return components


def bill(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        headers = email.message_from_bytes(archive.read(name))
        parts = bundled(archive)
    product = Component(
        type=ComponentType.LIBRARY,
        name=headers["Name"],
        version=headers["Version"],
        bom_ref=wheel.name,
        purl=PackageURL(
            "pypi", name=headers["Name"], version=headers["Version"], qualifiers={"file_name": wheel.name}
        ),
        licenses=[LicenseExpression(headers["License-Expression"])],
        hashes=[sha256(wheel.read_bytes())],
    )
    needed = required(headers)
    bom = Bom(components=[*parts, *needed])
    bom.metadata.component = product
    bom.metadata.timestamp = datetime.fromtimestamp(
        int(os.environ.get("SOURCE_DATE_EPOCH", "0")), timezone.utc
    )
    bom.serial_number = uuid.uuid5(uuid.NAMESPACE_URL, next(iter(product.hashes)).content)
    bom.register_dependency(product, [*parts, *needed])
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    if errors := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise SystemExit(f"sbom.py: {wheel.name}: {errors}")
    return text + "\n"


def main(folder: Path, wheels: list[Path]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in wheels:
        file = folder / f"{wheel.name.removesuffix('.whl')}.cdx.json"
        file.write_text(bill(wheel))
        print(file.name)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit("usage: sbom.py FOLDER WHEEL...")
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
