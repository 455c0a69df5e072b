"""Memory over time, watched from outside: a process's by kind, its files' page cache, and the system's.

The watch needs nothing of the process, so it covers it from its start and does not slow it down. What a device holds in
memory of its own is not seen from here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from umem.checkpoint.pagecache import cached_bytes_of_files
from umem.probes import MemoryProbe

__all__ = ["ProcessSample", "ProcessWatch", "series_of"]

_INTERVAL_S = 0.025


class ProcessSample(NamedTuple):
    """One moment. None where the system does not tell.

    Attributes
    ----------
    time_s
        Since the process was started.
    anonymous_bytes, file_bytes, shared_bytes, swapped_bytes
        Its memory by kind: RssAnon, RssFile, RssShmem, VmSwap.
    page_cache_bytes
        The page cache of its files.
    available_bytes, swap_used_bytes
        MemAvailable, and SwapTotal less SwapFree, of the system.
    pressure_us
        Time since boot for which some task of the system stood still for memory.
    minor_faults, major_faults
        The process's page faults since its start.
    """

    time_s: float
    anonymous_bytes: int | None
    file_bytes: int | None
    shared_bytes: int | None
    swapped_bytes: int | None
    page_cache_bytes: int | None
    available_bytes: int | None
    swap_used_bytes: int | None
    pressure_us: int | None
    minor_faults: int | None
    major_faults: int | None


class ProcessWatch:
    """Samples a process 40 times a second while it is open.

    Parameters
    ----------
    process
        Its number.
    started_s
        When it was started, by `time.monotonic()`.
    files
        The files whose page cache counts.
    proc
        Where the kernel's files are; tests give a tree of their own.
    """

    def __init__(self, process: int, started_s: float, files: Sequence[Path], proc: Path = Path("/proc")) -> None:
        self._directory = proc / str(process)
        self._started_s = started_s
        self._files = [str(path) for path in files]
        self._probe = MemoryProbe(proc)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umem-process-watch", daemon=True)
        self.samples: list[ProcessSample] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._probe.close()

    def _run(self) -> None:
        while (sample := self.sample()) is not None:
            self.samples.append(sample)
            if self._stop.wait(_INTERVAL_S):
                return

    def sample(self) -> ProcessSample | None:
        """Memory now; None when the process has ended."""
        try:
            status = dict(_sizes((self._directory / "status").read_text()))
            fields = (self._directory / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        if "RssAnon" not in status:  # ended, but not yet waited for
            return None
        system = self._probe.sample()
        swap_total, swap_free = system.swap_total_bytes, system.swap_free_bytes
        return ProcessSample(
            time_s=time.monotonic() - self._started_s,
            anonymous_bytes=status.get("RssAnon"),
            file_bytes=status.get("RssFile"),
            shared_bytes=status.get("RssShmem"),
            swapped_bytes=status.get("VmSwap"),
            page_cache_bytes=cached_bytes_of_files(self._files),
            available_bytes=system.available_bytes,
            swap_used_bytes=None if swap_total is None or swap_free is None else swap_total - swap_free,
            pressure_us=system.pressure_some_us,
            minor_faults=int(fields[7]),
            major_faults=int(fields[9]),
        )


def _sizes(status: str) -> list[tuple[str, int]]:
    lines = (line.split() for line in status.splitlines())
    return [(fields[0][:-1], int(fields[1]) * 1024) for fields in lines if fields[-1:] == ["kB"]]


def series_of(samples: Sequence[ProcessSample], until_s: float) -> dict[str, list[Any]]:
    """The samples up to a moment as JSON values, one list a field; times in milliseconds' precision."""
    kept = [sample._replace(time_s=round(sample.time_s, 3)) for sample in samples if sample.time_s <= until_s]
    return {name: [getattr(sample, name) for sample in kept] for name in ProcessSample._fields}
