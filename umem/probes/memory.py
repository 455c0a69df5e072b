"""The machine's memory, sampled into immutable records: meminfo, vmstat, buddyinfo, pressure, groups, this process.

One function samples, `MemoryProbe.sample`; it keeps its files open and parses only what it gives, so that a watch can
call it many times a second (about 100 microseconds on a small virtual machine). Events are counters since boot, and a
reader takes differences. Unknown values are None, never 0. Devices and other processes are not sampled here.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from umem.probes.cgroup import CgroupMemory, CgroupProbe, tightest
from umem.probes.kernel_files import CounterFile, KernelFile

__all__ = ["MemoryProbe", "MemorySnapshot", "free_in_blocks_of", "is_virtual_machine"]

_MEMINFO = (
    "MemTotal",
    "MemFree",
    "MemAvailable",
    "SwapTotal",
    "SwapFree",
    r"Active\(file\)",
    r"Inactive\(file\)",
    "HugePages_Total",
    "HugePages_Free",
    "Hugepagesize",
)
_VMSTAT = (
    "pswpin",
    "pswpout",
    "pgmajfault",
    "workingset_refault_file",
    "workingset_refault_anon",
    r"allocstall_\w+",
    "compact_stall",
    "compact_fail",
    "pgscan_direct",
    "oom_kill",
)
_STATUS = ("RssAnon", "RssFile", "RssShmem", "VmHWM", "VmSwap")
_PRESSURE = re.compile(rb"(some|full) avg10=([\d.]+) avg60=[\d.]+ avg300=[\d.]+ total=(\d+)")
_BLOCK_ZONES = ("Normal", "Movable")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySnapshot:
    """Memory at one moment: bytes, and counts of events since boot. None is unknown.

    Attributes
    ----------
    time_s
        `time.monotonic()`.
    total_bytes, free_bytes, available_bytes, swap_total_bytes, swap_free_bytes
        MemTotal, MemFree, MemAvailable, SwapTotal and SwapFree of the system.
    file_cache_bytes
        Page cache of files, Active(file) + Inactive(file), which the kernel can give up.
    huge_pages, free_huge_pages, huge_page_bytes
        The pool of huge pages set aside (hugetlb): HugePages_Total, HugePages_Free, Hugepagesize. MemAvailable leaves
        it out, and no tensor can come from it.
    page_bytes, free_blocks
        The page size, and the number of free blocks of 2**i pages at index i (`/proc/buddyinfo`, the zones that large
        allocations come from).
    cgroups
        The control groups on this process, its own first.
    anonymous_bytes, file_bytes, shared_bytes, swapped_bytes
        This process's memory by kind: RssAnon, RssFile, RssShmem, and VmSwap.
    peak_resident_bytes
        Its VmHWM.
    major_faults
        Its page faults that had to read.
    pressure_some_us, pressure_full_us
        Time for which some, or all, tasks of the system stood still for memory (`/proc/pressure/memory`).
    pressure_some_percent, pressure_full_percent
        The same as a share of the last 10 seconds, as the kernel averages it.
    swapped_in_pages, swapped_out_pages
        pswpin and pswpout.
    refaulted_file_pages, refaulted_anonymous_pages
        workingset_refault_file and _anon: pages that were dropped and were needed again.
    allocation_stalls
        allocstall of all zones: allocations that had to reclaim memory themselves.
    directly_scanned_pages
        pgscan_direct: pages that they looked at for it.
    compaction_stalls, compaction_failures
        compact_stall and compact_fail: allocations that had to make large blocks themselves, and those in vain.
    system_major_faults, oom_kills
        pgmajfault and oom_kill.
    """

    time_s: float
    total_bytes: int | None = None
    free_bytes: int | None = None
    available_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    file_cache_bytes: int | None = None
    huge_pages: int | None = None
    free_huge_pages: int | None = None
    huge_page_bytes: int | None = None
    page_bytes: int | None = None
    free_blocks: tuple[int, ...] | None = None
    cgroups: tuple[CgroupMemory, ...] = ()
    anonymous_bytes: int | None = None
    file_bytes: int | None = None
    shared_bytes: int | None = None
    swapped_bytes: int | None = None
    peak_resident_bytes: int | None = None
    major_faults: int | None = None
    pressure_some_us: int | None = None
    pressure_full_us: int | None = None
    pressure_some_percent: float | None = None
    pressure_full_percent: float | None = None
    swapped_in_pages: int | None = None
    swapped_out_pages: int | None = None
    refaulted_file_pages: int | None = None
    refaulted_anonymous_pages: int | None = None
    allocation_stalls: int | None = None
    directly_scanned_pages: int | None = None
    compaction_stalls: int | None = None
    compaction_failures: int | None = None
    system_major_faults: int | None = None
    oom_kills: int | None = None

    @property
    def cgroup(self) -> CgroupMemory | None:
        """The tightest limit on this process, or None without one."""
        return tightest(self.cgroups)

    @property
    def huge_page_pool_bytes(self) -> int | None:
        """The free part of the pool of huge pages, in bytes."""
        if self.free_huge_pages is None or self.huge_page_bytes is None:
            return None
        return self.free_huge_pages * self.huge_page_bytes

    def free_in_blocks_of(self, block_bytes: int) -> int | None:
        """Free memory in blocks of at least `block_bytes`, in bytes; None where the kernel keeps no blocks so large.

        Memory can be free and yet too fragmented for large blocks, for which the kernel then compacts at length.
        """
        if self.free_blocks is None or self.page_bytes is None:
            return None
        sizes = [self.page_bytes << order for order in range(len(self.free_blocks))]
        if not sizes or sizes[-1] < block_bytes:
            return None
        return sum(count * size for count, size in zip(self.free_blocks, sizes, strict=True) if size >= block_bytes)

    def to_json(self) -> dict[str, Any]:
        """The snapshot as JSON values. The groups' paths are left out: they name containers and users."""
        facts = asdict(self)
        for group in facts["cgroups"]:
            del group["path"]
        return facts

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """The snapshot that `to_json` gave; what is missing is unknown."""
        known = {field.name: facts[field.name] for field in fields(cls) if field.name in facts}
        known["cgroups"] = tuple(CgroupMemory(path="", **group) for group in facts.get("cgroups") or ())
        if known.get("free_blocks") is not None:
            known["free_blocks"] = tuple(known["free_blocks"])
        return cls(**{"time_s": 0.0} | known)


class MemoryProbe:
    """Samples memory; close it, or use it as a context manager.

    Parameters
    ----------
    proc, cgroups
        Where the kernel's files are; tests give a tree of their own.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._meminfo = CounterFile(proc / "meminfo", _MEMINFO)
        self._vmstat = CounterFile(proc / "vmstat", _VMSTAT)
        self._status = CounterFile(proc / "self/status", _STATUS)
        self._stat = KernelFile(proc / "self/stat")
        self._buddyinfo = KernelFile(proc / "buddyinfo")
        self._pressure = KernelFile(proc / "pressure/memory")
        self._cgroups = CgroupProbe(proc, cgroups)
        self._page_bytes = os.sysconf("SC_PAGESIZE")
        self._counters: dict[str, Any] = {}
        self._counters_s: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in (self._meminfo, self._vmstat, self._status, self._stat, self._buddyinfo, self._pressure):
            file.close()
        self._cgroups.close()

    def sample(self, *, counters_within_s: float = 0.0) -> MemorySnapshot:
        """Memory now.

        Parameters
        ----------
        counters_within_s
            How old the free blocks and the counts of events may be; reading them is half of a sample's cost.
        """
        now_s = time.monotonic()
        if self._counters_s is None or now_s - self._counters_s > counters_within_s:
            self._counters, self._counters_s = self._read_counters(), now_s
        meminfo, status = self._meminfo.values(), self._status.values()
        return MemorySnapshot(
            time_s=now_s,
            total_bytes=_kib(meminfo, "MemTotal"),
            free_bytes=_kib(meminfo, "MemFree"),
            available_bytes=_kib(meminfo, "MemAvailable"),
            swap_total_bytes=_kib(meminfo, "SwapTotal"),
            swap_free_bytes=_kib(meminfo, "SwapFree"),
            file_cache_bytes=_sum(_kib(meminfo, "Active(file)"), _kib(meminfo, "Inactive(file)")),
            huge_pages=meminfo.get("HugePages_Total"),
            free_huge_pages=meminfo.get("HugePages_Free"),
            huge_page_bytes=_kib(meminfo, "Hugepagesize"),
            page_bytes=self._page_bytes,
            cgroups=self._cgroups.sample(),
            anonymous_bytes=_kib(status, "RssAnon"),
            file_bytes=_kib(status, "RssFile"),
            shared_bytes=_kib(status, "RssShmem"),
            swapped_bytes=_kib(status, "VmSwap"),
            peak_resident_bytes=_kib(status, "VmHWM"),
            **self._counters,
        )

    def _read_counters(self) -> dict[str, Any]:
        vmstat, pressure = self._vmstat.values(), _pressure(self._pressure.read())
        some, full = pressure.get("some", (None, None)), pressure.get("full", (None, None))
        return {
            "free_blocks": _free_blocks(self._buddyinfo.read().decode("ascii", "replace")),
            "major_faults": _major_faults(self._stat.read()),
            "pressure_some_us": some[0],
            "pressure_full_us": full[0],
            "pressure_some_percent": some[1],
            "pressure_full_percent": full[1],
            "swapped_in_pages": vmstat.get("pswpin"),
            "swapped_out_pages": vmstat.get("pswpout"),
            "refaulted_file_pages": vmstat.get("workingset_refault_file"),
            "refaulted_anonymous_pages": vmstat.get("workingset_refault_anon"),
            "allocation_stalls": _sum(*(count for name, count in vmstat.items() if name.startswith("allocstall_"))),
            "directly_scanned_pages": vmstat.get("pgscan_direct"),
            "compaction_stalls": vmstat.get("compact_stall"),
            "compaction_failures": vmstat.get("compact_fail"),
            "system_major_faults": vmstat.get("pgmajfault"),
            "oom_kills": vmstat.get("oom_kill"),
        }


def _kib(values: Mapping[str, int], name: str) -> int | None:
    value = values.get(name)
    return None if value is None else value * 1024


def _sum(*values: int | None) -> int | None:
    """The sum of what is known; None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _major_faults(stat: bytes) -> int | None:
    try:
        return int(stat.rpartition(b")")[2].split()[9])
    except (ValueError, IndexError):
        return None


def _pressure(text: bytes) -> dict[str, tuple[int, float]]:
    """`some` and `full` -> (microseconds since boot, percent of the last 10 s)."""
    return {kind.decode(): (int(total), float(average)) for kind, average, total in _PRESSURE.findall(text)}


def _free_blocks(buddyinfo: str) -> tuple[int, ...] | None:
    """Free blocks by order, over the zones for large allocations; over all zones where there are none of those."""
    rows = [line.split() for line in buddyinfo.splitlines()]
    zones = [(row[3], row[4:]) for row in rows if len(row) > 4]
    chosen = [counts for zone, counts in zones if zone in _BLOCK_ZONES] or [counts for _, counts in zones]
    if not chosen:
        return None
    return tuple(sum(map(int, counts)) for counts in zip(*chosen, strict=True))


def free_in_blocks_of(block_bytes: int, proc: Path = Path("/proc")) -> int | None:
    """Free memory that lies in blocks of at least `block_bytes` now, as `MemorySnapshot.free_in_blocks_of`."""
    with MemoryProbe(proc) as probe:
        return probe.sample().free_in_blocks_of(block_bytes)


def is_virtual_machine(proc: Path = Path("/proc")) -> bool:
    """Whether the processor says that it runs under a hypervisor (the `hypervisor` flag of x86 in `/proc/cpuinfo`)."""
    try:
        return re.search(r"^flags\s*:.*\bhypervisor\b", (proc / "cpuinfo").read_text(), re.MULTILINE) is not None
    except OSError:
        return False
