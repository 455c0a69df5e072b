"""One load from opening to report: the order of the steps, the admission, the watch.

`api` and the host frameworks drive a `LoadSession` with the model and the adapter that they have.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Self

from umem._types import format_bytes
from umem.admission import Admission, Tried, Waiting
from umem.checkpoint import Checkpoint, open_checkpoint
from umem.checkpoint.offload import OffloadFile
from umem.checkpoint.pagecache import CachePolicy, cached_bytes_of_files
from umem.checkpoint.readers import ReaderChoice, choose_readers
from umem.errors import MemoryOverrunError, UmemError
from umem.garbage import full_collections_wait
from umem.guard import Guard
from umem.machine import MachineSnapshot, facts_of, probe
from umem.planning import Budget, Limit, LoadPlan
from umem.probes import (
    Expectation,
    LoadStoppedError,
    Monitor,
    PlatformClass,
    census,
    classify,
    device_processes,
    floors_within,
    overrun_error,
    process_name,
    processes_in_group,
)
from umem.report.model import LoadReport, Stopwatch
from umem.settings import LoadSettings, settings_from_environment

if TYPE_CHECKING:
    import torch

    from umem.probes.processes import Census
    from umem.strategies import Outcome, Progress
    from umem.strategies.base import Converter

__all__ = ["LoadSession", "MachineSnapshot", "ProgressCallback", "probe"]

ProgressCallback = Callable[["Progress"], None]


class LoadSession:
    """One load: open, plan, check, run, report. A context manager that watches memory from `open` on.

    Full garbage collections wait until it ends (`garbage`).

    Parameters
    ----------
    device
        Where the model goes; `auto` is the best device there is.
    settings
        The settings; those of the environment where None.
    progress
        Called about ten times a second while bytes move, and while the load waits for memory.
    machine
        The machine that a load is planned for, where it is not this one; then `device` means nothing.
    """

    def __init__(
        self,
        *,
        device: str = "auto",
        settings: LoadSettings | None = None,
        progress: ProgressCallback | None = None,
        machine: MachineSnapshot | None = None,
    ) -> None:
        self.settings = settings or settings_from_environment()
        self.stopwatch = Stopwatch()
        self._machine = machine
        self._facts = machine.facts if machine is not None else facts_of(device)
        self.platform = classify(self._facts)
        self._progress = progress
        self._monitor: Monitor | None = None
        self._plan: LoadPlan | None = None
        self._outcome: Outcome | None = None
        self._watched: list[str] = []
        self._budget = Budget()
        self._readers = ReaderChoice((), "nothing to read")
        self._guard: Guard | None = None
        self._whole = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._whole.enter_context(full_collections_wait())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._whole:
            if self._monitor is not None:
                self._monitor.__exit__(kind, error, trace)

    def open(self, path_or_id: str | os.PathLike[str], *, revision: str | None = None) -> Checkpoint:
        """Open the checkpoint, and start to watch memory."""
        with self.stopwatch.phase("open"):
            checkpoint = open_checkpoint(path_or_id, revision=revision)
        self._watched = [shard.path for shard in checkpoint.shards if not shard.is_remote]
        self._monitor = Monitor(
            interval_s=self.settings.sample_interval_s,
            cached_file_bytes=lambda: cached_bytes_of_files(self._watched),
            device_bytes=self._device_bytes,
            thresholds=self.settings.thresholds,
            sampled=self._beat,
            take_census=self._census,
        )
        self._monitor.__enter__()
        return checkpoint

    @contextlib.contextmanager
    def _guarding(self) -> Iterator[None]:
        """Have the load guarded, where that was asked for."""
        if not self.settings.guard:
            yield
            return
        with Guard() as self._guard:
            yield
        self._guard = None

    def _beat(self) -> None:
        if (guard := self._guard) is not None:
            guard.beat()

    def _device_bytes(self) -> int | None:
        """What torch holds for this process of a memory that the device shares with the processor."""
        if self.platform.kind is not PlatformClass.UNIFIED or "torch" not in sys.modules:
            return None
        import torch

        if not (self.platform.device.startswith("cuda") and torch.cuda.is_initialized()):
            return None
        return torch.cuda.memory_reserved(self.platform.device)

    def _census(self) -> Census:
        """The memory of other processes; on a shared memory on both sides."""
        found = Counter(census())
        if self.platform.kind is PlatformClass.UNIFIED:
            found.update({process.pid: process.nbytes for process in device_processes(self._facts.driver.bus_id)})
        return found

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the load."""
        with self.stopwatch.phase(name):
            yield

    def room(self) -> dict[str, int | None]:
        """Bytes that a model may take, by device; `cpu` too where that is another memory. None where unknown."""
        machine = self._machine or probe(facts=self._facts, settings=self.settings)
        budget, device = machine.budget, self.platform.device
        memory = budget.tightest_in_memory
        beside_the_window = None if memory is None else max(0, memory.available_bytes - self.settings.window_bytes)
        if budget.device is None:
            return {device: beside_the_window}
        return {device: budget.available_bytes, "cpu": beside_the_window}

    def run(
        self,
        load_plan: LoadPlan,
        *,
        convert: Converter | None = None,
        live: Mapping[str, torch.Tensor] | None = None,
        offload: OffloadFile | None = None,
        tried: Tried = lambda _: (),
    ) -> dict[str, torch.Tensor]:
        """Check that the plan fits, run it, and give the final tensors by target name.

        Parameters
        ----------
        convert
            Runs the conversions that stay with their owner.
        live
            Target name -> tensor to fill in place.
        offload
            The file for targets on disk that groups with writes fill.
        tried
            Gives the remedies that whoever built the model has tried; asked only before a refusal.

        Raises
        ------
        InsufficientMemoryError
            It does not fit, also not within the time that it may wait; nothing was read.
        MemoryOverrunError
            Memory ran short on the way; everything is freed.
        """
        self._plan = load_plan
        with self.stopwatch.phase("wait"):
            admission = Admission.of(load_plan, self._facts, self.settings, waiting=self._waiting, tried=tried)
        with admission, self._guarding():
            self._budget = admission.machine.budget
            if load_plan.forecast.read_bytes:
                self._readers = choose_readers(self.settings.reader, load_plan.checkpoint.shards)
            return self._execute(load_plan, admission, convert, live, offload)

    def _execute(
        self,
        load_plan: LoadPlan,
        admission: Admission,
        convert: Converter | None,
        live: Mapping[str, torch.Tensor] | None,
        offload: OffloadFile | None,
    ) -> dict[str, torch.Tensor]:
        from umem.strategies import Execution, Outcome, execute

        def progress(now: Progress) -> None:
            admission.taken(now.read_bytes / max(1, now.total_bytes))
            if self._progress is not None:
                self._progress(now._replace(sample=monitor.samples[-1], verdicts=tuple(monitor.verdicts)))

        monitor = self._watch
        execution = Execution(
            window_bytes=load_plan.forecast.window_bytes,
            block_bytes=self.settings.block_bytes or self._usual_block_bytes(),
            readers=self._readers.readers,
            threads=self.settings.io_threads,
            cache_policy=admission.machine.reading.page_cache,
            convert=convert,
            progress=progress,
            watch=monitor,
            offload=offload,
        )
        self._watched += [offload.path] if offload is not None else []
        outcome = Outcome()
        self._expect(load_plan, admission)
        stopped = False
        with self.stopwatch.phase("run"):
            try:
                execute(load_plan, execution, live=live, outcome=outcome)
            except LoadStoppedError:
                stopped = True  # raised below, where no traceback of it keeps what the load had taken
            except BaseException as error:
                _say_what_is_spoiled(error, outcome.touched & set(live or ()))
                raise
        if stopped:
            overrun = self._overrun()
            _say_what_is_spoiled(overrun, outcome.touched & set(live or ()))
            raise overrun
        monitor.rest()
        self._outcome = outcome
        self._split_run_phase(outcome.seconds)
        return outcome.tensors

    def _usual_block_bytes(self) -> int:
        """What all readers read well, where the window has room for several."""
        return min([self.settings.largest_block_bytes, *(reader.pace.block_bytes for reader in self._readers.readers)])

    @property
    def _watch(self) -> Monitor:
        if self._monitor is None:
            raise ValueError("there is no open checkpoint to load from")
        return self._monitor

    def _expect(self, load_plan: LoadPlan, admission: Admission) -> None:
        """Have memory judged by what the load was let in for."""
        forecast, budget = load_plan.forecast, self._budget
        is_shared = budget.device is None
        final = forecast.final_bytes if is_shared else forecast.final_bytes_by_device.get("cpu", 0)
        expected = Expectation(
            taken_bytes=budget.needs_of(load_plan).memory_bytes,
            peak_bytes=final + forecast.window_bytes + forecast.scratch_bytes,
            allowed_bytes=self.settings.memory_budget_bytes if is_shared else None,
            system_reserve_bytes=budget.reserve_bytes(Limit.SYSTEM),
            group_reserve_bytes=budget.reserve_bytes(Limit.GROUP),
            counts_cache=admission.machine.reading.page_cache is not CachePolicy.KEEP,
        )
        self._watch.expect(expected)
        if self._guard is not None:
            reserves = {"system": expected.system_reserve_bytes, "group": expected.group_reserve_bytes}
            thresholds = self.settings.thresholds
            self._guard.arm({name: floors_within(reserve, thresholds).hard for name, reserve in reserves.items()})

    def _overrun(self) -> MemoryOverrunError:
        """Why the watch stopped the load. Everything that it had taken is free by now, garbage included."""
        import torch

        gc.collect(1)  # a full one holds the interpreter, and the error, for tenths of a second
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        monitor = self._watch
        verdict = monitor.verdicts[-1]
        grown = monitor.grown_processes()
        if monitor.policy.is_in_group(verdict):
            members = processes_in_group()
            grown = {pid: count for pid, count in grown.items() if pid in members}
        if self._guard is not None:
            grown = {pid: count for pid, count in grown.items() if pid != self._guard.pid}
        return overrun_error(verdict, monitor.policy, monitor.samples, monitor.verdicts, grown, process_name)

    def _waiting(self, now: Waiting) -> None:
        """Tell whoever follows the load what it waits for."""
        if self._progress is None or self._plan is None:
            return
        from umem.strategies import Progress

        sizes = f"{format_bytes(now.needed_bytes)} needed, {format_bytes(now.available_bytes)} available"
        words = f"waiting for memory: {sizes} ({now.source}), {now.waited_s:.0f} of {now.wait_s:.0f} s"
        self._progress(Progress(0, self._plan.forecast.read_bytes, now.waited_s, 0, words))

    def _split_run_phase(self, seconds: Mapping[str, float]) -> None:
        """The executor times its own phases; put them in the place of the one around it."""
        del self.stopwatch.seconds["run"]
        position = next(i for i, span in enumerate(self.stopwatch.spans) if span[0] == "run")
        _, start_s, _ = self.stopwatch.spans.pop(position)
        for name, spent_s in seconds.items():
            self.stopwatch.add(name, spent_s)
            self.stopwatch.spans.append((name, start_s, start_s + spent_s))
            start_s += spent_s

    def report(self) -> LoadReport:
        """What the load did. Call it once, when the model is whole; it ends the watch."""
        if self._monitor is None or self._plan is None or self._outcome is None:
            raise ValueError("there is no finished load to report on")
        self._monitor.__exit__(None, None, None)
        monitor, self._monitor = self._monitor, None
        return LoadReport(
            plan=self._plan,
            platform=self.platform,
            reader=self._readers.name,
            reader_reason=self._readers.reason,
            copier=self._outcome.copier,
            copier_reason=self._outcome.copier_reason,
            seconds=self.stopwatch.seconds,
            thread_seconds={**self._outcome.thread_seconds, "watch": monitor.cpu_s},
            window_peak_bytes=self._outcome.window_peak_bytes,
            huge_pages=self._outcome.huge_pages,
            available_bytes=self._budget.available_bytes,
            available_source=self._budget.source,
            samples=monitor.samples,
            verdicts=tuple(monitor.verdicts),
            spans=sorted(self.stopwatch.spans, key=lambda span: span[1]),
        )


def _say_what_is_spoiled(error: BaseException, spoiled: set[str]) -> None:
    if not spoiled:
        return
    names = sorted(spoiled)
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    error.add_note(f"The load was in place; these tensors no longer hold what they held: {shown}")
    if isinstance(error, UmemError):
        error.spoiled = tuple(names)
