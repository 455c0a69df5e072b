"""Files of the kernel that are read again and again: opened once, read by position, parsed for what is asked only.

A file that is absent, or goes away, reads as empty: what it would have said is then unknown. The kernel gives a list
of records a page at a time, whatever is asked for, as many as fit in whole: one piece that leaves half a page is the
last.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

__all__ = ["CounterFile", "KernelFile", "NumberFile"]

_PIECE_BYTES = 1 << 12
_LEAST_OF_MORE_BYTES = _PIECE_BYTES // 2
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
        whole = b""
        try:
            while len(whole) < _LONGEST_BYTES:
                piece = os.pread(self._descriptor, _PIECE_BYTES, len(whole))
                whole += piece
                if len(piece) < _LEAST_OF_MORE_BYTES:
                    break
        except OSError:
            return b""
        return whole

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
        self._wanted = re.compile("|".join(names).encode())
        self._lines: list[tuple[int, bytes, str]] = []

    def values(self) -> dict[str, int]:
        """Name -> number, for the lines that are there."""
        lines = self.read().split(b"\n")
        try:
            return {name: int(lines[at].split(None, 2)[1]) for at, start, name in self._places(lines)}
        except (IndexError, ValueError):
            return {}

    def _places(self, lines: Sequence[bytes]) -> list[tuple[int, bytes, str]]:
        """(place, start, name) of the lines of interest, which stay where they are but for a change of the kernel's."""
        if not self._lines or not all(at < len(lines) and lines[at].startswith(start) for at, start, _ in self._lines):
            self._lines = []
            for at, line in enumerate(lines):
                words = line.split(None, 2)
                if len(words) > 1 and words[1].isdigit() and self._wanted.fullmatch(words[0].removesuffix(b":")):
                    self._lines.append((at, words[0], words[0].removesuffix(b":").decode()))
        return self._lines
