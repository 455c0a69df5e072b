"""One reading thread: takes blocks in file order, fills final storage or its staging buffer, delivers what was staged.

A worker shares nothing with the others but the feeder that hands out blocks, the window, and the job's records.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from umem.checkpoint.entries import Shard
from umem.checkpoint.pagecache import DropBehind
from umem.checkpoint.readers import CancellableHandle, Reader, ReadHandle
from umem.planning.views import coalesced, laid_out, ordered, restricted
from umem.planning.writes import Factor, Route, Write
from umem.strategies.base import BlockStrategy
from umem.strategies.blocks import GAP_BYTES, Block, Part
from umem.strategies.registry import block_strategy
from umem.strategies.storage import Destination, torch_dtype
from umem.strategies.window import Window, WindowClosedError

__all__ = ["Feeder", "Job", "Worker"]


class Feeder:
    """Hands out blocks in order, to several threads, until stopped."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = iter(blocks)
        self._lock = threading.Lock()
        self._stopped = False

    def next(self) -> Block | None:
        """The next block; None when there are no more, or after `stop`."""
        with self._lock:
            return None if self._stopped else next(self._blocks, None)

    def stop(self) -> None:
        """Hand out no more."""
        self._stopped = True


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers of one pass over the files have in common.

    Attributes
    ----------
    shards, readers, alignments
        By shard: the file, who reads it, and the congruence of addresses and offsets that spares a copy.
    destination_of
        Where a write goes.
    routes
        Stored name -> route.
    factors
        Stored name -> the flat tensor by which writes are multiplied.
    evictions
        By shard, the eviction behind the readers.
    window, block_bytes, block_cost
        What a block in flight draws from the window, and the most that it has, in bytes.
    touched
        Told the names of targets before they are written to.
    done
        Told the bytes, and the seconds of reading and of delivering, of each block.
    """

    shards: Sequence[Shard]
    readers: Sequence[Reader]
    alignments: Sequence[int]
    destination_of: Callable[[Write], Destination]
    routes: Mapping[str, Route]
    factors: Mapping[str, torch.Tensor]
    evictions: Mapping[int, DropBehind]
    window: Window
    block_bytes: int
    block_cost: int
    touched: Callable[[Iterator[str]], None]
    done: Callable[[int, float, float], None]


class Worker:
    """Works on a job; `run` is its thread."""

    def __init__(self, job: Job, feeder: Feeder) -> None:
        self._job, self._feeder = job, feeder
        self._staging: mmap.mmap | None = None
        self._gap = memoryview(bytearray(GAP_BYTES))
        self._handle: ReadHandle | None = None
        self._cancelled = False
        self._shard = -1

    def run(self) -> None:
        """Work until there are no more blocks, or the load ends."""
        with contextlib.ExitStack() as files, torch.no_grad():
            while (block := self._feeder.next()) is not None:
                try:
                    with self._job.window.holding(min(self._job.block_cost, self._job.window.cap_bytes)):
                        self._do(block, files)
                except WindowClosedError:
                    return
                except BaseException:
                    self._feeder.stop()
                    raise

    def cancel(self) -> None:
        """From another thread: do not wait for a slow read, nor begin one."""
        self._cancelled = True
        handle = self._handle
        if isinstance(handle, CancellableHandle):
            handle.cancel()

    def _do(self, block: Block, files: contextlib.ExitStack) -> None:
        handle = self._opened(block.shard, files)
        for part in block.parts:
            self._job.touched(self._job.destination_of(write).target.name for write in part.writes)
        buffers, staged = self._layout(block)
        started_s = time.perf_counter()
        handle.fill(block.start, buffers)
        read_s = time.perf_counter()
        for part, items in staged:
            self._deliver(part, items)
        done_s = time.perf_counter()
        if block.shard in self._job.evictions:
            self._job.evictions[block.shard].block_done(block.number)
        self._job.done(block.end - block.start, read_s - started_s, done_s - read_s)

    def _opened(self, shard: int, files: contextlib.ExitStack) -> ReadHandle:
        """The handle of a shard; blocks come in file order, so one is open at a time."""
        if self._handle is None or self._shard != shard:
            files.close()
            reader = self._job.readers[shard]
            opened = reader.open(self._job.shards[shard], self._job.block_bytes)
            self._handle = files.enter_context(opened)
            self._shard = shard
            if self._cancelled:
                self.cancel()
        return self._handle

    def _layout(self, block: Block) -> tuple[list[memoryview], list[tuple[Part, memoryview]]]:
        """Where each byte of the block goes: straight to final storage, to staging, or (gaps) nowhere."""
        buffers: list[memoryview] = []
        staged: list[tuple[Part, memoryview]] = []
        position, used = block.start, 0
        for part in block.parts:
            if part.start > position:
                buffers.append(self._gap[: part.start - position])
            buffer = self._final(part)
            if buffer is None:
                alignment = self._job.alignments[block.shard]
                if alignment > 1 and part.end - part.start >= alignment:
                    used += (part.start - used) % alignment  # congruent, so that it is read without a copy
                else:
                    used += -used % part.writes[0].entry.dtype.itemsize
                buffer = self._staged(used, part.end - part.start)
                used += part.end - part.start
                staged.append((part, buffer))
            buffers.append(buffer)
            position = part.end
        return buffers, staged

    def _final(self, part: Part) -> memoryview | None:
        """The bytes of final storage that the part fills unchanged and in order, if it does."""
        if len(part.writes) != 1:
            return None
        write = part.writes[0]
        destination = self._job.destination_of(write)
        if destination.memory is None or self._job.routes[write.entry.name] is not Route.DIRECT:
            return None
        if not (write.source.runs_row_major() and write.destination.runs_row_major()):
            return None
        itemsize = write.entry.dtype.itemsize
        if write.source.items * itemsize != write.entry.nbytes:
            return None
        start = write.destination.offset * itemsize + part.start - write.entry.start
        return destination.memory[start : start + part.end - part.start]

    def _staged(self, start: int, count: int) -> memoryview:
        if self._staging is None:
            room = 2 * self._job.block_bytes  # aligning items less than doubles what is staged
            self._staging = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(self._staging)[start : start + count]

    def _deliver(self, part: Part, staged: memoryview) -> None:
        entry = part.writes[0].entry
        strategy: BlockStrategy = block_strategy(self._job.routes[entry.name])
        itemsize = entry.dtype.itemsize
        low, high = (part.start - entry.start) // itemsize, (part.end - entry.start) // itemsize
        items = torch.frombuffer(staged, dtype=torch_dtype(entry.dtype))
        for write in part.writes:
            destination = self._job.destination_of(write)
            if write.factor is not None:
                self._deliver_scaled(strategy, items, write, write.factor, low, high)
                continue
            pairing = coalesced(*destination.placed(write.source, write.destination))
            for source, view in restricted(*pairing, low, high):
                strategy.deliver(items, source._replace(offset=source.offset - low), destination, view)

    def _deliver_scaled(
        self, strategy: BlockStrategy, items: torch.Tensor, write: Write, factor: Factor, low: int, high: int
    ) -> None:
        """Deliver the items [low, high) of a write that is multiplied; its three views are cut alike."""
        destination = self._job.destination_of(write)
        shape = destination.target.shape
        numbers = self._job.factors[factor.entry.name]
        placed, multiplied = (
            ordered(*laid_out(write.source, write.destination, shape, other))
            for other in (destination.storage_view, factor.view)
        )
        cuts = zip(restricted(*placed, low, high), restricted(*multiplied, low, high), strict=True)
        for (source, view), (_, by) in cuts:
            strided = numbers.as_strided(by.shape, by.strides, by.offset)
            strategy.deliver(items, source._replace(offset=source.offset - low), destination, view, strided)
