"""Plain copies: what cannot be read straight into final storage is staged in ordinary memory and copied at once.

For the processor's memory that is the best there is. For devices it is the road that always works: each copy is waited
for, and the driver bounces it through memory of its own.

Where numbers are multiplied one thread delivers for all, and torch shares each of its steps among the cores: threads
that multiply side by side, each with helpers of its own, wait for each other more than they compute (measured, two
cores: 3.2 s for a gigabyte of FP8, against 2.0 s by one).
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

import torch

from umem.strategies.blocks import GAP_BYTES, Block, Part
from umem.strategies.delivery import Delivery
from umem.strategies.scaling import PRODUCT_BYTES
from umem.strategies.storage import Span, torch_dtype
from umem.strategies.tiles import TILE_BYTES

__all__ = ["PlainCarrier", "PlainCopier"]


class PlainCopier:
    """Copies as it goes.

    Parameters
    ----------
    alignments
        By shard, the congruence of addresses and offsets that spares the reader a copy.
    block_bytes
        The most that a block has.
    """

    def __init__(
        self, delivery: Delivery, *, alignments: Sequence[int], block_bytes: int, name: str, reason: str
    ) -> None:
        self.name, self.reason = name, reason
        self.carrier_bytes = block_bytes + TILE_BYTES + (PRODUCT_BYTES if delivery.factors else 0)
        self._calculator = ThreadPoolExecutor(1, thread_name_prefix="umem-product") if delivery.factors else None
        self._delivery, self._alignments, self._block_bytes = delivery, alignments, block_bytes

    def carrier(self) -> PlainCarrier:
        """A carrier with a staging buffer of its own."""
        return PlainCarrier(self._delivery, self._alignments, self._block_bytes, self._calculator)

    def close(self) -> None:
        """End the thread that multiplies."""
        if self._calculator is not None:
            self._calculator.shutdown()


class PlainCarrier:
    """Stages a block's parts one behind the other; `calculator` delivers them, where there is one."""

    def __init__(
        self, delivery: Delivery, alignments: Sequence[int], block_bytes: int, calculator: Executor | None = None
    ) -> None:
        self._delivery, self._alignments, self._block_bytes = delivery, alignments, block_bytes
        self._calculator = calculator
        self._staged: list[tuple[Part, Span]] = []
        self._gap = memoryview(bytearray(GAP_BYTES))

    def place(self, block: Block) -> list[memoryview]:
        """Straight to final storage, to staging, or (gaps) nowhere."""
        spans: list[Span] = []
        self._staged = []
        position, used = block.start, 0
        for part in block.parts:
            if part.start > position:
                spans.append(Span(self._gap, 0, part.start - position))
            span = self._delivery.span(part)
            if span is None:
                itemsize, alignment = part.writes[0].entry.dtype.itemsize, self._alignments[block.shard]
                if alignment > 1 and part.end - part.start >= alignment and part.start % itemsize == 0:
                    used += (part.start - used) % alignment  # congruent, so that it is read without a copy
                else:
                    used += -used % itemsize
                span = Span(self._room, used, used + part.end - part.start)
                used = span.end
                self._staged.append((part, span))
            if spans and spans[-1].meets(span):
                spans[-1] = spans[-1]._replace(end=span.end)
            else:
                spans.append(span)
            position = part.end
        return [span.bytes for span in spans]

    def deliver(self, block: Block) -> None:  # noqa: ARG002 - what was staged of it is known
        """Deliver what was staged."""
        if self._calculator is None:
            self._deliver_staged()
        else:
            self._calculator.submit(self._deliver_staged).result()

    @torch.no_grad()
    def _deliver_staged(self) -> None:
        for part, span in self._staged:
            items = torch.frombuffer(span.bytes, dtype=torch_dtype(part.writes[0].entry.dtype))
            self._delivery.deliver(part, items, part.writes)

    @functools.cached_property
    def _room(self) -> memoryview:
        """The staging buffer; aligning items less than doubles what is staged."""
        return memoryview(mmap.mmap(-1, 2 * self._block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
