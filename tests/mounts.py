"""Real mounts, where that is allowed; skips the test with the reason elsewhere."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["mounted"]


@contextlib.contextmanager
def mounted(kind: str, place: Path) -> Iterator[Path]:
    """A fresh file system (`tmpfs`, `overlay`) at `place`, which is made, until the exit."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    options = "size=16m"
    if kind == "overlay":
        parts = {name: place.with_name(f"{place.name}-{name}") for name in ("lowerdir", "upperdir", "workdir")}
        for part in parts.values():
            part.mkdir()
        options = ",".join(f"{name}={part}" for name, part in parts.items())
    place.mkdir(exist_ok=True)
    command = ["mount", "-t", kind, kind, "-o", options, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{kind} cannot be mounted here: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
