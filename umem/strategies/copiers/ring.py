"""A ring of registered host memory in front of devices: reading goes on while the device fetches what was read.

A block is read into a slot, whole, gaps included. Large runs that reach final storage unchanged are copied there
straight from the slot. What is small, strided, cast or scaled goes over in runs of neighbours, one copy a run, into a
staging tensor on the device, and is delivered from there by the device. A device has one stream, so that its staging is
used by one run after the other, and a fence behind each block's work guards the slot: it is waited for before the slot
is read into again. When the ring is closed every stream has run dry, before memory is unregistered.

Which device, and how its memory is registered, is the accelerator's business.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

import torch

from umem._types import format_bytes
from umem.planning.writes import Write
from umem.strategies.blocks import Block, Part
from umem.strategies.copiers.base import Accelerator, Fence
from umem.strategies.delivery import Delivery, Run
from umem.strategies.storage import torch_dtype
from umem.strategies.window import Window, WindowClosedError

__all__ = ["RingCarrier", "RingCopier", "RingShape", "open_ring", "ring_shape"]

#: From here on a copy of its own costs less than a second copy on the device.
_STRAIGHT_BYTES = 64 * 1024


class RingShape(NamedTuple):
    """The measures of a ring.

    Attributes
    ----------
    slot_bytes
        A slot's size, and that of the staging tensor of each device.
    slots
        How many; more than workers, so that one is always free or on its way.
    workers
        How many threads may read.
    """

    slot_bytes: int
    slots: int
    workers: int

    def block_bytes(self, alignment: int) -> int:
        """The most that a block may have: it begins in its slot where it begins in a unit of `alignment`."""
        return self.slot_bytes - _residue(alignment - 1, alignment, self.slot_bytes)


def ring_shape(
    *, window_bytes: int, block_bytes: int, threads: int, devices: int, reads_hold_copies: bool
) -> RingShape:
    """The largest ring that fits a window, with the staging of `devices` and what reads hold besides.

    Slots are of `block_bytes` where two of them fit with the rest, and else smaller.
    """
    cache = int(reads_hold_copies)
    slot_bytes = min(block_bytes, window_bytes // (2 + devices + cache))
    room = window_bytes // slot_bytes - devices
    workers = max(1, min(threads, (room - 1) // (1 + cache)))
    return RingShape(slot_bytes, min(room - cache * workers, 2 * workers), workers)


def _residue(position: int, alignment: int, slot_bytes: int) -> int:
    """Where in a slot a block begins so that it lies congruent to the file; 0 where slots are too small for that."""
    return position % alignment if 2 * alignment <= slot_bytes else 0


@dataclass(slots=True, eq=False)
class _Slot:
    """Registered memory for one block, and the fences behind the copies out of it."""

    memory: memoryview
    fences: list[Fence] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until no copy reads the slot."""
        for fence in self.fences:
            fence.synchronize()
        self.fences = []


class _Straight(NamedTuple):
    """File range [start, end), and the run of final storage that it fills."""

    start: int
    end: int
    run: Run


class _Staged(NamedTuple):
    """File range [start, end), and the parts in it with the writes that are delivered from staging."""

    start: int
    end: int
    pieces: list[tuple[Part, list[Write]]]


class _Lane:
    """The road to one device. A context manager: whatever happens, its stream has run dry when it ends."""

    def __init__(self, device: str, accelerator: Accelerator, delivery: Delivery, staging_bytes: int) -> None:
        self.device = device
        self._delivery = delivery
        self._staging = accelerator.staging(staging_bytes, device)
        self._stream = accelerator.stream(device)
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            try:
                self._stream.synchronize()
            except Exception:
                if error is None:  # else the first error wins
                    raise
            finally:
                del self._staging

    def send(self, block: Block, memory: memoryview) -> Fence | None:
        """Issue the copies of what of the block belongs on this device; `memory` holds its bytes.

        Gives the fence behind them, or None if there are none. The device reads `memory` until then.
        """
        steps = list(self._steps(block))
        if not steps:
            return None
        with self._lock:
            if self._closed:
                raise WindowClosedError
            for step in steps:
                source = memory[step.start - block.start : step.end - block.start]
                if isinstance(step, _Straight):
                    self._stream.issue(partial(_copy, _bytes_of(step.run), source))
                else:
                    self._stream.issue(partial(_copy, self._staging[: step.end - step.start], source))
                    self._scatter(step)
            return self._stream.fence()

    def _scatter(self, step: _Staged) -> None:
        """Issue the delivery of what lies in staging; the next run goes there only after it, by the stream's order."""
        for part, writes in step.pieces:
            entry = part.writes[0].entry
            items = self._staging[part.start - step.start : part.end - step.start].view(torch_dtype(entry.dtype))
            self._stream.issue(partial(self._delivery.deliver, part, items, writes))

    def _steps(self, block: Block) -> Iterator[_Straight | _Staged]:
        run: _Staged | None = None
        for part in block.parts:
            writes = [write for write in part.writes if self._serves(write)]
            straight = self._delivery.unchanged(part) if writes and part.end - part.start >= _STRAIGHT_BYTES else None
            if run is not None and (not writes or straight or (part.start - run.start) % _itemsize(part)):
                yield run
                run = None
            if straight:
                yield _Straight(part.start, part.end, straight)
            elif writes:
                run = _Staged(part.start, part.end, []) if run is None else run._replace(end=part.end)
                run.pieces.append((part, writes))
        if run is not None:
            yield run

    def _serves(self, write: Write) -> bool:
        return self._delivery.destination_of(write).target.device == self.device


def _itemsize(part: Part) -> int:
    return part.writes[0].entry.dtype.itemsize


def _bytes_of(run: Run) -> torch.Tensor:
    return run.destination.tensor.view(-1).view(torch.uint8)[run.start : run.end]


def _copy(destination: torch.Tensor, source: memoryview) -> None:
    destination.copy_(torch.frombuffer(source, dtype=torch.uint8), non_blocking=True)


class RingCopier:
    """Copies behind the readers' backs; made by `open_ring`."""

    name = "ring"
    carrier_bytes = 0

    def __init__(
        self,
        delivery: Delivery,
        slots: Sequence[memoryview],
        lanes: Sequence[_Lane],
        alignments: Sequence[int],
        reason: str,
    ) -> None:
        self.reason = reason
        self.delivery, self.lanes, self.alignments = delivery, lanes, alignments
        self.free = deque(_Slot(memory) for memory in slots)
        self._devices = frozenset(lane.device for lane in lanes)

    def carrier(self) -> RingCarrier:
        """A carrier; there may be as many as the ring has slots."""
        return RingCarrier(self)

    def writes_here(self, part: Part) -> list[Write]:
        """The writes of the part that go to no device of the ring, but to the processor's memory."""
        return [w for w in part.writes if self.delivery.destination_of(w).target.device not in self._devices]

    def memory(self, part: Part) -> memoryview | None:
        """The processor's memory that the part fills unchanged, if that is all it does."""
        span = self.delivery.span(part) if self.writes_here(part) else None
        return None if span is None else span.bytes


class RingCarrier:
    """Takes the slot that was sent off longest ago; gives it back with the fences of its copies.

    A slot whose block failed is not given back: what was issued from it may still be on its way.
    """

    def __init__(self, ring: RingCopier) -> None:
        self._ring = ring
        self._slot: _Slot | None = None
        self._memory = memoryview(b"")

    def place(self, block: Block) -> list[memoryview]:
        """The slot, but for what fills the processor's memory unchanged."""
        self._slot = self._ring.free.popleft()
        self._slot.wait()
        slot_bytes = self._slot.memory.nbytes
        residue = _residue(block.start, self._ring.alignments[block.shard], slot_bytes)
        self._memory = self._slot.memory[residue : residue + block.end - block.start]
        buffers: list[memoryview] = []
        start = block.start
        for part in block.parts:
            final = self._ring.memory(part)
            if final is None:
                continue
            if part.start > start:
                buffers.append(self._memory[start - block.start : part.start - block.start])
            buffers.append(final)
            start = part.end
        if block.end > start:
            buffers.append(self._memory[start - block.start :])
        return buffers

    def deliver(self, block: Block) -> None:
        """Issue the copies to the devices, and deliver at once what the processor's memory gets by a strategy."""
        slot, self._slot = self._slot, None
        if slot is None:
            raise ValueError("the block was not placed")
        fences = [lane.send(block, self._memory) for lane in self._ring.lanes]
        for part in block.parts:
            writes = self._ring.writes_here(part)
            if writes and self._ring.memory(part) is None:
                source = self._memory[part.start - block.start : part.end - block.start]
                items = torch.frombuffer(source, dtype=torch_dtype(part.writes[0].entry.dtype))
                self._ring.delivery.deliver(part, items, writes)
        slot.fences = [fence for fence in fences if fence is not None]
        self._ring.free.append(slot)


@contextlib.contextmanager
def open_ring(
    delivery: Delivery,
    accelerator: Accelerator,
    devices: Sequence[str],
    shape: RingShape,
    *,
    alignments: Sequence[int],
    window: Window,
) -> Iterator[RingCopier]:
    """A ring in front of `devices`, which draws its slots and staging from `window` until it is closed.

    Raises
    ------
    RegistrationError
        The device cannot use such memory; nothing was kept.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(window.holding((shape.slots + len(devices)) * shape.slot_bytes))
        slots = [stack.enter_context(accelerator.registered(shape.slot_bytes, devices[0])) for _ in range(shape.slots)]
        lanes = [stack.enter_context(_Lane(device, accelerator, delivery, shape.slot_bytes)) for device in devices]
        reason = (
            f"{shape.slots} slots of {format_bytes(shape.slot_bytes)}, {slots[0].how},"
            f" asynchronous copies to {', '.join(devices)}"
        )
        yield RingCopier(delivery, [slot.memory for slot in slots], lanes, alignments, reason)
