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
from umem.checkpoint.pagecache import DropBehind
from umem.checkpoint.readers import Reader, mostly_cached
from umem.planning.plan import LoadPlan
from umem.planning.targets import Target
from umem.planning.views import View
from umem.planning.writes import Group, Route, Write
from umem.strategies.base import Converter, GroupStrategy
from umem.strategies.blocks import Block, blocks_of
from umem.strategies.registry import group_strategy, is_block_route
from umem.strategies.storage import Destination, allocate, destination_of, has_own_pages, huge_pages_pay
from umem.strategies.window import Window
from umem.strategies.worker import Feeder, Job, Worker

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
            feeder = Feeder(blocks)
            job = self._job(destinations, routes, evictions, window)
            workers = [Worker(job, feeder) for _ in range(self._workers(len(blocks)))]
            self._wait_for(workers, feeder, window)
        self.outcome.seconds[phase] = self.outcome.seconds.get(phase, 0.0) + time.perf_counter() - started_s

    def _job(
        self,
        destinations: Mapping[str, Destination],
        routes: Mapping[str, Route],
        evictions: Mapping[int, DropBehind],
        window: Window,
    ) -> Job:
        def destination_of(write: Write) -> Destination:
            return destinations.get(write.target) or destinations[self.plan.targets[write.target].name]

        return Job(
            shards=self.plan.checkpoint.shards,
            readers=self.execution.readers,
            alignments=self.alignments,
            destination_of=destination_of,
            routes=routes,
            factors=self.factors,
            evictions=evictions,
            window=window,
            block_bytes=self.execution.block_bytes,
            block_cost=self.block_cost,
            touched=self.outcome.touched.update,
            done=self.block_done,
        )

    def _workers(self, blocks: int) -> int:
        """As many threads as there is window for: each may hold a staged block, and as much again."""
        return max(1, min(self.execution.threads, blocks, self.window.cap_bytes // self.block_cost))

    @property
    def block_cost(self) -> int:
        """What a block in flight may hold besides final storage: staging, and page cache or a reply from afar."""
        twice = any(reader.fills_page_cache or reader.holds_replies for reader in self.execution.readers)
        return (2 if twice else 1) * self.execution.block_bytes

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
                if not mostly_cached(shard):
                    evictions[index] = stack.enter_context(contextlib.closing(DropBehind(shard.path, shard_ends)))
            yield evictions
