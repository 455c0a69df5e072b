"""Files of the kernel that are read again and again: opened once, read by position, parsed for what is asked only.

A file that is absent, or goes away, reads as empty: what it would have said is then unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["CounterFile", "KernelFile", "NumberFile"]

_LONGEST_BYTES = 1 << 16


class KernelFile:
    """A file under /proc or /sys that stays open."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = None

    def read(self) -> bytes:
        """What it says now; nothing where it cannot be read."""
        if self._descriptor is None:
            return b""
        try:
            return os.pread(self._descriptor, _LONGEST_BYTES, 0)
        except OSError:
            return b""

    def close(self) -> None:
        """Close it; it reads as empty from then on."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class NumberFile(KernelFile):
    """A file of one number."""

    def number(self) -> int | None:
        """The number; None where the file is absent or says something else, such as `max`."""
        try:
            return int(self.read())
        except ValueError:
            return None


class CounterFile(KernelFile):
    """A file of lines `name value` or `name: value kB`.

    Parameters
    ----------
    names
        The lines of interest, as regular expressions.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(path)
        self._lines = re.compile(rb"\n(" + "|".join(names).encode() + rb"):?\s+(\d+)(?: kB)?(?=\s|$)")

    def values(self) -> dict[str, int]:
        """Name -> number, for the lines that are there."""
        return {name.decode(): int(value) for name, value in self._lines.findall(b"\n" + self.read())}
