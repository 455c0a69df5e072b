"""The window never lets more be live than its cap."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from umem.strategies.window import Window, WindowClosedError


def test_holds_and_gives_back() -> None:
    window = Window(100)
    with window.holding(60), window.holding(40):
        assert window.live_bytes == 100
    assert (window.live_bytes, window.peak_bytes) == (0, 100)


def test_many_threads_stay_under_the_cap() -> None:
    window, seen = Window(100), []

    def work(count: int) -> None:
        with window.holding(count):
            seen.append(window.live_bytes)
            time.sleep(0.001)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [10, 35, 60, 100, 1, 99] * 10))
    assert len(seen) == 60
    assert max(seen) <= 100
    assert window.live_bytes == 0


def test_more_than_the_cap_goes_alone_and_in_turn() -> None:
    window, order = Window(100), []
    first = threading.Event()

    def large() -> None:
        first.set()
        with window.holding(500):
            order.append(("large", window.live_bytes))

    def small() -> None:
        with window.holding(10):
            order.append(("small", window.live_bytes))

    with ThreadPoolExecutor(2) as pool:
        with window.holding(10):
            one = pool.submit(large)
            first.wait()
            time.sleep(0.01)
            two = pool.submit(small)
            time.sleep(0.01)
            assert order == []  # the small one does not overtake, or the large one would starve
        one.result()
        two.result()
    assert order[0] == ("large", 500)
    assert window.peak_bytes == 500


def test_closing_turns_away_who_waits() -> None:
    window = Window(10)
    with ThreadPoolExecutor(1) as pool, window.holding(10):
        waiting = pool.submit(lambda: window.holding(1).__enter__())
        time.sleep(0.01)
        window.close()
        with pytest.raises(WindowClosedError):
            waiting.result(timeout=5)
    with pytest.raises(WindowClosedError), window.holding(1):
        pass


def test_bytes_come_back_after_an_error() -> None:
    window = Window(10)
    with pytest.raises(KeyError), window.holding(10):
        raise KeyError
    assert window.live_bytes == 0
