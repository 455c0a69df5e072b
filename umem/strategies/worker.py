"""One reading thread: takes blocks in file order, has them read to where its carrier says, and has them delivered.

A worker shares nothing with the others but the feeder that hands out blocks, the copier, the window, and the job's
records.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from umem.checkpoint.entries import Shard
from umem.checkpoint.pagecache import DropBehind
from umem.checkpoint.readers import CancellableHandle, Reader, ReadHandle
from umem.probes.monitor import LoadWatch
from umem.probes.verdicts import Level
from umem.strategies.blocks import Block
from umem.strategies.copiers import Copier
from umem.strategies.delivery import Delivery
from umem.strategies.window import Window, WindowClosedError

__all__ = ["Feeder", "Job", "Worker"]

_LOOK_AGAIN_S = 0.02


class Feeder:
    """Hands out blocks in order, to several threads, until stopped; one at a time while the watch asks for less.

    A thread that asks for a block is done with its last one.
    """

    def __init__(self, blocks: Sequence[Block], watch: LoadWatch) -> None:
        self._blocks = iter(blocks)
        self._watch = watch
        self._changed = threading.Condition()
        self._busy: set[int] = set()
        self._stopped = False

    def next(self) -> Block | None:
        """The next block; None when there are no more, after `stop`, or when the watch ends the load."""
        me = threading.get_ident()
        with self._changed:
            self._busy.discard(me)
            self._changed.notify_all()
            while self._watch.level is Level.SOFT and self._busy and not self._stopped:
                self._changed.wait(_LOOK_AGAIN_S)
            if self._stopped or self._watch.level is Level.HARD:
                return None
            block = next(self._blocks, None)
            if block is not None:
                self._busy.add(me)
            return block

    def stop(self) -> None:
        """Hand out no more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers of one pass over the files have in common.

    Attributes
    ----------
    shards, readers
        By shard: the file, and who reads it.
    delivery
        Where the parts of blocks go.
    copier
        Who brings them there.
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
    delivery: Delivery
    copier: Copier
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
        self._carrier = job.copier.carrier()
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
        destination_of = self._job.delivery.destination_of
        self._job.touched(destination_of(write).target.name for part in block.parts for write in part.writes)
        asked_s = time.perf_counter()
        buffers = self._carrier.place(block)
        started_s = time.perf_counter()
        handle.fill(block.start, buffers)
        read_s = time.perf_counter()
        self._carrier.deliver(block)
        done_s = time.perf_counter()
        if block.shard in self._job.evictions:
            self._job.evictions[block.shard].block_done(block.number)
        self._job.done(block.end - block.start, read_s - started_s, started_s - asked_s + done_s - read_s)

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
