"""Copiers: how blocks reach the memory of a device. The registry of accelerators, and the choice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from umem.strategies.copiers.base import Accelerator, Carrier, Copier, RegistrationError
from umem.strategies.copiers.cuda import CudaAccelerator
from umem.strategies.copiers.plain import PlainCopier
from umem.strategies.copiers.ring import RingShape, open_ring, ring_shape
from umem.strategies.delivery import Delivery
from umem.strategies.window import Window

__all__ = ["ACCELERATORS", "Carrier", "Copier", "RingShape", "open_copier", "ring_shape"]

#: By the type of a torch device.
ACCELERATORS: dict[str, Callable[[], Accelerator]] = {"cuda": CudaAccelerator}


@contextlib.contextmanager
def open_copier(
    delivery: Delivery,
    devices: Sequence[str],
    shape: RingShape,
    *,
    alignments: Sequence[int],
    block_bytes: int,
    window: Window,
) -> Iterator[Copier]:
    """The best copier for a pass that fills `devices`, besides the processor's memory.

    A ring where there is an accelerator for all of them and they accept registered memory; else plain copies, and the
    copier's reason says why. Closing it waits for every copy.

    Parameters
    ----------
    shape
        The measures of a ring, if there is one.
    alignments
        By shard, the congruence of addresses and offsets that spares the reader a copy.
    block_bytes
        The most that a block has.
    window
        What a ring is drawn from.
    """
    with contextlib.ExitStack() as stack:

        def plain(name: str, reason: str) -> Copier:
            copier = PlainCopier(delivery, alignments=alignments, block_bytes=block_bytes, name=name, reason=reason)
            return stack.enter_context(contextlib.closing(copier))

        def chosen() -> Copier:
            if not devices:
                return plain("memory", "the processor's memory is the destination")
            kinds = sorted({device.partition(":")[0] for device in devices})
            if len(kinds) > 1 or kinds[0] not in ACCELERATORS:
                return plain("plain", f"there is no ring for {' with '.join(kinds)} devices")
            ring = open_ring(delivery, ACCELERATORS[kinds[0]](), devices, shape, alignments=alignments, window=window)
            try:
                return stack.enter_context(ring)
            except RegistrationError as error:
                return plain("plain", str(error))

        yield chosen()
