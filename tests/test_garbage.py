"""Full collections wait during loads, and the collector's settings survive whatever happens."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import umem
from tests.writers import Holder, random_tensor, write_safetensors
from umem.errors import KeyMismatchError
from umem.garbage import full_collections_wait
from umem.strategies import Progress


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)
    gc.unfreeze()


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


def test_growth_meets_no_full_collection_and_young_garbage_goes() -> None:
    gc.freeze()  # a full one is made when a quarter as much is new as the last one kept
    gc.collect()
    gc.set_threshold(20, 2, 2)
    with full_collections_wait():
        full, young = full_collections(), gc.get_stats()[0]["collections"]
        kept = [[number] for number in range(50_000)]
        assert full_collections() == full
        assert gc.get_stats()[0]["collections"] > young
    kept += [[number] for number in range(50_000)]
    assert full_collections() > full


def test_the_last_of_overlapping_loads_ends_it(thresholds: tuple[int, int, int]) -> None:
    entered, leave = threading.Event(), threading.Event()

    def load() -> None:
        with full_collections_wait():
            entered.set()
            leave.wait(10)

    with full_collections_wait():
        held = gc.get_threshold()
        other = threading.Thread(target=load)
        other.start()
        assert entered.wait(10)
    assert gc.get_threshold() == held != thresholds
    leave.set()
    other.join()
    assert gc.get_threshold() == thresholds


def test_a_threshold_that_is_set_meanwhile_stays() -> None:
    with full_collections_wait():
        gc.set_threshold(700, 10, 7)
    assert gc.get_threshold() == (700, 10, 7)


def test_a_load_holds_full_collections_until_it_ends_or_fails(tmp_path: Path, thresholds: tuple[int, int, int]) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"a": random_tensor((4,))})
    seen: list[tuple[int, int, int]] = []

    def progress(_now: Progress) -> None:
        seen.append(gc.get_threshold())

    umem.load_into(Holder({"a": random_tensor((4,))}), path, device="cpu", progress=progress)
    assert seen
    assert all(first == thresholds[0] and third > thresholds[2] for first, _, third in seen)
    assert gc.get_threshold() == thresholds
    with pytest.raises(KeyMismatchError):
        umem.load_into(Holder({"b": random_tensor((4,))}), path, device="cpu")
    assert gc.get_threshold() == thresholds
