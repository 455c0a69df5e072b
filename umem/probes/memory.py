"""The machine's memory, sampled into immutable records: /proc/meminfo, /proc/vmstat, the control group, this process.

One function samples, `MemoryProbe.sample`; it keeps its files open and takes some tens of microseconds. Unknown
values are None, never 0; an absent limit is None too and says so in `cgroup_limit_bytes`. Devices are `platform`'s
business.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

__all__ = ["CgroupMemory", "MemoryProbe", "MemorySnapshot", "free_in_blocks_of", "is_virtual_machine", "read_cgroup"]

_NO_LIMIT = 1 << 60  # cgroup v1 writes "none" as the largest multiple of a page


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The tightest memory limit among a process's control group and its ancestors.

    Attributes
    ----------
    path
        The directory of the control group that sets it.
    limit_bytes, used_bytes
        Its limit and usage; usage includes page cache.
    cache_bytes
        Clean page cache in it, which the kernel gives up before it kills.
    """

    path: str
    limit_bytes: int
    used_bytes: int
    cache_bytes: int

    @property
    def headroom_bytes(self) -> int:
        """What may still be taken: the limit less what is in use and cannot be given up."""
        return max(0, self.limit_bytes - (self.used_bytes - self.cache_bytes))


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """Memory at one moment, in bytes and counts since boot or process start.

    Attributes
    ----------
    time_s
        `time.monotonic()`.
    total_bytes, free_bytes, available_bytes, swap_total_bytes, swap_free_bytes
        MemTotal, MemFree, MemAvailable, SwapTotal and SwapFree of the system.
    cgroup
        The tightest limit on this process, or None without one.
    anonymous_bytes, file_bytes, shared_bytes
        This process's resident memory by kind: RssAnon, RssFile, RssShmem.
    peak_resident_bytes
        Its VmHWM.
    major_faults
        Its page faults that had to read.
    swapped_in_pages, swapped_out_pages
        The system's pswpin and pswpout.
    """

    time_s: float
    total_bytes: int | None
    free_bytes: int | None
    available_bytes: int | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None
    cgroup: CgroupMemory | None
    anonymous_bytes: int | None
    file_bytes: int | None
    shared_bytes: int | None
    peak_resident_bytes: int | None
    major_faults: int | None
    swapped_in_pages: int | None
    swapped_out_pages: int | None

    def to_json(self) -> dict[str, Any]:
        """The snapshot as JSON values."""
        return asdict(self)


class _Table:
    """A kept-open file of `name value` lines, read anew by position."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = None

    def values(self) -> dict[str, int]:
        if self._descriptor is None:
            return {}
        try:
            text = os.pread(self._descriptor, 1 << 16, 0).decode("ascii", "replace")
        except OSError:
            return {}
        return {name: int(value) for name, value in re.findall(r"^(\w+):?\s+(\d+)", text, re.MULTILINE)}

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class MemoryProbe:
    """Samples memory; close it, or use it as a context manager.

    Parameters
    ----------
    proc, cgroups
        Where the kernel's files are; tests give a tree of their own.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._cgroups = proc, cgroups
        self._meminfo = _Table(proc / "meminfo")
        self._vmstat = _Table(proc / "vmstat")
        self._status = _Table(proc / "self/status")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for table in (self._meminfo, self._vmstat, self._status):
            table.close()

    def sample(self) -> MemorySnapshot:
        """Memory now."""
        meminfo, status, vmstat = self._meminfo.values(), self._status.values(), self._vmstat.values()
        return MemorySnapshot(
            time_s=time.monotonic(),
            total_bytes=_kib(meminfo, "MemTotal"),
            free_bytes=_kib(meminfo, "MemFree"),
            available_bytes=_kib(meminfo, "MemAvailable"),
            swap_total_bytes=_kib(meminfo, "SwapTotal"),
            swap_free_bytes=_kib(meminfo, "SwapFree"),
            cgroup=read_cgroup(self._proc, self._cgroups),
            anonymous_bytes=_kib(status, "RssAnon"),
            file_bytes=_kib(status, "RssFile"),
            shared_bytes=_kib(status, "RssShmem"),
            peak_resident_bytes=_kib(status, "VmHWM"),
            major_faults=self._major_faults(),
            swapped_in_pages=vmstat.get("pswpin"),
            swapped_out_pages=vmstat.get("pswpout"),
        )

    def _major_faults(self) -> int | None:
        try:
            text = (self._proc / "self/stat").read_text()
            return int(text.rpartition(")")[2].split()[9])
        except (OSError, ValueError, IndexError):
            return None


def _kib(values: Mapping[str, int], name: str) -> int | None:
    value = values.get(name)
    return None if value is None else value * 1024


def read_cgroup(proc: Path, cgroups: Path) -> CgroupMemory | None:
    """The control group (v1 or v2) that leaves this process the least memory, or None where none limits it.

    A process inside a container sees its own group as the root of `cgroups`; outside, every ancestor is looked at.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            found += _limits(cgroups, path, _read_v2) or _limits(cgroups / "unified", path, _read_v2)
        elif "memory" in controllers.split(","):
            found += _limits(cgroups / "memory", path, _read_v1)
    return min(found, key=lambda limit: limit.headroom_bytes, default=None)


def _limits(root: Path, path: str, read: Any) -> list[CgroupMemory]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    directories = [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [limit for limit in map(read, directories) if limit is not None]


def _read_v2(directory: Path) -> CgroupMemory | None:
    limits = [_number(directory / name) for name in ("memory.max", "memory.high")]
    limit = min((value for value in limits if value is not None), default=None)
    used = _number(directory / "memory.current")
    return _limit(directory, limit, used, ("inactive_file", "active_file"))


def _read_v1(directory: Path) -> CgroupMemory | None:
    limit = _number(directory / "memory.limit_in_bytes")
    used = _number(directory / "memory.usage_in_bytes")
    return _limit(directory, limit, used, ("total_inactive_file", "total_active_file"))


def _limit(directory: Path, limit: int | None, used: int | None, cache: tuple[str, ...]) -> CgroupMemory | None:
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    try:
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        cached = sum(int(stat.get(name, 0)) for name in cache)
    except (OSError, ValueError):
        cached = 0
    return CgroupMemory(str(directory), limit, used, min(cached, used))


def _number(path: Path) -> int | None:
    """The number in a file; None where the file is absent or says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def free_in_blocks_of(block_bytes: int, proc: Path = Path("/proc")) -> int | None:
    """Free memory that lies in blocks of at least `block_bytes` (`/proc/buddyinfo`), in bytes; None if unknown.

    Memory can be free and yet too fragmented for large pages, for which the kernel then compacts at length.
    """
    try:
        lines = (proc / "buddyinfo").read_text().splitlines()
    except OSError:
        return None
    page_bytes = os.sysconf("SC_PAGESIZE")
    total = 0
    for line in lines:
        for order, count in enumerate(line.split()[4:]):
            size = page_bytes << order
            total += int(count) * size if size >= block_bytes else 0
    return total


def is_virtual_machine(proc: Path = Path("/proc")) -> bool:
    """Whether the processor says that it runs under a hypervisor (the `hypervisor` flag of x86 in `/proc/cpuinfo`)."""
    try:
        return re.search(r"^flags\s*:.*\bhypervisor\b", (proc / "cpuinfo").read_text(), re.MULTILINE) is not None
    except OSError:
        return False
