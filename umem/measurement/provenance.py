"""Where figures come from: the machine, its storage, versions, umem's own commit and settings. JSON values."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["installed_version", "machine"]

_ROOT = Path(__file__).parents[2]


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """What the figures were measured on, the versions of `packages` that are there, and umem's settings if any."""
    memory = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{name: found for name in packages if (found := installed_version(name)) is not None},
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith("UMEM_")},
    }


def _commit() -> str | None:
    """The commit of umem if it runs from a checkout of its own."""
    if not (_ROOT / ".git").exists():
        return None
    try:
        told = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],  # noqa: S607 - whichever git there is
            capture_output=True,
            text=True,
            check=False,
            cwd=_ROOT,
        )
    except OSError:
        return None
    return told.stdout.strip() or None


def installed_version(package: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
