"""The monitor records what happens, from before to after, judges it, and gives the alarm."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable

import pytest

from umem.probes import Expectation, Level, Monitor, Rule, overrun_error
from umem.report.model import peaks_of
from umem.settings import MIB, Thresholds


def wait_until(true: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 20
    while not true() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return true()


def test_memory_that_comes_and_goes_is_in_the_series() -> None:
    with Monitor(interval_s=0.005, cached_file_bytes=lambda: None) as monitor:
        pages = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.write(bytes(64 * MIB))
        time.sleep(0.05)
        pages.close()
    peaks = peaks_of(monitor.samples)
    assert 60 * MIB < (peaks.anonymous_bytes or 0) < 140 * MIB
    assert peaks.page_cache_bytes is None
    times = [sample.memory.time_s for sample in monitor.samples]
    assert times == sorted(times)
    assert len(times) > 5


def test_it_ends_with_an_error_inside() -> None:
    monitor = Monitor(interval_s=0.005, cached_file_bytes=lambda: 7)
    with pytest.raises(KeyError), monitor:
        raise KeyError
    count = len(monitor.samples)
    time.sleep(0.03)
    assert len(monitor.samples) == count >= 2


def test_the_alarm_is_given_when_memory_is_below_the_floor_and_says_who_grew() -> None:
    census = {7: 100 * MIB, 8: 50 * MIB}
    thresholds = Thresholds(floor_bytes=1 << 60, soft_floor_bytes=1 << 60)
    monitor = Monitor(
        interval_s=0.01, cached_file_bytes=lambda: None, thresholds=thresholds, take_census=lambda: dict(census)
    )
    with monitor:
        levels = [monitor.level]
        monitor.expect(Expectation(taken_bytes=0, peak_bytes=0))
        monitor.alarm.result(timeout=20)
        grown = monitor.grown_processes()
    assert [*levels, monitor.level] == [Level.NORMAL, Level.HARD]
    assert monitor.verdicts[-1].rule is Rule.FLOOR
    assert grown == {}
    error = overrun_error(
        monitor.verdicts[-1], monitor.policy, monitor.samples, monitor.verdicts, {7: 900 * MIB}, lambda pid: "hog"
    )
    assert (error.cause, error.rule, error.process) == ("own", "floor", None)  # nothing had gone elsewhere
    assert "the floor is 1048576.00 TiB" in str(error)
    assert error.verdicts[-1]["level"] == "hard"
    assert error.series[0]["time_s"] == 0


def test_what_is_slow_to_ask_is_asked_seldom() -> None:
    asked = []

    def cached() -> int:
        asked.append(time.monotonic())
        time.sleep(0.02)
        return len(asked)

    with Monitor(interval_s=0.002, cached_file_bytes=cached) as monitor:
        assert wait_until(lambda: len(monitor.samples) > 100)
        during = len(asked)
    assert during < 5
    assert len(asked) == during + 1  # the last sample is exact


def test_a_long_series_is_thinned_and_keeps_its_ends_and_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umem.probes.monitor._MOST_SAMPLES", 32)
    peak = 0

    def cached() -> int:
        return peak

    with Monitor(interval_s=0.001, cached_file_bytes=cached) as monitor:
        first = monitor.samples[0]
        peak = 9 * MIB
        monitor.expect(Expectation(taken_bytes=0, peak_bytes=1 << 60))
        peak = 0
        last_s = monitor.samples[-1].memory.time_s
        assert wait_until(lambda: monitor.samples[-1].memory.time_s > last_s + 0.2)
    assert len(monitor.samples) <= 34
    assert monitor.samples[0] is first
    assert max(sample.cached_file_bytes or 0 for sample in monitor.samples) == 9 * MIB
    times = [sample.memory.time_s for sample in monitor.samples]
    assert times == sorted(times)
