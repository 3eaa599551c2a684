"""The wheels deep-moe, deep-moe-cu12 and deep-moe-cu13 hold the same files: one of them can be installed."""

from __future__ import annotations

import warnings
from importlib import metadata
from pathlib import Path

NAMES = {"cpu": "deep-moe", "cu12": "deep-moe-cu12", "cu13": "deep-moe-cu13"}


def installed(package: Path) -> list[str]:
    """Returns which of the wheels were installed into the folder ``package``, as ``name version``."""
    found = []
    for name in NAMES.values():
        for distribution in metadata.distributions(name=name):
            if Path(str(distribution.locate_file("deep_moe"))).resolve() == package.resolve():
                found.append(f"{name} {distribution.version}")
    return found


def conflict(package: Path, variant: str) -> tuple[str, str] | None:
    """Returns what is wrong and what to do where more than one wheel lies in ``package``."""
    found = installed(package)
    if len(found) < 2:
        return None
    names = " ".join(dict.fromkeys(one.split()[0] for one in found))
    return (
        f"{' and '.join(found)} are installed over each other in {package}; what runs is variant {variant}",
        f"keep one: pip uninstall -y {names} && pip install {NAMES[variant]}",
    )


def warn_of_conflict(variant: str) -> None:
    """Says at import that several of the wheels are installed."""
    found = conflict(Path(__file__).parent, variant)
    if found is not None:
        warnings.warn(f"deep_moe: {found[0]}. {found[1]}", RuntimeWarning, stacklevel=2)
