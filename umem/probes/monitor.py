"""The watch during a load: a thread that samples memory and judges, from before the first allocation to after the last.

It records the series and the changes of level; what a level means is the executor's business. Samples come more often
as memory runs short: often enough that the fastest fill is seen twice before the floor. The thread needs the
interpreter for some hundred microseconds a sample.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Protocol, Self

from umem.probes.memory import MemoryProbe
from umem.probes.policy import Expectation, Policy
from umem.probes.processes import Census, census
from umem.probes.verdicts import Level, Sample, Verdict
from umem.settings import Thresholds

__all__ = ["LoadStoppedError", "LoadWatch", "Monitor", "Sample", "Unwatched"]

_FASTEST_FILL_BYTES_PER_S = 8 << 30
_SHORTEST_INTERVAL_S = 0.01
_CHEAP = 1000
_CENSUS_PATIENCE_S = 1.0
_MOST_SAMPLES = 4096
_COUNTERS_WITHIN_S = 0.2


class LoadStoppedError(Exception):
    """The watch stops the load; whoever runs it frees what it took, and the watch says why."""


class LoadWatch(Protocol):
    """What a running load obeys.

    Attributes
    ----------
    level
        How the load goes on.
    alarm
        Done when the level is hard, so that a thread can wait for it among others.
    """

    @property
    def level(self) -> Level: ...  # noqa: D102 - described above
    @property
    def alarm(self) -> Future[None]: ...  # noqa: D102 - described above


class Unwatched:
    """The watch of a load that nobody watches."""

    def __init__(self) -> None:
        self.level = Level.NORMAL
        self.alarm: Future[None] = Future()


class Monitor:
    """Samples and judges until it is closed; a context manager.

    Parameters
    ----------
    interval_s
        The most seconds between samples.
    cached_file_bytes
        The page cache held by the files being read. Called as often as it costs a thousandth of the time.
    device_bytes
        What this process holds of a memory shared with the device, besides what the system counts for it; so, too.
    thresholds
        When a load slows down or stops.
    sampled
        Called after each sample, from the monitor's thread.
    take_census
        Gives the memory of other processes; asked when a load begins and when it is stopped.

    Attributes
    ----------
    policy, samples, verdicts
        What judges, the series, and the changes of level. The series of a long load is thinned to some thousand
        samples, which keep its peaks.
    cpu_s
        Processor time that the thread took; known when the monitor is closed.
    """

    def __init__(
        self,
        *,
        interval_s: float,
        cached_file_bytes: Callable[[], int | None],
        device_bytes: Callable[[], int | None] = lambda: None,
        thresholds: Thresholds | None = None,
        sampled: Callable[[], None] = lambda: None,
        probe: MemoryProbe | None = None,
        take_census: Callable[[], Census] = census,
    ) -> None:
        self._interval_s = interval_s
        self._cached_file_bytes = _Sparing(cached_file_bytes)
        self._device_bytes = _Sparing(device_bytes)
        self._sampled = sampled
        self._probe = probe or MemoryProbe()
        self._take_census = take_census
        self._orders: SimpleQueue[str | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="umem-monitor", daemon=True)
        self._counted = threading.Event()
        self.policy = Policy(thresholds or Thresholds())
        self.alarm: Future[None] = Future()
        self.samples: list[Sample] = []
        self.verdicts: list[Verdict] = []
        self.censuses: dict[str, Census] = {}
        self.cpu_s = 0.0

    @property
    def level(self) -> Level:
        """How the load goes on."""
        return self.policy.level

    def __enter__(self) -> Self:
        self._take(exact=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._thread.is_alive():
            return
        self._orders.put(None)
        self._thread.join()
        self._take(exact=True)
        self._probe.close()

    def expect(self, expected: Expectation) -> None:
        """A load begins that will take so much; from now on samples are judged."""
        sample = self._take(exact=True)
        with self._lock:
            self.policy.expect(expected, sample)
        self._orders.put("start")  # a census is cheapest before the load keeps all processors busy
        self._take()

    def rest(self) -> None:
        """The load has ended."""
        with self._lock:
            self.policy.rest()

    def grown_processes(self) -> Mapping[int, int]:
        """Other processes that hold more than when the load began: number -> bytes. Call it once the alarm is given."""
        self._counted.wait(_CENSUS_PATIENCE_S)
        start, end = self.censuses.get("start", {}), self.censuses.get("end", {})
        return {pid: grown for pid, count in end.items() if (grown := count - start.get(pid, 0)) > 0}

    def _run(self) -> None:
        """Obey: a name orders a census of that name, None the end; without an order, sample."""
        while True:
            try:
                order = self._orders.get(timeout=self._interval())
            except Empty:
                self._take()
                self._sampled()
                continue
            if order is None:
                break
            self.censuses[order] = self._take_census()
            if order == "end":
                self._counted.set()
        self.cpu_s = time.thread_time()

    def _interval(self) -> float:
        """Half the time in which the fastest fill would reach the soft floor."""
        if not self.samples:
            return self._interval_s
        margin = min((room.left_bytes - room.floors.soft for room in self.policy.rooms(self.samples[-1])), default=None)
        if margin is None:
            return self._interval_s
        return min(self._interval_s, max(_SHORTEST_INTERVAL_S, margin / _FASTEST_FILL_BYTES_PER_S / 2))

    def _take(self, *, exact: bool = False) -> Sample:
        with self._lock:
            memory = self._probe.sample(counters_within_s=0 if exact else _COUNTERS_WITHIN_S)
            sample = Sample(memory, self._cached_file_bytes(exact), self._device_bytes(exact))
            self.samples.append(sample)
            if len(self.samples) > _MOST_SAMPLES:
                self.samples = _thinned(self.samples)
            verdict = self.policy.judge(sample)
            if verdict is not None:
                self.verdicts.append(verdict)
            if verdict is not None and verdict.level is Level.HARD:
                self._orders.put("end")
                self.alarm.set_result(None)
            return sample

    @property
    def started_s(self) -> float:
        """The time of the first sample, by `time.monotonic()`."""
        return self.samples[0].memory.time_s if self.samples else time.monotonic()


def _thinned(samples: list[Sample]) -> list[Sample]:
    """Half of a series: the first, the last, and of each two between them the one in which the load held more."""
    inner = samples[1:-1]
    kept = [max(pair, key=_held_bytes) for pair in zip(inner[::2], inner[1::2], strict=False)]
    return [samples[0], *kept, *inner[len(inner) // 2 * 2 :], samples[-1]]


def _held_bytes(sample: Sample) -> int:
    return sample.own_bytes + (sample.cached_file_bytes or 0)


class _Sparing:
    """Calls a function that may be slow as often as that takes a thousandth of the time; else gives its last value.

    Counting a file's cached pages takes the longer the more there are.
    """

    def __init__(self, ask: Callable[[], int | None]) -> None:
        self._ask = ask
        self._value: int | None = None
        self._next_s = 0.0

    def __call__(self, exact: bool) -> int | None:  # noqa: FBT001 - said where it is called
        started_s = time.monotonic()
        if exact or started_s >= self._next_s:
            self._value = self._ask()
            self._next_s = started_s + _CHEAP * (time.monotonic() - started_s)
        return self._value
