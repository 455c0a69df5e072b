"""Real limits for tests: memory cgroups, v1 and v2, in which a fresh process runs, and swap."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from umem.measurement import cgroups


class MemoryGroup(cgroups.MemoryGroup):
    """A memory cgroup that can run code."""

    def allow_swap(self, count: int, limit: int) -> None:
        """Let the group swap out `count` bytes; `limit` is its limit on memory, which is set already."""
        if self.version == 1:
            (self.path / "memory.memsw.limit_in_bytes").write_text(str(limit + count))
            (self.path / "memory.swappiness").write_text("60")
        else:
            (self.path / "memory.swap.max").write_text(str(count))

    @property
    def swapped_bytes(self) -> int:
        if self.version == 1:
            stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
            return int(stat.get("total_swap", 0))
        return int((self.path / "memory.swap.current").read_text())

    @property
    def oom_kills(self) -> int:
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        counts = dict(line.split() for line in (self.path / name).read_text().splitlines())
        return int(counts["oom_kill"])

    def run(self, code: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run Python code in a fresh process of this group."""
        command: Sequence[str] = [sys.executable, "-c", code, *arguments]
        return subprocess.run(
            command, preexec_fn=self.join, capture_output=True, text=True, timeout=timeout, check=False
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
    with cgroups.new_memory_group("umem-test") as group:
        if group is None:
            pytest.skip("no memory cgroup can be made")
        yield MemoryGroup(*group)
