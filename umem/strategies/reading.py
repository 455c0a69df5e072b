"""A pass over the files: every block of some groups is read once, in file order, by a few threads, and delivered.

What is in flight draws from a window; the page cache is kept as the policy says; progress is told, and the watch
obeyed, from the calling thread. If anything goes wrong the threads end at their next block, and the first error is
raised.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import torch

from umem._types import DType
from umem.checkpoint.pagecache import CachePolicy, DropBehind, cached_ranges
from umem.planning.plan import LoadPlan
from umem.planning.writes import Group, Write
from umem.probes.monitor import LoadStoppedError
from umem.strategies.blocks import Block, blocks_of
from umem.strategies.copiers import Copier, RingShape, open_copier, ring_shape
from umem.strategies.delivery import Delivery
from umem.strategies.execution import Execution, Outcome, Progress
from umem.strategies.storage import Destination
from umem.strategies.window import Window
from umem.strategies.worker import Feeder, Job, Worker

__all__ = ["FileReading"]

_TICK_S = 0.1


class FileReading:
    """Reads for one execution of one plan.

    Parameters
    ----------
    alignments
        By shard, the congruence of addresses and offsets that spares the reader a copy.
    obey
        Called several times a second while bytes move; raises `LoadStoppedError` to end the load.
    stopped
        Called when it has, while reads are still in flight.

    Attributes
    ----------
    factors
        (device, stored name, dtype) -> the flat tensor by which writes are multiplied; filled before blocks need them.
    """

    def __init__(
        self,
        plan: LoadPlan,
        execution: Execution,
        outcome: Outcome,
        alignments: Sequence[int],
        *,
        obey: Callable[[], None],
        stopped: Callable[[], None],
    ) -> None:
        self._plan, self._execution, self._outcome = plan, execution, outcome
        self._alignments, self._obey, self._stopped = alignments, obey, stopped
        self.factors: dict[tuple[str, str, DType], torch.Tensor] = {}
        self._started_s = time.perf_counter()
        self._read_bytes = 0
        self._lock = threading.Lock()

    def run(self, groups: Sequence[Group], destinations: Mapping[str, Destination], window: Window) -> Copier | None:
        """Read every block of `groups` and deliver it, inside `window`; gives the copier, if there was one to read."""
        devices = sorted({destination.target.device for destination in destinations.values()} - {"cpu"})
        if not groups:
            return None
        shape = self._ring_shape(len(devices))
        block_bytes = shape.block_bytes(max(self._alignments, default=1)) if devices else self._execution.block_bytes
        blocks = blocks_of(groups, block_bytes)
        if not blocks:
            return None
        shape = shape._replace(slots=min(shape.slots, len(blocks)), workers=min(shape.workers, len(blocks)))
        delivery = self._delivery(destinations)
        with (
            self._eviction(blocks) as evictions,
            open_copier(
                delivery, devices, shape, alignments=self._alignments, block_bytes=block_bytes, window=window
            ) as copier,
        ):
            feeder = Feeder(blocks, self._execution.watch)
            job = self._job(delivery, copier, evictions, window, block_bytes)
            count = shape.workers if devices else self._workers(len(blocks), job.block_cost)
            self._wait_for([Worker(job, feeder) for _ in range(count)], feeder, window)
            return copier

    def _delivery(self, destinations: Mapping[str, Destination]) -> Delivery:
        def destination_of(write: Write) -> Destination:
            return destinations.get(write.target) or destinations[self._plan.targets[write.target].name]

        return Delivery(destination_of, self.factors)

    def _job(
        self,
        delivery: Delivery,
        copier: Copier,
        evictions: Mapping[int, DropBehind],
        window: Window,
        block_bytes: int,
    ) -> Job:
        return Job(
            shards=self._plan.checkpoint.shards,
            readers=self._execution.readers,
            delivery=delivery,
            copier=copier,
            evictions=evictions,
            window=window,
            block_bytes=block_bytes,
            block_cost=copier.carrier_bytes + self._execution.copies_in_flight * block_bytes,
            touched=self._outcome.touched.update,
            done=self._block_done,
        )

    def _ring_shape(self, devices: int) -> RingShape:
        return ring_shape(
            window_bytes=self._execution.window_bytes,
            block_bytes=self._execution.block_bytes,
            threads=self._execution.wanted_threads,
            devices=devices,
            reads_hold_copies=self._execution.copies_in_flight > 0,
        )

    def _workers(self, blocks: int, block_cost: int) -> int:
        """As many threads as there is window for: each may hold a staged block and as much page cache."""
        return max(1, min(self._execution.wanted_threads, blocks, self._execution.window_bytes // block_cost))

    def _wait_for(self, workers: list[Worker], feeder: Feeder, window: Window) -> None:
        with ThreadPoolExecutor(len(workers), thread_name_prefix="umem-read") as pool:
            waiting: set[Future[None]] = {pool.submit(worker.run) for worker in workers}
            try:
                while waiting:
                    alarm = self._execution.watch.alarm
                    done, _ = wait({*waiting, alarm}, timeout=_TICK_S, return_when=FIRST_COMPLETED)
                    self._obey()
                    waiting -= done
                    for future in done:
                        future.result()
                    self._report(window)
            except BaseException as error:
                feeder.stop()
                window.close()
                for worker in workers:
                    worker.cancel()
                if isinstance(error, LoadStoppedError):
                    self._stopped()
                raise

    def _report(self, window: Window) -> None:
        if self._execution.progress is not None:
            elapsed_s = time.perf_counter() - self._started_s
            total = self._plan.forecast.read_bytes
            self._execution.progress(Progress(self._read_bytes, total, elapsed_s, window.live_bytes))

    def _block_done(self, count: int, read_s: float, deliver_s: float) -> None:
        """A worker has read and delivered `count` bytes, which it still holds in the window."""
        if self._execution.offload is not None:
            self._execution.offload.settle()
        with self._lock:
            self._read_bytes += count
            self._outcome.thread_seconds["read"] += read_s
            self._outcome.thread_seconds["deliver"] += deliver_s

    @contextlib.contextmanager
    def _eviction(self, blocks: Sequence[Block]) -> Iterator[dict[int, DropBehind]]:
        """By shard, the eviction behind its readers."""
        ends: dict[int, list[int]] = {}
        for block in blocks:
            ends.setdefault(block.shard, []).append(block.end)
        with contextlib.ExitStack() as stack:
            evictions = {}
            for index, shard_ends in ends.items():
                kept = self._kept(index)
                if kept is not None:
                    behind = DropBehind(self._plan.checkpoint.shards[index].path, shard_ends, kept)
                    evictions[index] = stack.enter_context(contextlib.closing(behind))
            yield evictions

    def _kept(self, shard: int) -> list[range] | None:
        """The parts of a shard's page cache that stay while the rest is evicted; None: nothing needs to be evicted."""
        if self._plan.checkpoint.shards[shard].is_remote:
            return None
        match self._execution.cache_policy:
            case CachePolicy.KEEP:
                return None
            case CachePolicy.DROP:
                return []
            case CachePolicy.RESTORE:
                if not self._execution.readers[shard].holds_copy:
                    return None
                return cached_ranges(self._plan.checkpoint.shards[shard].path) or []
