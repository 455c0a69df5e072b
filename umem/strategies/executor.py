"""Runs a plan: allocates final storage, reads blocks in file order by a few threads, delivers them, then the rest.

Everything live besides final storage draws from the window. If anything goes wrong, or the caller interrupts, the
threads stop at their next block, everything that was taken is let go, and the first error is raised in the caller's
thread.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from umem.checkpoint.entries import Checkpoint, Entry, Shard
from umem.checkpoint.pagecache import DropBehind, cached_bytes_of_files
from umem.checkpoint.readers import Reader, ReadHandle
from umem.planning.plan import LoadPlan
from umem.planning.targets import Target
from umem.planning.views import View, coalesced, laid_out, ordered, restricted
from umem.planning.writes import Factor, Group, Route, Write
from umem.strategies.base import BlockStrategy, Converter, GroupStrategy
from umem.strategies.blocks import GAP_BYTES, Block, Part, blocks_of
from umem.strategies.registry import block_strategy, group_strategy, is_block_route
from umem.strategies.storage import Destination, allocate, destination_of, has_own_pages, huge_pages_pay, torch_dtype
from umem.strategies.window import Window, WindowClosedError

__all__ = ["Execution", "Outcome", "Progress", "execute"]

_TICK_S = 0.1


class Progress(NamedTuple):
    """How far a load is: bytes read, of how many, since when, and the bytes live in the window."""

    read_bytes: int
    total_bytes: int
    elapsed_s: float
    window_bytes: int


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
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    thread_seconds: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "deliver": 0.0})
    window_peak_bytes: int = 0
    huge_pages: bool | None = None
    touched: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Execution:
    """How to run a plan.

    Attributes
    ----------
    window_bytes, block_bytes, threads
        As in the settings.
    readers
        The reader of each shard.
    keep_page_cache
        Whether the files' pages may stay in the page cache.
    convert
        Runs the materialized groups' conversions; needed only where the plan has any.
    progress
        Called about ten times a second, from the calling thread.
    """

    window_bytes: int
    block_bytes: int
    threads: int
    readers: Sequence[Reader]
    keep_page_cache: bool = False
    convert: Converter | None = None
    progress: Callable[[Progress], None] | None = None


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
            run.pump(plan.groups, run.destinations, phase="read")
            run.convert()
    except BaseException:
        run.destinations.clear()  # a kept traceback must not keep the model's memory
        outcome.tensors.clear()
        raise
    outcome.tensors.update({name: destination.tensor for name, destination in run.destinations.items()})
    outcome.window_peak_bytes = run.window.peak_bytes
    return outcome


class _Run:
    """One execution of one plan."""

    def __init__(self, plan: LoadPlan, execution: Execution, outcome: Outcome) -> None:
        self.plan, self.execution, self.outcome = plan, execution, outcome
        self.window = Window(execution.window_bytes)
        self.destinations: dict[str, Destination] = {}
        self.factors: dict[str, torch.Tensor] = {}
        shards = plan.checkpoint.shards
        self.alignments = [reader.alignment(shard) for reader, shard in zip(execution.readers, shards, strict=False)]
        self._started_s = time.perf_counter()
        self._read_bytes = 0
        self._lock = threading.Lock()

    def place(self, live: Mapping[str, torch.Tensor]) -> None:
        """Give every target a destination that is live or filled by writes; conversions bring storage of their own."""
        started_s = time.perf_counter()
        written = {self.plan.targets[name].name for group in self.plan.groups if group.writes for name in group.targets}
        fresh = [target for target in self.plan.filled if target.name in written and target.name not in live]
        self.outcome.huge_pages = huge_pages_pay(sum(target.nbytes for target in fresh if target.device == "cpu"))
        residues = self._residues()
        for target in fresh:
            tensor = allocate(target, huge_pages=self.outcome.huge_pages, residue=residues.get(target.name, 0))
            self.destinations[target.name] = destination_of(target, tensor)
        for name, tensor in live.items():
            self.destinations[name] = destination_of(self.plan.targets[name], tensor)
        self.outcome.seconds["allocate"] = time.perf_counter() - started_s

    def _residues(self) -> dict[str, int]:
        """By target, where in a page its storage begins so that most of its bytes lie congruent to the file."""
        votes: dict[str, Counter[int]] = {}
        for group in self.plan.groups:
            alignment = self.alignments[group.entries[0].shard]
            if alignment == 1 or group.route is not Route.DIRECT:
                continue
            for write in group.writes:
                target = self.plan.targets[write.target]
                if has_own_pages(target) and write.destination.runs_row_major():
                    start = write.entry.start - write.destination.offset * write.entry.dtype.itemsize
                    votes.setdefault(target.name, Counter())[start % alignment] += write.entry.nbytes
        return {name: counts.most_common(1)[0][0] for name, counts in votes.items()}

    def read_factors(self) -> None:
        """Read the tensors by which others are multiplied; they stay until the end."""
        writes = [write for group in self.plan.groups for write in group.writes]
        entries = {write.factor.entry.name: write.factor.entry for write in writes if write.factor is not None}
        whole = self._read_whole(tuple(entries.values()))
        self.factors = {name: tensor.as_strided((tensor.numel(),), (1,)) for name, tensor in whole.items()}

    def convert(self) -> None:
        """Run the materialized groups, one at a time."""
        started_s = time.perf_counter()
        for group in self.plan.groups:
            if is_block_route(group.route):
                continue
            if self.execution.convert is None:
                raise ValueError(f"the plan has the conversion {group.name}, but nobody to run it was given")
            strategy: GroupStrategy = group_strategy(group.route)
            self.outcome.touched.update(group.targets)
            given = strategy.run(group, self._read_whole, self.execution.convert, self.window, self.destinations)
            self.outcome.tensors.update(given)
        self.outcome.seconds["convert"] = time.perf_counter() - started_s

    def _read_whole(self, entries: tuple[Entry, ...]) -> dict[str, torch.Tensor]:
        """Stored tensors in memory of their own, with their stored strides."""
        staging: dict[str, Destination] = {}
        groups = []
        for entry in entries:
            flat = entry._replace(shape=(entry.nbytes // entry.dtype.itemsize,), strides=None)
            target = Target(entry.name, entry.dtype, flat.shape)
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
        started_s = time.perf_counter()
        window = window or self.window
        blocks = blocks_of(groups, self.execution.block_bytes)
        routes = {write.entry.name: group.route for group in groups for write in group.writes}
        with self._eviction(blocks) as evictions:
            feeder = _Feeder(blocks)
            count = self._workers(len(blocks))
            workers = [_Worker(self, window, feeder, destinations, routes, evictions) for _ in range(count)]
            self._wait_for(workers, feeder, window)
        self.outcome.seconds[phase] = self.outcome.seconds.get(phase, 0.0) + time.perf_counter() - started_s

    def _workers(self, blocks: int) -> int:
        """As many threads as there is window for: each may hold a staged block and as much page cache."""
        return max(1, min(self.execution.threads, blocks, self.window.cap_bytes // self.block_cost))

    @property
    def block_cost(self) -> int:
        """What a block in flight may hold besides final storage: staging, and the page cache that it fills."""
        fills = any(reader.fills_page_cache for reader in self.execution.readers)
        return (2 if fills else 1) * self.execution.block_bytes

    def _wait_for(self, workers: list[_Worker], feeder: _Feeder, window: Window) -> None:
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
                raise

    def _report(self) -> None:
        if self.execution.progress is not None:
            elapsed_s = time.perf_counter() - self._started_s
            total = self.plan.forecast.read_bytes
            self.execution.progress(Progress(self._read_bytes, total, elapsed_s, self.window.live_bytes))

    def block_done(self, count: int, read_s: float, deliver_s: float) -> None:
        """A worker has read and delivered `count` bytes."""
        with self._lock:
            self._read_bytes += count
            self.outcome.thread_seconds["read"] += read_s
            self.outcome.thread_seconds["deliver"] += deliver_s

    @contextlib.contextmanager
    def _eviction(self, blocks: Sequence[Block]) -> Iterator[dict[int, DropBehind]]:
        """By shard, the eviction behind its readers; nothing for files that were in the page cache before."""
        evictions: dict[int, DropBehind] = {}
        ends: dict[int, list[int]] = {}
        for block in blocks:
            if self.execution.readers[block.shard].fills_page_cache and not self.execution.keep_page_cache:
                ends.setdefault(block.shard, []).append(block.end)
        with contextlib.ExitStack() as stack:
            for index, shard_ends in ends.items():
                shard = self.plan.checkpoint.shards[index]
                if not _mostly_cached(shard):
                    evictions[index] = stack.enter_context(contextlib.closing(DropBehind(shard.path, shard_ends)))
            yield evictions


def _mostly_cached(shard: Shard) -> bool:
    cached = cached_bytes_of_files([shard.path])
    return cached is not None and 2 * cached > shard.size_bytes


class _Feeder:
    """Hands out blocks in order, to several threads, until stopped."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = iter(blocks)
        self._lock = threading.Lock()
        self._stopped = False

    def next(self) -> Block | None:
        with self._lock:
            return None if self._stopped else next(self._blocks, None)

    def stop(self) -> None:
        self._stopped = True


class _Worker:
    """One reading thread: takes blocks, fills final storage or its staging buffer, delivers what was staged."""

    def __init__(
        self,
        run: _Run,
        window: Window,
        feeder: _Feeder,
        destinations: Mapping[str, Destination],
        routes: Mapping[str, Route],
        evictions: Mapping[int, DropBehind],
    ) -> None:
        self._run, self._window, self._feeder = run, window, feeder
        self._destinations, self._routes, self._evictions = destinations, routes, evictions
        self._checkpoint: Checkpoint = run.plan.checkpoint
        self._staging: mmap.mmap | None = None
        self._gap = memoryview(bytearray(GAP_BYTES))
        self._handle: ReadHandle | None = None
        self._shard = -1

    def run(self) -> None:
        """Work until there are no more blocks, or the load ends."""
        with contextlib.ExitStack() as files, torch.no_grad():
            while (block := self._feeder.next()) is not None:
                try:
                    with self._window.holding(min(self._run.block_cost, self._window.cap_bytes)):
                        self._do(block, files)
                except WindowClosedError:
                    return
                except BaseException:
                    self._feeder.stop()
                    raise

    def _do(self, block: Block, files: contextlib.ExitStack) -> None:
        handle = self._opened(block.shard, files)
        for part in block.parts:
            self._run.outcome.touched.update(self._destination(write).target.name for write in part.writes)
        buffers, staged = self._layout(block)
        started_s = time.perf_counter()
        handle.fill(block.start, buffers)
        read_s = time.perf_counter()
        for part, items in staged:
            self._deliver(part, items)
        done_s = time.perf_counter()
        if block.shard in self._evictions:
            self._evictions[block.shard].block_done(block.number)
        self._run.block_done(block.end - block.start, read_s - started_s, done_s - read_s)

    def _opened(self, shard: int, files: contextlib.ExitStack) -> ReadHandle:
        """The handle of a shard; blocks come in file order, so one is open at a time."""
        if self._handle is None or self._shard != shard:
            files.close()
            reader = self._run.execution.readers[shard]
            opened = reader.open(self._checkpoint.shards[shard], self._run.execution.block_bytes)
            self._handle = files.enter_context(opened)
            self._shard = shard
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
                alignment = self._run.alignments[block.shard]
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
        destination = self._destination(write)
        if destination.memory is None or self._routes[write.entry.name] is not Route.DIRECT:
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
            room = 2 * self._run.execution.block_bytes  # aligning items less than doubles what is staged
            self._staging = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return memoryview(self._staging)[start : start + count]

    def _destination(self, write: Write) -> Destination:
        destination = self._destinations.get(write.target)
        return destination or self._destinations[self._run.plan.targets[write.target].name]

    def _deliver(self, part: Part, staged: memoryview) -> None:
        entry = part.writes[0].entry
        strategy: BlockStrategy = block_strategy(self._routes[entry.name])
        itemsize = entry.dtype.itemsize
        low, high = (part.start - entry.start) // itemsize, (part.end - entry.start) // itemsize
        items = torch.frombuffer(staged, dtype=torch_dtype(entry.dtype))
        for write in part.writes:
            destination = self._destination(write)
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
        destination = self._destination(write)
        shape = destination.target.shape
        numbers = self._run.factors[factor.entry.name]
        placed, multiplied = (
            ordered(*laid_out(write.source, write.destination, shape, other))
            for other in (destination.storage_view, factor.view)
        )
        cuts = zip(restricted(*placed, low, high), restricted(*multiplied, low, high), strict=True)
        for (source, view), (_, by) in cuts:
            strided = numbers.as_strided(by.shape, by.strides, by.offset)
            strategy.deliver(items, source._replace(offset=source.offset - low), destination, view, strided)
