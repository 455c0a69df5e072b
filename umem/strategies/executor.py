"""Runs a plan: final storage first, then the tensors that multiply others, then all blocks, then the conversions.

Everything live besides final storage draws from the window. If anything goes wrong, or the caller interrupts, or the
watch stops the load, everything that was taken is let go, and the first error is raised in the caller's thread. While
the watch asks for less, one block is in flight at a time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial

import torch

from umem._types import DType
from umem.checkpoint.entries import Entry
from umem.checkpoint.pagecache import CachePolicy
from umem.planning.plan import LoadPlan
from umem.planning.targets import Target
from umem.planning.views import View
from umem.planning.writes import Group, Route, Write
from umem.strategies.base import GroupStrategy
from umem.strategies.execution import Execution, Outcome
from umem.strategies.placing import FinalStorage
from umem.strategies.reading import FileReading
from umem.strategies.registry import group_strategy, is_block_route, is_group_route
from umem.strategies.relief import Relief, obey
from umem.strategies.storage import Destination, allocate, destination_of, torch_dtype
from umem.strategies.window import Window

__all__ = ["execute"]


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
    LoadStoppedError
        The watch stopped the load.
    """
    outcome = Outcome() if outcome is None else outcome
    run = _Run(plan, execution, outcome)
    try:
        with torch.no_grad():
            run.place(live or {})
            run.read_factors()
            run.read_blocks()
            run.convert()
    except BaseException:
        run.storage.let_go()
        outcome.tensors.clear()
        raise
    outcome.tensors.update(run.storage.tensors)
    outcome.window_peak_bytes = run.window.peak_bytes
    return outcome


class _Run:
    """One execution of one plan."""

    def __init__(self, plan: LoadPlan, execution: Execution, outcome: Outcome) -> None:
        self.plan, self.execution, self.outcome = plan, execution, outcome
        self.window = Window(execution.window_bytes)
        shards = plan.checkpoint.shards
        alignments = [reader.alignment(shard) for reader, shard in zip(execution.readers, shards, strict=False)]
        keeps_cache = execution.cache_policy is CachePolicy.RESTORE
        relief = Relief(() if keeps_cache else [shard.path for shard in shards if not shard.is_remote])
        self.obey = partial(obey, execution.watch, relief)
        self.storage = FinalStorage(plan, alignments, execution.offload)
        self.reading = FileReading(plan, execution, outcome, alignments, obey=self.obey, stopped=self.storage.discard)

    def place(self, live: Mapping[str, torch.Tensor]) -> None:
        """Give the targets their final storage."""
        with self._timed("allocate"):
            self.storage.place(live, self.obey)
        self.outcome.huge_pages = self.storage.huge_pages

    def read_factors(self) -> None:
        """Read the tensors by which others are multiplied to where those are; they stay until the end."""
        entries: dict[str, dict[str, Entry]] = {}
        dtypes: dict[tuple[str, str], set[DType]] = {}
        for write in (write for group in self.plan.groups for write in group.writes):
            if write.factor is not None:
                entry = write.factor.entry
                device = self.storage.destinations[self.plan.targets[write.target].name].target.device
                entries.setdefault(device, {})[entry.name] = entry
                dtypes.setdefault((device, entry.name), set()).add(write.factor.dtype)
        for device, named in entries.items():
            with self._timed("read"):
                whole = self._read_whole(tuple(named.values()), device)
            for name, tensor in whole.items():
                flat = tensor.as_strided((tensor.numel(),), (1,))
                for dtype in dtypes[device, name]:
                    self.reading.factors[device, name, dtype] = flat.to(torch_dtype(dtype))

    def read_blocks(self) -> None:
        """Read and deliver the groups that go block by block."""
        groups = [group for group in self.plan.groups if is_block_route(group.route)]
        with self._timed("read"):
            copier = self.reading.run(groups, self.storage.destinations, self.window)
        if copier is not None:
            self.outcome.copier, self.outcome.copier_reason = copier.name, copier.reason

    def convert(self) -> None:
        """Run the materialized groups, one at a time."""
        for group in self.plan.groups:
            if not is_group_route(group.route):
                continue
            if self.execution.convert is None:
                raise ValueError(f"the plan has the conversion {group.name}, but nobody to run it was given")
            self.obey()
            strategy: GroupStrategy = group_strategy(group.route)
            self.outcome.touched.update(group.targets)
            with self._timed("convert"):
                given = strategy.run(
                    group, self._read_whole, self.execution.convert, self.window, self.storage.destinations
                )
            self.outcome.tensors.update(given)

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
        self.reading.run(groups, staging, Window(self.execution.window_bytes))
        return {
            entry.name: staging[entry.name].tensor.as_strided(
                entry.shape, View.whole(entry.shape, entry.strides).strides
            )
            for entry in entries
        }

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            spent_s = time.perf_counter() - started_s
            self.outcome.seconds[phase] = self.outcome.seconds.get(phase, 0.0) + spent_s
