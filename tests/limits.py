"""Real limits for tests: memory cgroups, v1 and v2, in which a fresh process runs, and swap."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup(NamedTuple):
    """A memory cgroup; `peak_bytes` counts page cache too."""

    path: Path
    version: int

    @property
    def peak_bytes(self) -> int:
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.path / name).read_text())

    def reset_peak(self) -> None:
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        (self.path / name).write_text("0")

    @property
    def used_bytes(self) -> int:
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.path / name).read_text())

    def limit(self, count: int) -> None:
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.path / name).write_text(str(count))

    def allow_swap(self, count: int, limit: int) -> None:
        """Let the group swap out `count` bytes; `limit` is its limit on memory, which is set already."""
        name, value = (
            ("memory.memsw.limit_in_bytes", limit + count) if self.version == 1 else ("memory.swap.max", count)
        )
        (self.path / name).write_text(str(value))

    def enter(self) -> None:
        """Move the calling process into the group."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def swapped_bytes(self) -> int:
        if self.version == 1:
            return max(0, int((self.path / "memory.memsw.usage_in_bytes").read_text()) - self.used_bytes)
        return int((self.path / "memory.swap.current").read_text())

    @property
    def oom_kills(self) -> int:
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        counts = dict(line.split() for line in (self.path / name).read_text().splitlines())
        return int(counts["oom_kill"])

    def run(self, code: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run Python code in a fresh process of this group."""
        procs = self.path / "cgroup.procs"
        command: Sequence[str] = [sys.executable, "-c", code, *arguments]
        return subprocess.run(
            command,
            preexec_fn=lambda: procs.write_text(str(os.getpid())) and None,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@contextmanager
def swap_file(directory: Path, count: int) -> Iterator[Path]:
    """Swap of `count` bytes in a file of its own; skips where none can be had."""
    path = directory / "swap"
    path.write_bytes(bytes(count))
    path.chmod(0o600)
    made = subprocess.run(["mkswap", str(path)], capture_output=True, text=True, check=False)
    on = subprocess.run(["swapon", str(path)], capture_output=True, text=True, check=False)
    if made.returncode or on.returncode:
        path.unlink()
        pytest.skip(f"no swap can be had: {made.stderr.strip()} {on.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["swapoff", str(path)], check=False)
        path.unlink()


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A fresh memory cgroup, removed afterwards; skips where none can be made."""
    version, parent = (1, ROOT / "memory") if (ROOT / "memory").is_dir() else (2, ROOT)
    path = parent / f"umem-test-{uuid.uuid4().hex[:8]}"
    try:
        if version == 2:
            (parent / "cgroup.subtree_control").write_text("+memory")
        path.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    group = MemoryGroup(path, version)
    try:
        group.used_bytes  # noqa: B018 - reads a file that must be there
        yield group
    finally:
        for _ in range(50):
            try:
                path.rmdir()
                break
            except OSError:
                time.sleep(0.05)
