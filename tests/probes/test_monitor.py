"""The monitor records what happens, from before to after."""

from __future__ import annotations

import mmap
import time

import pytest

from umem.probes import Monitor
from umem.report.model import peaks_of

MIB = 1 << 20


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
