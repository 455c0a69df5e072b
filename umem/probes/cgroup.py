"""Memory control groups, v1 and v2: the limits on this process, its own group's and every ancestor's.

A group is a ceiling on a budget and no guard: on machines with one memory for processor and accelerator, what the
accelerator's driver takes is not charged to any group (measured by others on GB10: 12 GiB of CUDA memory inside a limit
of 8 GiB, without an event).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from umem.probes.kernel_files import CounterFile, KernelFile, NumberFile

__all__ = ["CgroupMemory", "CgroupProbe", "read_cgroup", "tightest"]

_NO_LIMIT = 1 << 60  # v1 writes "none" as the largest multiple of a page


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The memory of a control group.

    Attributes
    ----------
    path
        Its directory.
    limit_bytes
        What it may use: the smaller of memory.max and memory.high (v2), or memory.limit_in_bytes (v1). None: no limit.
    used_bytes
        What it uses, page cache included. This and the next two are read only where there is a limit.
    cache_bytes
        Page cache in it, which the kernel gives up before it kills.
    peak_bytes
        The most that it used since it was made, or since that was reset.
    """

    path: str
    limit_bytes: int | None
    used_bytes: int | None
    cache_bytes: int = 0
    peak_bytes: int | None = None

    @property
    def headroom_bytes(self) -> int | None:
        """What may still be taken: the limit less what is in use and cannot be given up; None without a limit."""
        if self.limit_bytes is None or self.used_bytes is None:
            return None
        return max(0, self.limit_bytes - (self.used_bytes - self.cache_bytes))


def tightest(groups: Iterable[CgroupMemory]) -> CgroupMemory | None:
    """The group that leaves the least memory, or None where none limits it."""
    limited = [(group.headroom_bytes, group) for group in groups if group.headroom_bytes is not None]
    return min(limited, key=lambda pair: pair[0], default=(0, None))[1]


class _Names(NamedTuple):
    limits: tuple[str, ...]
    used: str
    peak: str
    cache: tuple[str, ...]


_V1 = _Names(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    "memory.max_usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _Names(("memory.max", "memory.high"), "memory.current", "memory.peak", ("inactive_file", "active_file"))


class _Group:
    """One directory's files, kept open."""

    def __init__(self, directory: Path, names: _Names) -> None:
        self._path = str(directory)
        self._limits = [NumberFile(directory / name) for name in names.limits]
        self._used = NumberFile(directory / names.used)
        self._peak = NumberFile(directory / names.peak)
        self._stat = CounterFile(directory / "memory.stat", names.cache)

    def sample(self) -> CgroupMemory:
        limits = [value for file in self._limits if (value := file.number()) is not None and value < _NO_LIMIT]
        if not limits:
            return CgroupMemory(self._path, None, None)
        used = self._used.number()
        cache = sum(self._stat.values().values()) if used is not None else 0
        return CgroupMemory(self._path, min(limits), used, min(cache, used or 0), self._peak.number())

    def close(self) -> None:
        for file in (*self._limits, self._used, self._peak, self._stat):
            file.close()


class CgroupProbe:
    """Samples this process's control group and its ancestors, and notices when the process is moved to another.

    Parameters
    ----------
    proc, cgroups
        Where the kernel's files are.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._cgroups = cgroups
        self._membership = KernelFile(proc / "self/cgroup")
        self._member_of = b""
        self._groups: list[_Group] = []

    def sample(self) -> tuple[CgroupMemory, ...]:
        """The groups that tell anything of their memory, the process's own first.

        A process inside a container sees its own group as the root of `cgroups`; outside, every ancestor is looked at.
        """
        member_of = self._membership.read()
        if member_of != self._member_of:
            self._close_groups()
            self._member_of = member_of
            self._groups = _groups_of(member_of.decode("utf-8", "replace"), self._cgroups)
        return tuple(group.sample() for group in self._groups)

    def close(self) -> None:
        """Close the files."""
        self._membership.close()
        self._close_groups()

    def _close_groups(self) -> None:
        for group in self._groups:
            group.close()
        self._groups = []


def read_cgroup(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> CgroupMemory | None:
    """The control group that leaves this process the least memory, or None where none limits it."""
    probe = CgroupProbe(proc, cgroups)
    try:
        return tightest(probe.sample())
    finally:
        probe.close()


def _groups_of(member_of: str, cgroups: Path) -> list[_Group]:
    """The groups along every path of `/proc/self/cgroup` that controls memory."""
    groups = []
    for line in member_of.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            groups += _along(cgroups, path, _V2) or _along(cgroups / "unified", path, _V2)
        elif "memory" in controllers.split(","):
            groups += _along(cgroups / "memory", path, _V1)
    return groups


def _along(root: Path, path: str, names: _Names) -> list[_Group]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    directories = [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [_Group(directory, names) for directory in directories if (directory / names.used).exists()]
