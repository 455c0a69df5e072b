"""The page cache of a checkpoint's files, brought into a wanted state before a run, and counted."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from umem.checkpoint.pagecache import cached_bytes_of_files, evict

__all__ = ["CACHES", "cached_fraction", "is_as_wanted", "prepare_cache", "shards_of"]

CACHES = ("cold", "warm")
_COLD_AT_MOST, _WARM_AT_LEAST = 0.01, 0.99
_READ_BYTES = 8 << 20


def shards_of(checkpoint: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in the order of their names."""
    return sorted(checkpoint.glob("*.safetensors"))


def prepare_cache(files: Iterable[Path], cache: str) -> None:
    """Evict the files from the page cache, or read them into it.

    Eviction needs no root, but pages that a process has mapped, or that are not written yet, stay: so no earlier run
    may still live, and files are synced first. Pages that stay all the same go with all others if this is root.
    """
    files = list(files)
    for path in files:
        with path.open("rb", buffering=0) as file:
            if cache == "cold":
                os.fsync(file.fileno())
                evict(file.fileno())
            else:
                while file.read(_READ_BYTES):
                    pass
    if cache == "cold" and not is_as_wanted(cached_fraction(files), cache):
        os.sync()
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1")


def cached_fraction(files: Sequence[Path]) -> float | None:
    """How much of the files is in the page cache; None if the system cannot say (before Linux 6.5)."""
    cached = cached_bytes_of_files(map(str, files))
    page = os.sysconf("SC_PAGESIZE")
    whole = sum(-(-path.stat().st_size // page) * page for path in files)
    return None if cached is None or whole == 0 else cached / whole


def is_as_wanted(fraction: float | None, cache: str) -> bool:
    """Whether that fraction is cold or warm, as `cache` says; an unknown one is taken as it is."""
    if fraction is None:
        return True
    return fraction < _COLD_AT_MOST if cache == "cold" else fraction > _WARM_AT_LEAST
