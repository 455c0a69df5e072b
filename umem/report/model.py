"""The load report: what a load did, measured, beside what the plan had forecast. Data and JSON; no rendering."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from umem._display import Displayed
from umem.planning.plan import LoadPlan
from umem.probes.platform import Platform
from umem.probes.verdicts import Sample, Verdict

__all__ = ["PHASES", "REPORT_SCHEMA_VERSION", "LoadReport", "Peaks", "Stopwatch", "peaks_of"]

REPORT_SCHEMA_VERSION = 1

#: In the order in which a load goes through them.
PHASES = ("open", "build", "plan", "wait", "allocate", "read", "convert", "install")


class Stopwatch:
    """Wall time by phase. Phases may nest; the time of an inner one is not counted for the outer."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        self._inner: list[float] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what runs inside as `name`."""
        started_s = time.monotonic()
        self._inner.append(0.0)
        try:
            yield
        finally:
            ended_s = time.monotonic()
            inner = self._inner.pop()
            self.add(name, ended_s - started_s - inner)
            self.spans.append((name, started_s, ended_s))
            if self._inner:
                self._inner[-1] += ended_s - started_s

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` for `name`."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class Peaks:
    """The extremes of a series against its first sample, in bytes and counts; None where the machine does not tell.

    Attributes
    ----------
    anonymous_bytes, file_bytes, shared_bytes
        The most that the process's resident memory of each kind grew.
    page_cache_bytes
        The most page cache that the checkpoint's files gained; a load from a warm cache gains none.
    page_cache_left_bytes
        What they had gained at the end.
    available_dip_bytes
        The most that the system's MemAvailable fell.
    major_faults, swapped_in_pages, swapped_out_pages
        Events during the load; swap counts are the system's.
    """

    anonymous_bytes: int | None
    file_bytes: int | None
    shared_bytes: int | None
    page_cache_bytes: int | None
    page_cache_left_bytes: int | None
    available_dip_bytes: int | None
    major_faults: int | None
    swapped_in_pages: int | None
    swapped_out_pages: int | None


def peaks_of(samples: Sequence[Sample]) -> Peaks:
    """The extremes of `samples`, of which there is at least one."""
    memories = [sample.memory for sample in samples]
    cached = [sample.cached_file_bytes for sample in samples]

    def grown(name: str) -> int | None:
        return _growth([getattr(memory, name) for memory in memories])

    def counted(name: str) -> int | None:
        first, last = getattr(memories[0], name), getattr(memories[-1], name)
        return None if first is None or last is None else last - first

    return Peaks(
        anonymous_bytes=grown("anonymous_bytes"),
        file_bytes=grown("file_bytes"),
        shared_bytes=grown("shared_bytes"),
        page_cache_bytes=_growth(cached),
        page_cache_left_bytes=_growth([cached[0], cached[-1]]),
        available_dip_bytes=_growth([None if m.available_bytes is None else -m.available_bytes for m in memories]),
        major_faults=counted("major_faults"),
        swapped_in_pages=counted("swapped_in_pages"),
        swapped_out_pages=counted("swapped_out_pages"),
    )


def _growth(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) - known[0] if known and values[0] is not None else None


@dataclass(frozen=True, slots=True)
class LoadReport(Displayed):
    """What a load did.

    Attributes
    ----------
    plan
        The plan that ran.
    platform
        The machine's class and the device.
    reader, reader_reason
        Which readers read, and why.
    copier, copier_reason
        How what was read reached final storage, and why so.
    seconds
        Wall time by phase (`PHASES`). Reading and converting casts overlap; both are in `read`.
    thread_seconds
        Time summed over the reading threads: waiting for bytes, delivering them; and processor time of the watch.
    window_peak_bytes
        The most that was live in the window.
    huge_pages
        Whether final storage asked for huge pages; None where that was left to the system.
    available_bytes, available_source
        What the budget allowed, and where the number comes from.
    samples
        Memory over time.
    verdicts
        When the watch had the load go on slower and faster again, and why.
    spans
        (phase, start, end) by `time.monotonic()`.
    """

    plan: LoadPlan
    platform: Platform
    reader: str
    reader_reason: str
    copier: str
    copier_reason: str
    seconds: Mapping[str, float]
    thread_seconds: Mapping[str, float]
    window_peak_bytes: int
    huge_pages: bool | None
    available_bytes: int | None
    available_source: str
    samples: Sequence[Sample] = field(repr=False)
    verdicts: Sequence[Verdict]
    spans: Sequence[tuple[str, float, float]] = field(repr=False)

    @property
    def total_s(self) -> float:
        """Wall time of all phases."""
        return sum(self.seconds.values())

    @property
    def bytes_per_s(self) -> float:
        """Bytes read over the wall time of reading; 0 where nothing was read."""
        read_s = self.seconds.get("read", 0.0) + self.seconds.get("convert", 0.0)
        return self.plan.forecast.read_bytes / read_s if read_s > 0 else 0.0

    @property
    def peaks(self) -> Peaks:
        """The extremes of the series."""
        return peaks_of(self.samples)

    @property
    def measured_peak_bytes(self) -> int | None:
        """The most that the load added: the process's anonymous and shared memory with the files' page cache.

        The sum is taken sample by sample, so it is no more than the sum of the single peaks.
        """
        sums = [_physical(sample) for sample in self.samples]
        return _growth(sums)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; sizes in bytes, times in seconds. The series is relative to its first sample."""
        peaks = self.peaks
        plan = self.plan.to_json()
        del plan["groups"]
        return {
            "schema": "umem.report",
            "version": REPORT_SCHEMA_VERSION,
            "plan": plan,
            "platform": self.platform.to_json(),
            "reader": {"name": self.reader, "reason": self.reader_reason},
            "copier": {"name": self.copier, "reason": self.copier_reason},
            "budget": {"available_bytes": self.available_bytes, "source": self.available_source},
            "seconds": {"total": self.total_s, **{name: self.seconds.get(name, 0.0) for name in PHASES}},
            "thread_seconds": dict(self.thread_seconds),
            "bytes_per_s": self.bytes_per_s,
            "huge_pages": self.huge_pages,
            "peak": {
                "forecast_bytes": self.plan.forecast.peak_bytes,
                "measured_bytes": self.measured_peak_bytes,
                "window_bytes": self.window_peak_bytes,
                **{name: getattr(peaks, name) for name in peaks.__dataclass_fields__},
            },
            "series": [sample.to_json(self.samples[0]) for sample in self.samples],
            "verdicts": [verdict.to_json(self.started_s) for verdict in self.verdicts],
            "phases": [
                {"phase": name, "start_s": start - self.started_s, "end_s": end - self.started_s}
                for name, start, end in self.spans
            ],
        }

    @property
    def started_s(self) -> float:
        """The time of the first sample, by `time.monotonic()`."""
        return self.samples[0].memory.time_s


def _physical(sample: Sample) -> int | None:
    if sample.memory.anonymous_bytes is None:
        return None
    return sample.own_bytes + (sample.cached_file_bytes or 0)
