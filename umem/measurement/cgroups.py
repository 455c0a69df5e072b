"""Memory cgroups, v1 and v2: made, joined, limited, read and removed. Making one needs root.

Usage counts what the kernel charges to the group: anonymous memory and the page cache that its processes fill. What
limits this process itself is the business of the probes.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

__all__ = ["ROOT", "MemoryGroup", "new_memory_group"]

ROOT = Path("/sys/fs/cgroup")
_REMOVAL_TRIES, _REMOVAL_PAUSE_S = 100, 0.05


class MemoryGroup(NamedTuple):
    """A memory cgroup: its directory, and the version of its interface."""

    path: Path
    version: int

    def join(self) -> None:
        """Put this process into the group."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def limit(self, count: int) -> None:
        """Allow `count` bytes and no swap."""
        if self.version == 1:
            (self.path / "memory.limit_in_bytes").write_text(str(count))
            self._write_if_there("memory.memsw.limit_in_bytes", str(count))
            self._write_if_there("memory.swappiness", "0")
        else:
            (self.path / "memory.max").write_text(str(count))
            self._write_if_there("memory.swap.max", "0")

    @property
    def used_bytes(self) -> int:
        """Bytes charged to the group now."""
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.path / name).read_text())

    def restarted_peak(self) -> Callable[[], int]:
        """Start the high-water mark anew; the result reads it, in bytes.

        Raises
        ------
        OSError
            The kernel cannot: v2 needs Linux 6.12, where a reset holds for the descriptor that asked for it.
        """
        if self.version == 1:
            peak = self.path / "memory.max_usage_in_bytes"
            peak.write_text("0")
            return lambda: int(peak.read_text())
        descriptor = os.open(self.path / "memory.peak", os.O_RDWR | os.O_CLOEXEC)
        os.write(descriptor, b"reset\n")
        return lambda: int(os.pread(descriptor, 64, 0))

    def _write_if_there(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError):  # without swap accounting there is no such file
            (self.path / name).write_text(text)


@contextmanager
def new_memory_group(name: str) -> Iterator[MemoryGroup | None]:
    """A fresh group called `name` and some random letters, removed afterwards; None where none can be made."""
    version, parent = (1, ROOT / "memory") if (ROOT / "memory").is_dir() else (2, ROOT)
    path = parent / f"{name}-{uuid.uuid4().hex[:8]}"
    try:
        yield _made(path, version)
    finally:
        for _ in range(_REMOVAL_TRIES):
            if not path.exists():
                break
            with contextlib.suppress(OSError):  # busy for a moment after its last process has ended
                path.rmdir()
                break
            time.sleep(_REMOVAL_PAUSE_S)


def _made(path: Path, version: int) -> MemoryGroup | None:
    group = MemoryGroup(path, version)
    try:
        if version == 2:
            (path.parent / "cgroup.subtree_control").write_text("+memory")
        path.mkdir()
        group.used_bytes  # noqa: B018 - reads a file that must be there
    except OSError:
        return None
    return group
