"""One load from opening to report: the order of the steps, the budget check, the watch. And the machine as it is now.

`api` and the host frameworks drive a `LoadSession` with the model and the adapter that they have.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from umem._display import Displayed, display_as
from umem.checkpoint import Checkpoint, open_checkpoint
from umem.checkpoint.pagecache import CachePolicy, cached_bytes_of_files
from umem.checkpoint.readers import ReaderChoice, choose_readers
from umem.config import MIB, LoadConfig, config_from_environment
from umem.errors import UmemError
from umem.planning import Budget, LoadPlan, budget_from, check_budget
from umem.probes import MemoryProbe, MemorySnapshot, Monitor, Platform, PlatformClass, probe_platform
from umem.report.model import LoadReport, Stopwatch

if TYPE_CHECKING:
    import torch

    from umem.strategies import Outcome, Progress
    from umem.strategies.base import Converter

__all__ = ["LoadSession", "MachineSnapshot", "ProgressCallback", "probe"]

ProgressCallback = Callable[["Progress"], None]

#: Memory that a load leaves to the rest of the machine unless told otherwise. Where processor and accelerator share one
#: memory, the driver needs room too: boxes have frozen with 2 to 4 GiB available.
_RESERVE_BYTES = 64 * MIB
_UNIFIED_RESERVE_FRACTION = 0.04

_CACHE_POLICIES = {
    PlatformClass.CPU: CachePolicy.RESTORE,
    PlatformClass.UNIFIED: CachePolicy.DROP,
    PlatformClass.DISCRETE: CachePolicy.KEEP,
}


@dataclass(frozen=True, slots=True)
class MachineSnapshot(Displayed):
    """The machine at one moment: its class, its memory, and what a load could take."""

    platform: Platform
    memory: MemorySnapshot
    budget: Budget

    def to_json(self) -> dict[str, Any]:
        """The snapshot as JSON values."""
        return {
            "schema": "umem.probe",
            "version": 1,
            "platform": self.platform.to_json(),
            "memory": self.memory.to_json(),
            "budget": {"available_bytes": self.budget.available_bytes, "source": self.budget.source},
        }


def probe(*, device: str = "auto", config: LoadConfig | None = None) -> MachineSnapshot:
    """What machine this is and what a load to `device` could take now."""
    config = config or config_from_environment()
    platform = probe_platform(device)
    with MemoryProbe() as memory_probe:
        memory = memory_probe.sample()
    reserve = config.reserve_bytes
    if reserve is None:
        unified = platform.kind is PlatformClass.UNIFIED and memory.total_bytes is not None
        reserve = int(_UNIFIED_RESERVE_FRACTION * (memory.total_bytes or 0)) if unified else _RESERVE_BYTES
    available, headroom = memory.available_bytes, memory.cgroup.headroom_bytes if memory.cgroup else None
    if platform.kind is PlatformClass.DISCRETE:
        available, headroom = _device_free_bytes(platform.device), None
    budget = budget_from(
        available_bytes=available,
        headroom_bytes=headroom,
        reserve_bytes=reserve,
        allowed_bytes=config.memory_budget_bytes,
    )
    return MachineSnapshot(platform, memory, budget)


def _device_free_bytes(device: str) -> int | None:
    """Free memory of a device that has its own; None where torch does not tell."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) if device.startswith("cuda") else None


class LoadSession:
    """One load: open, plan, check, run, report. A context manager that watches memory from `open` on.

    Parameters
    ----------
    device
        Where the model goes; `auto` is the best device there is.
    config
        The settings; those of the environment where None.
    progress
        Called about ten times a second while bytes move.
    """

    def __init__(
        self, *, device: str = "auto", config: LoadConfig | None = None, progress: ProgressCallback | None = None
    ) -> None:
        self.config = config or config_from_environment()
        self.stopwatch = Stopwatch()
        self.platform = probe_platform(device)
        self._device = device
        self._progress = progress
        self._monitor: Monitor | None = None
        self._plan: LoadPlan | None = None
        self._outcome: Outcome | None = None
        self._budget = Budget(None, "not asked")
        self._readers = ReaderChoice((), "nothing to read")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._monitor is not None:
            self._monitor.__exit__(kind, error, trace)

    def open(self, path_or_id: str | os.PathLike[str], *, revision: str | None = None) -> Checkpoint:
        """Open the checkpoint, and start to watch memory."""
        with self.stopwatch.phase("open"):
            checkpoint = open_checkpoint(path_or_id, revision=revision)
        paths = [shard.path for shard in checkpoint.shards if not shard.is_remote]
        self._monitor = Monitor(
            interval_s=self.config.sample_interval_s, cached_file_bytes=lambda: cached_bytes_of_files(paths)
        )
        self._monitor.__enter__()
        return checkpoint

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the load."""
        with self.stopwatch.phase(name):
            yield

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Time the planning. A plan is many small records without cycles, which the collector would visit in vain."""
        collects = gc.isenabled()
        gc.disable()
        try:
            with self.stopwatch.phase("plan"):
                yield
        finally:
            if collects:
                gc.enable()

    def run(
        self,
        load_plan: LoadPlan,
        *,
        convert: Converter | None = None,
        live: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Check that the plan fits, run it, and give the final tensors by target name.

        Raises
        ------
        InsufficientMemoryError
            It does not fit; nothing was read.
        """
        from umem.strategies import Execution, Outcome, execute

        self._plan = load_plan
        self._budget = probe(device=self.platform.device, config=self.config).budget
        check_budget(load_plan, self._budget)
        if load_plan.forecast.read_bytes:
            self._readers = choose_readers(self.config.reader, load_plan.checkpoint.shards)
        execution = Execution(
            window_bytes=load_plan.forecast.window_bytes,
            block_bytes=self.config.block_bytes,
            readers=self._readers.readers,
            threads=self.config.io_threads,
            cache_policy=_CACHE_POLICIES[self.platform.kind],
            convert=convert,
            progress=self._progress,
        )
        outcome = Outcome()
        with self.stopwatch.phase("run"):
            try:
                execute(load_plan, execution, live=live, outcome=outcome)
            except BaseException as error:
                _say_what_is_spoiled(error, outcome.touched & set(live or ()))
                raise
        self._outcome = outcome
        self._split_run_phase(outcome.seconds)
        return outcome.tensors

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
        samples, self._monitor = self._monitor.samples, None
        return LoadReport(
            plan=self._plan,
            platform=self.platform,
            reader=self._readers.name,
            reader_reason=self._readers.reason,
            copier=self._outcome.copier,
            copier_reason=self._outcome.copier_reason,
            seconds=self.stopwatch.seconds,
            thread_seconds=self._outcome.thread_seconds,
            window_peak_bytes=self._outcome.window_peak_bytes,
            huge_pages=self._outcome.huge_pages,
            available_bytes=self._budget.available_bytes,
            available_source=self._budget.source,
            samples=samples,
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


def _machine_table(machine: MachineSnapshot) -> Any:
    from umem.report.table import machine_table

    return machine_table(machine.platform, machine.memory, machine.budget)


def _machine_html(machine: MachineSnapshot) -> str:
    from umem.report.notebook import notebook_html

    return notebook_html(_machine_table(machine))


display_as(MachineSnapshot, terminal=_machine_table, notebook=_machine_html)
