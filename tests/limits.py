"""Real limits for tests: memory cgroups, v1 and v2, in which a fresh process runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from umem.measurement import cgroups


class MemoryGroup(cgroups.MemoryGroup):
    """A memory cgroup that can run code."""

    def run(self, code: str, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run Python code in a fresh process of this group."""
        command: Sequence[str] = [sys.executable, "-c", code, *arguments]
        return subprocess.run(
            command, preexec_fn=self.join, capture_output=True, text=True, timeout=timeout, check=False
        )


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A fresh memory cgroup, removed afterwards; skips where none can be made."""
    with cgroups.new_memory_group("umem-test") as group:
        if group is None:
            pytest.skip("no memory cgroup can be made")
        yield MemoryGroup(*group)
