"""What a measured process counts of itself: time, processor, faults, page cache of the files, and its peak of memory.

Peak memory is the cgroup's high-water mark over what is measured less what was in use just before, page cache that it
fills included; where no cgroup can be made, the process's own resident high-water mark.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from umem.checkpoint.pagecache import cached_bytes_of_files
from umem.measurement.cgroups import MemoryGroup
from umem.measurement.page_cache import cached_fraction

__all__ = ["PeakMemory", "machine_busy_s", "measured", "request_of_child", "status_bytes"]

_Result = TypeVar("_Result")


def request_of_child() -> dict[str, Any] | None:
    """What the parent asks of this process; None if it is no child."""
    if sys.argv[1:2] != ["--child"]:
        return None
    request: dict[str, Any] = json.loads(sys.argv[2])
    return request


def measured(
    load: Callable[[], _Result], request: Mapping[str, Any], *, collects_first: bool = True
) -> tuple[_Result, dict[str, Any]]:
    """The result of `load` and what it took, in bytes and seconds.

    Parameters
    ----------
    request
        What the parent sent.
    collects_first
        Collect the garbage of before, so that this is not done in the load's time. That takes a while after large
        imports, which counts where the process's whole life is measured.
    """
    files = [Path(path) for path in request["files"]]
    if collects_first:
        gc.collect()
    peak = PeakMemory(MemoryGroup(Path(request["group"][0]), request["group"][1]) if request["group"] else None)
    fraction, cached_before = cached_fraction(files), cached_bytes_of_files(map(str, files))
    usage_before, busy_before_s = resource.getrusage(resource.RUSAGE_SELF), machine_busy_s()
    started_s = time.monotonic()
    result = load()
    loaded_s = time.monotonic()
    busy_s, usage = machine_busy_s() - busy_before_s, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    return result, {
        "load_s": loaded_s - started_s,
        "loaded_s": loaded_s,
        "cpu_s": cpu_s,
        "others_cpu_s": max(0.0, busy_s - cpu_s),
        "minor_faults": usage.ru_minflt - usage_before.ru_minflt,
        "major_faults": usage.ru_majflt - usage_before.ru_majflt,
        "peak_bytes": peak.beyond_base_bytes(),
        "base_bytes": peak.base_bytes,
        "peak_source": peak.source,
        "cached_fraction": fraction,
        "cached_before_bytes": cached_before,
        "cached_after_bytes": cached_bytes_of_files(map(str, files)),
    }


class PeakMemory:
    """The most memory taken since it was made: by the cgroup's mark, else by the process's own."""

    def __init__(self, group: MemoryGroup | None) -> None:
        self._read_peak: Callable[[], int] = lambda: status_bytes("VmHWM")
        self.source = "resident memory of the process"
        if group is not None:
            with contextlib.suppress(OSError):
                self._read_peak, self.source = group.restarted_peak(), "cgroup, page cache included"
                self.base_bytes = group.used_bytes
                return
        Path("/proc/self/clear_refs").write_text("5")
        self.base_bytes = status_bytes("VmRSS")

    def beyond_base_bytes(self) -> int:
        """The peak less what was in use at the start."""
        return self._read_peak() - self.base_bytes


def status_bytes(name: str) -> int:
    """A size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def machine_busy_s() -> float:
    """Processor seconds that the machine has spent on anything since boot, its host's on other machines included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
