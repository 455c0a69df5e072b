"""Rings by themselves: they fit their window, and are read into without a copy."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies.copiers.late_device import LateDevice
from tests.strategies.copiers.models import KIND, FakeMachine, make_model
from tests.strategies.loads import MIB
from umem.planning import Write
from umem.strategies.blocks import blocks_of
from umem.strategies.copiers.ring import open_ring, ring_shape
from umem.strategies.delivery import Delivery
from umem.strategies.storage import Destination, destination_of
from umem.strategies.window import Window


@given(
    window=st.integers(16 * MIB, 512 * MIB),
    block=st.integers(64 * 1024, 256 * MIB),
    threads=st.integers(1, 64),
    devices=st.integers(1, 8),
    fills=st.booleans(),
)
def test_a_ring_fits_its_window(window: int, block: int, threads: int, devices: int, fills: bool) -> None:
    block = min(block, window // 2)
    shape = ring_shape(
        window_bytes=window, block_bytes=block, threads=threads, devices=devices, reads_hold_copies=fills
    )
    held = (shape.slots + devices) * shape.slot_bytes
    assert held + fills * shape.workers * shape.slot_bytes <= window
    assert 1 <= shape.workers <= threads
    assert shape.workers < shape.slots
    assert shape.slot_bytes <= block
    for alignment in (1, 512, 4096):
        assert alignment - 1 + shape.block_bytes(alignment) <= shape.slot_bytes


def test_the_usual_window_keeps_four_readers_and_slots_of_a_block() -> None:
    shape = ring_shape(window_bytes=64 * MIB, block_bytes=8 * MIB, threads=4, devices=1, reads_hold_copies=False)
    assert shape == (8 * MIB, 7, 4)


@pytest.mark.parametrize("alignment", [512, 4096])
def test_a_block_is_one_buffer_that_lies_congruent_to_the_file(tmp_path: Path, alignment: int) -> None:
    """So a direct reader needs no copy but for the block's two ends."""
    late = LateDevice("latest")
    with pytest.MonkeyPatch.context() as monkeypatch, FakeMachine(late, monkeypatch):
        model = make_model(tmp_path, f"{KIND}:0", f"{KIND}:0", only="large")
    destinations = {target.name: destination_of(target, model.expected[target.name]) for target in model.plan.filled}

    def find(write: Write) -> Destination:
        return destinations[write.target]

    delivery = Delivery(find, {})
    shape = ring_shape(window_bytes=MIB, block_bytes=200_000, threads=1, devices=1, reads_hold_copies=False)
    alignments = [alignment] * len(model.checkpoint.shards)
    window = Window(MIB)
    with open_ring(delivery, late, [f"{KIND}:0"], shape, alignments=alignments, window=window) as ring:
        carrier = ring.carrier()
        for block in blocks_of(model.plan.groups, shape.block_bytes(alignment))[: shape.slots]:
            (buffer,) = carrier.place(block)
            assert buffer.nbytes == block.end - block.start
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            assert (address - block.start) % alignment == 0
        assert window.live_bytes == (shape.slots + 1) * shape.slot_bytes
    assert window.live_bytes == 0
