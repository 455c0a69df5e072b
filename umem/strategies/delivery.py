"""Where the parts of a block belong, and their delivery there by the strategy of their route. Reads nothing.

Copiers bring stored items to the device of their destination and then deliver them by this, on whichever memory the
items lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from umem._types import DType
from umem.planning.views import View, coalesced, restricted
from umem.planning.writes import Route, Write
from umem.strategies.blocks import Part
from umem.strategies.registry import block_strategy
from umem.strategies.storage import Destination, Span

__all__ = ["Delivery", "Run"]


class Run(NamedTuple):
    """Bytes [start, end) of a destination that lies in row-major order."""

    destination: Destination
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one pass over the files delivers.

    Attributes
    ----------
    destination_of
        Where a write goes.
    factors
        (device, stored name, dtype) -> the flat tensor, of that dtype, by which writes are multiplied.
    """

    destination_of: Callable[[Write], Destination]
    factors: Mapping[tuple[str, str, DType], torch.Tensor]

    def unchanged(self, part: Part) -> Run | None:
        """The bytes of final storage that the part fills unchanged and in order, if it does."""
        group = part.group
        if group.route is not Route.DIRECT or len(group.writes) != 1:
            return None
        write = group.writes[0]
        if not (write.source.runs_row_major() and write.destination.runs_row_major()):
            return None
        itemsize = write.entry.dtype.itemsize
        destination = self.destination_of(write)
        if write.source.items * itemsize != write.entry.nbytes or not destination.tensor.is_contiguous():
            return None
        start = write.destination.offset * itemsize + part.start - write.entry.start
        return Run(destination, start, start + part.end - part.start)

    def span(self, part: Part) -> Span | None:
        """The final storage that the part fills unchanged and in order, if the processor can write it."""
        run = self.unchanged(part)
        if run is None or run.destination.span is None:
            return None
        return run.destination.span.part(run.start, run.end)

    def deliver(self, part: Part, items: torch.Tensor, writes: Sequence[Write]) -> None:
        """Deliver `writes` of the part from `items`, its stored items, flat."""
        entry = part.writes[0].entry
        strategy = block_strategy(part.group.route)
        itemsize = entry.dtype.itemsize
        low, high = (part.start - entry.start) // itemsize, (part.end - entry.start) // itemsize
        for write in writes:
            destination = self.destination_of(write)
            for source, *between, view in restricted(coalesced(destination.placed(write.pairing)), low, high):
                factors = (self._factor(write, by) for by in between)
                stored = source._replace(offset=source.offset - low)
                strategy.deliver(items, stored, destination, view, *factors)

    def _factor(self, write: Write, view: View) -> torch.Tensor:
        """A view of what the write is multiplied by, where its destination is."""
        if write.factor is None:
            raise ValueError(f"nothing multiplies {write.target}")
        device = self.destination_of(write).target.device
        numbers = self.factors[device, write.factor.entry.name, write.factor.dtype]
        return numbers.as_strided(view.shape, view.strides, view.offset)
