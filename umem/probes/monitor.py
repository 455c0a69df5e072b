"""The watch during a load: a thread that samples memory into a series, from before the first allocation to the last.

It records; it does not judge yet. The thread needs the interpreter only for some tens of microseconds a sample.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

from umem.probes.memory import MemoryProbe, MemorySnapshot

__all__ = ["Monitor", "Sample"]


class Sample(NamedTuple):
    """One moment of a load: memory, and the page cache that the checkpoint's files hold (None where unknown)."""

    memory: MemorySnapshot
    cached_file_bytes: int | None


class Monitor:
    """Samples until it is closed; a context manager.

    Parameters
    ----------
    interval_s
        Seconds between samples.
    cached_file_bytes
        Called at each sample: the page cache held by the files being read.
    """

    def __init__(
        self, *, interval_s: float, cached_file_bytes: Callable[[], int | None], probe: MemoryProbe | None = None
    ) -> None:
        self._interval_s = interval_s
        self._cached_file_bytes = cached_file_bytes
        self._probe = probe or MemoryProbe()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umem-monitor", daemon=True)
        self.samples: list[Sample] = []

    def __enter__(self) -> Self:
        self._take()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._take()
        self._probe.close()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._take()

    def _take(self) -> None:
        self.samples.append(Sample(self._probe.sample(), self._cached_file_bytes()))

    @property
    def started_s(self) -> float:
        """The time of the first sample, by `time.monotonic()`."""
        return self.samples[0].memory.time_s if self.samples else time.monotonic()
