"""Runs a plan: allocates final storage, reads blocks in file order by a few threads, delivers them, then the rest.

Everything live besides final storage draws from the window. If anything goes wrong, or the caller interrupts, the
threads stop at their next block, everything that was taken is let go, and the first error is raised in the caller's
thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from umem.checkpoint.entries import Entry
from umem.checkpoint.offload import OffloadFile
from umem.checkpoint.pagecache import CachePolicy, DropBehind, cached_ranges
from umem.checkpoint.readers import Reader
from umem.planning.plan import LoadPlan
from umem.planning.targets import DISK, Target
from umem.planning.views import View
from umem.planning.writes import Group, Route, Write
from umem.strategies.base import Converter, GroupStrategy
from umem.strategies.blocks import Block, blocks_of
from umem.strategies.copiers import Copier, RingShape, open_copier, ring_shape
from umem.strategies.delivery import Delivery
from umem.strategies.mapped import MappedShards
from umem.strategies.registry import group_strategy, is_block_route, is_group_route
from umem.strategies.storage import Destination, allocate, destination_of, has_own_pages, huge_pages_pay, in_file
from umem.strategies.window import Window
from umem.strategies.worker import Feeder, Job, Worker

__all__ = ["Execution", "Outcome", "Progress", "execute"]

_TICK_S = 0.1


class Progress(NamedTuple):
    """How far a load is: bytes read, of how many, since when, and the bytes live in the window.

    `waiting` says what a load waits for before it reads anything; it is empty from then on.
    """

    read_bytes: int
    total_bytes: int
    elapsed_s: float
    window_bytes: int
    waiting: str = ""


@dataclass(slots=True)
class Outcome:
    """What running a plan gave.

    Attributes
    ----------
    tensors
        Target name -> final tensor.
    seconds
        Wall time by phase: allocate, read, convert.
    thread_seconds
        Time summed over the threads: waiting for the drive, delivering.
    window_peak_bytes
        The most that was live in the window.
    huge_pages
        Whether final storage asked for huge pages; None where that was left to the system.
    touched
        Targets that have been written to, also by a load that failed.
    copier, copier_reason
        How blocks reached final storage, and why so, for people.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    thread_seconds: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "deliver": 0.0})
    window_peak_bytes: int = 0
    huge_pages: bool | None = None
    touched: set[str] = field(default_factory=set)
    copier: str = "none"
    copier_reason: str = "no blocks were read"


@dataclass(frozen=True, slots=True)
class Execution:
    """How to run a plan.

    Attributes
    ----------
    window_bytes, block_bytes
        As in the settings.
    readers
        The reader of each shard.
    threads
        How many read; None for as many as the readers like.
    cache_policy
        What stays in the page cache of the files that are read.
    convert
        Runs the materialized groups' conversions; needed only where the plan has any.
    progress
        Called about ten times a second, from the calling thread.
    offload
        The file that holds targets on disk which groups with writes fill; needed only where the plan has any.
    """

    window_bytes: int
    block_bytes: int
    readers: Sequence[Reader]
    threads: int | None = None
    cache_policy: CachePolicy = CachePolicy.RESTORE
    convert: Converter | None = None
    progress: Callable[[Progress], None] | None = None
    offload: OffloadFile | None = None


def execute(
    plan: LoadPlan,
    execution: Execution,
    *,
    live: Mapping[str, torch.Tensor] | None = None,
    outcome: Outcome | None = None,
) -> Outcome:
    """Run `plan`.

    Parameters
    ----------
    live
        Target name -> tensor to fill in place; other targets get new storage.
    outcome
        Filled as the load goes, so that a caller can tell how far a failed one came.

    Raises
    ------
    ReadError, TruncatedFileError, ChangedFileError
        A file could not be read as planned.
    IncompleteConversionError
        A conversion broke its promise.
    """
    outcome = Outcome() if outcome is None else outcome
    run = _Run(plan, execution, outcome)
    try:
        with torch.no_grad():
            run.place(live or {})
            run.read_factors()
            run.pump([group for group in plan.groups if is_block_route(group.route)], run.destinations, phase="read")
            run.convert()
    except BaseException:
        run.destinations.clear()  # a kept traceback must not keep the model's memory
        outcome.tensors.clear()
        raise
    in_memory = (name for name in run.destinations if plan.targets[name].device != DISK)
    outcome.tensors.update({name: run.destinations[name].tensor for name in in_memory})
    outcome.window_peak_bytes = run.window.peak_bytes
    return outcome


class _Run:
    """One execution of one plan."""

    def __init__(self, plan: LoadPlan, execution: Execution, outcome: Outcome) -> None:
        self.plan, self.execution, self.outcome = plan, execution, outcome
        self.window = Window(execution.window_bytes)
        self.destinations: dict[str, Destination] = {}
        self.factors: dict[tuple[str, str], torch.Tensor] = {}
        shards = plan.checkpoint.shards
        self.alignments = [reader.alignment(shard) for reader, shard in zip(execution.readers, shards, strict=False)]
        self._started_s = time.perf_counter()
        self._read_bytes = 0
        self._lock = threading.Lock()

    def place(self, live: Mapping[str, torch.Tensor]) -> None:
        """Give every target a destination that is live or filled by writes; conversions bring storage of their own."""
        started_s = time.perf_counter()
        blocks = (group for group in self.plan.groups if is_block_route(group.route))
        written = {self.plan.targets[name].name for group in blocks for name in group.targets}
        fresh = [target for target in self.plan.filled if target.name in written and target.name not in live]
        self.outcome.huge_pages = huge_pages_pay(sum(target.nbytes for target in fresh if target.device == "cpu"))
        residues = self._residues()
        for target in fresh:
            if target.device == DISK:
                self.destinations[target.name] = self._in_file(target)
                continue
            tensor = allocate(target, huge_pages=self.outcome.huge_pages, residue=residues.get(target.name, 0))
            self.destinations[target.name] = destination_of(target, tensor)
        self._map()
        for name, tensor in live.items():
            self.destinations[name] = destination_of(self.plan.targets[name], tensor)
        self.outcome.seconds["allocate"] = time.perf_counter() - started_s

    def _in_file(self, target: Target) -> Destination:
        if self.execution.offload is None:
            raise ValueError(f"the plan puts {target.name} on disk, but no file for it was given")
        return in_file(target, self.execution.offload.memory, self.execution.offload.start_of(target.name))

    def _map(self) -> None:
        """Give the targets of the mapped route their pages of the files."""
        mapped = MappedShards()
        for group in self.plan.groups:
            if group.route is Route.MAPPED:
                write = group.writes[0]
                target = self.plan.targets[write.target]
                tensor = mapped.tensor(self.plan.checkpoint.shards[write.entry.shard], write.entry, target)
                self.destinations[target.name] = destination_of(target, tensor)

    def _residues(self) -> dict[str, int]:
        """By target, where in a page its storage begins so that most of its bytes lie congruent to the file."""
        votes: dict[str, Counter[int]] = {}
        for group in self.plan.groups:
            if group.route is not Route.DIRECT or not group.read_bytes:
                continue
            alignment = self.alignments[group.entries[0].shard]
            if alignment == 1:
                continue
            for write in group.writes:
                target = self.plan.targets[write.target]
                if has_own_pages(target) and write.destination.runs_row_major():
                    start = write.entry.start - write.destination.offset * write.entry.dtype.itemsize
                    votes.setdefault(target.name, Counter())[start % alignment] += write.entry.nbytes
        return {name: counts.most_common(1)[0][0] for name, counts in votes.items()}

    def read_factors(self) -> None:
        """Read the tensors by which others are multiplied to where those are; they stay until the end."""
        needed: dict[str, dict[str, Entry]] = {}
        for write in (write for group in self.plan.groups for write in group.writes):
            if write.factor is not None:
                device = self.destinations[self.plan.targets[write.target].name].target.device
                needed.setdefault(device, {})[write.factor.entry.name] = write.factor.entry
        for device, entries in needed.items():
            for name, tensor in self._read_whole(tuple(entries.values()), device).items():
                self.factors[device, name] = tensor.as_strided((tensor.numel(),), (1,))

    def convert(self) -> None:
        """Run the materialized groups, one at a time."""
        started_s = time.perf_counter()
        for group in self.plan.groups:
            if not is_group_route(group.route):
                continue
            if self.execution.convert is None:
                raise ValueError(f"the plan has the conversion {group.name}, but nobody to run it was given")
            strategy: GroupStrategy = group_strategy(group.route)
            self.outcome.touched.update(group.targets)
            given = strategy.run(group, self._read_whole, self.execution.convert, self.window, self.destinations)
            self.outcome.tensors.update(given)
        self.outcome.seconds["convert"] = time.perf_counter() - started_s

    def _read_whole(self, entries: tuple[Entry, ...], device: str = "cpu") -> dict[str, torch.Tensor]:
        """Stored tensors in memory of their own on `device`, with their stored strides."""
        staging: dict[str, Destination] = {}
        groups = []
        for entry in entries:
            flat = entry._replace(shape=(entry.nbytes // entry.dtype.itemsize,), strides=None)
            target = Target(entry.name, entry.dtype, flat.shape, device)
            staging[entry.name] = destination_of(target, allocate(target, huge_pages=None))
            view = View.whole(flat.shape)
            groups.append(
                Group(entry.name, Route.DIRECT, "", (flat,), (entry.name,), (Write(flat, view, entry.name, view),))
            )
        # A window of its own: the group holds what it needs already, and its reads must not wait for that.
        self.pump(groups, staging, phase="convert", window=Window(self.execution.window_bytes))
        return {
            entry.name: staging[entry.name].tensor.as_strided(
                entry.shape, View.whole(entry.shape, entry.strides).strides
            )
            for entry in entries
        }

    def pump(
        self,
        groups: Sequence[Group],
        destinations: Mapping[str, Destination],
        *,
        phase: str,
        window: Window | None = None,
    ) -> None:
        """Read every block of `groups` and deliver it, inside `window` (the run's, unless given)."""
        if not groups:
            return
        started_s = time.perf_counter()
        window = window or self.window
        devices = sorted({destination.target.device for destination in destinations.values()} - {"cpu"})
        shape = self._ring_shape(len(devices))
        block_bytes = shape.block_bytes(max(self.alignments, default=1)) if devices else self.execution.block_bytes
        blocks = blocks_of(groups, block_bytes)
        if blocks:
            shape = shape._replace(slots=min(shape.slots, len(blocks)), workers=min(shape.workers, len(blocks)))
            delivery = self._delivery(groups, destinations)
            with (
                self._eviction(blocks) as evictions,
                open_copier(
                    delivery,
                    devices,
                    shape,
                    alignments=self.alignments,
                    block_bytes=block_bytes,
                    window=window,
                ) as copier,
            ):
                if phase == "read":
                    self.outcome.copier, self.outcome.copier_reason = copier.name, copier.reason
                feeder = Feeder(blocks)
                job = self._job(delivery, copier, evictions, window, block_bytes)
                threads = shape.workers if devices else self._workers(len(blocks), job.block_cost)
                self._wait_for([Worker(job, feeder) for _ in range(threads)], feeder, window)
        self.outcome.seconds[phase] = self.outcome.seconds.get(phase, 0.0) + time.perf_counter() - started_s

    def _delivery(self, groups: Sequence[Group], destinations: Mapping[str, Destination]) -> Delivery:
        def destination_of(write: Write) -> Destination:
            return destinations.get(write.target) or destinations[self.plan.targets[write.target].name]

        routes = {write.entry.name: group.route for group in groups for write in group.writes}
        return Delivery(destination_of, routes, self.factors)

    def _job(
        self,
        delivery: Delivery,
        copier: Copier,
        evictions: Mapping[int, DropBehind],
        window: Window,
        block_bytes: int,
    ) -> Job:
        return Job(
            shards=self.plan.checkpoint.shards,
            readers=self.execution.readers,
            delivery=delivery,
            copier=copier,
            evictions=evictions,
            window=window,
            block_bytes=block_bytes,
            block_cost=copier.carrier_bytes + self._copies * block_bytes,
            touched=self.outcome.touched.update,
            done=self.block_done,
        )

    def _ring_shape(self, devices: int) -> RingShape:
        return ring_shape(
            window_bytes=self.execution.window_bytes,
            block_bytes=self.execution.block_bytes,
            threads=self._threads,
            devices=devices,
            reads_hold_copies=self._copies > 0,
        )

    def _workers(self, blocks: int, block_cost: int) -> int:
        """As many threads as there is window for: each may hold a staged block and as much page cache."""
        return max(1, min(self._threads, blocks, self.window.cap_bytes // block_cost))

    @property
    def _threads(self) -> int:
        """How many threads should read, window permitting."""
        return self.execution.threads or max((reader.usual_threads for reader in self.execution.readers), default=1)

    @property
    def _copies(self) -> int:
        """How many more times a block in flight is held: by its reader, and as pages of the offload file."""
        return any(reader.holds_copy for reader in self.execution.readers) + (self.execution.offload is not None)

    def _wait_for(self, workers: list[Worker], feeder: Feeder, window: Window) -> None:
        with ThreadPoolExecutor(len(workers), thread_name_prefix="umem-read") as pool:
            waiting: set[Future[None]] = {pool.submit(worker.run) for worker in workers}
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=_TICK_S)
                    for future in done:
                        future.result()
                    self._report()
            except BaseException:
                feeder.stop()
                window.close()
                for worker in workers:
                    worker.cancel()
                raise

    def _report(self) -> None:
        if self.execution.progress is not None:
            elapsed_s = time.perf_counter() - self._started_s
            total = self.plan.forecast.read_bytes
            self.execution.progress(Progress(self._read_bytes, total, elapsed_s, self.window.live_bytes))

    def block_done(self, count: int, read_s: float, deliver_s: float) -> None:
        """A worker has read and delivered `count` bytes, which it still holds in the window."""
        if self.execution.offload is not None:
            self.execution.offload.settle()
        with self._lock:
            self._read_bytes += count
            self.outcome.thread_seconds["read"] += read_s
            self.outcome.thread_seconds["deliver"] += deliver_s

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
                    behind = DropBehind(self.plan.checkpoint.shards[index].path, shard_ends, kept)
                    evictions[index] = stack.enter_context(contextlib.closing(behind))
            yield evictions

    def _kept(self, shard: int) -> list[range] | None:
        """The parts of a shard's page cache that stay while the rest is evicted; None: nothing needs to be evicted."""
        if self.plan.checkpoint.shards[shard].is_remote:
            return None
        match self.execution.cache_policy:
            case CachePolicy.KEEP:
                return None
            case CachePolicy.DROP:
                return []
            case CachePolicy.RESTORE:
                if not self.execution.readers[shard].holds_copy:
                    return None
                return cached_ranges(self.plan.checkpoint.shards[shard].path) or []
