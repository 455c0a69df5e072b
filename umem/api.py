"""load, load_into, plan, probe: wires the parts, decides nothing.

`LoadSession` is one load from opening to report; host frameworks drive it with the model and adapter of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from umem._types import DType
from umem.checkpoint import Checkpoint, open_checkpoint
from umem.checkpoint.pagecache import cached_bytes_of_files
from umem.checkpoint.readers import ReaderChoice, choose_readers
from umem.config import MIB, LoadConfig, config_from_environment
from umem.errors import ConfigError, KeyMismatchError, UmemError
from umem.planning import Budget, LoadPlan, Target, Targets, budget_from, check_budget, make_plan, targets_of_module
from umem.planning.keys import without
from umem.probes import MemoryProbe, MemorySnapshot, Monitor, Platform, PlatformClass, probe_platform
from umem.report.model import LoadReport, Stopwatch

if TYPE_CHECKING:
    import torch

    from umem.strategies import Outcome, Progress
    from umem.strategies.base import Converter

__all__ = ["LoadSession", "MachineSnapshot", "load", "load_into", "plan", "probe"]

ProgressCallback = Callable[["Progress"], None]

#: Memory that a load leaves to the rest of the machine unless told otherwise. Where processor and accelerator share one
#: memory, the driver needs room too: boxes have frozen with 2 to 4 GiB available.
_RESERVE_BYTES = 64 * MIB
_UNIFIED_RESERVE_FRACTION = 0.04

_HOSTS = {"transformers": "umem.adapters.hosts.transformers"}


@dataclass(frozen=True, slots=True)
class MachineSnapshot:
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
        self._readers = ReaderChoice((), "")

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
        paths = [shard.path for shard in checkpoint.shards]
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
        self._readers = choose_readers(self.config.reader, load_plan.checkpoint.shards)
        execution = Execution(
            window_bytes=load_plan.forecast.window_bytes,
            block_bytes=self.config.block_bytes,
            threads=self.config.threads,
            readers=self._readers.readers,
            keep_page_cache=self.platform.kind is PlatformClass.DISCRETE,
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


@overload
def load(
    path_or_id: str | os.PathLike[str], *, return_report: Literal[False] = ..., **settings: Any
) -> torch.nn.Module: ...
@overload
def load(
    path_or_id: str | os.PathLike[str], *, return_report: Literal[True], **settings: Any
) -> tuple[torch.nn.Module, LoadReport]: ...
def load(
    path_or_id: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    config: LoadConfig | None = None,
    progress: ProgressCallback | None = None,
    return_report: bool = False,
    host: str = "transformers",
    **host_settings: Any,
) -> torch.nn.Module | tuple[torch.nn.Module, LoadReport]:
    """Build the model that a checkpoint belongs to and load it: what `from_pretrained` gives, bit for bit.

    Parameters
    ----------
    path_or_id
        A directory with `config.json` and weights, or a hub id.
    device
        Where the model goes; `auto` is the best device there is.
    dtype
        `auto` for what the config says, or a torch dtype.
    allow_missing
        Patterns (`score.*`) of parameters that the checkpoint may lack; the framework initialises them.
    allow_unexpected
        Patterns of stored tensors that may be left out.
    config
        Window, budget, threads; those of the environment where None.
    progress
        Called about ten times a second while bytes move.
    return_report
        Give `(model, report)`.
    host
        The framework that builds the model.
    host_settings
        Handed to the framework: `model_class`, `attn_implementation`, `revision`, `key_mapping`, ...

    Raises
    ------
    CheckpointError, KeyMismatchError, InsufficientMemoryError
        Before a tensor byte is read.
    ReadError
        A read failed on the way; everything is freed.
    """
    _check_dtype(dtype)
    with LoadSession(device=str(device), config=config, progress=progress) as session:
        model = _host(host).load_model(
            session,
            os.fspath(path_or_id),
            dtype=dtype,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            **host_settings,
        )
        return (model, session.report()) if return_report else model


def plan(
    path_or_id: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    config: LoadConfig | None = None,
    host: str = "transformers",
    **host_settings: Any,
) -> LoadPlan:
    """What `load` would do, without reading a tensor byte or allocating the model. Arguments as for `load`.

    A checkpoint without a `config.json` is planned as it is stored: every tensor is a target of its own.
    """
    _check_dtype(dtype)
    with LoadSession(device=str(device), config=config) as session:
        if _has_model_config(path_or_id):
            planned: LoadPlan = _host(host).plan_model(
                session,
                os.fspath(path_or_id),
                dtype=dtype,
                allow_missing=allow_missing,
                allow_unexpected=allow_unexpected,
                **host_settings,
            )
            return planned
        from umem.adapters.families import by_name

        checkpoint = session.open(path_or_id)
        targets = Targets(
            Target(entry.name, entry.dtype, entry.shape, session.platform.device)
            for entry in checkpoint.entries.values()
        )
        return make_plan(checkpoint, targets, by_name(checkpoint, targets), window_bytes=session.config.window_bytes)


def _check_dtype(dtype: str | torch.dtype) -> None:
    if dtype != "auto" and DType.from_torch(dtype).kind != "float":
        raise ConfigError(f"dtype={dtype}: a model is loaded as auto, bfloat16, float16, float32 or float64")


def _has_model_config(path_or_id: str | os.PathLike[str]) -> bool:
    path = os.fspath(path_or_id)
    if not os.path.exists(path):
        return True
    directory = path if os.path.isdir(path) else os.path.dirname(path)
    return os.path.exists(os.path.join(directory, "config.json"))


def _host(name: str) -> Any:
    if name not in _HOSTS:
        raise ConfigError(f"no host framework is called {name!r}; there are: {', '.join(sorted(_HOSTS))}")
    return importlib.import_module(_HOSTS[name])


def load_into(
    module: torch.nn.Module,
    path_or_id: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
    key_mapping: Mapping[str, str] | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    config: LoadConfig | None = None,
    progress: ProgressCallback | None = None,
) -> LoadReport:
    """Fill any module from a checkpoint: live tensors in place, tensors on the meta device with new storage.

    Parameters
    ----------
    device
        Where meta tensors go; live ones stay where they are.
    dtype
        None keeps the module's dtypes; `auto` takes the stored ones and a torch dtype that one, both for floating-point
        tensors on the meta device only.
    key_mapping
        Regular expression -> replacement, applied to stored names in order.
    allow_missing, allow_unexpected, config, progress
        As for `load`.

    Raises
    ------
    CheckpointError, KeyMismatchError, InsufficientMemoryError
        Before a tensor byte is read; the module is as it was.
    ReadError
        A read failed on the way. Meta tensors are meta as before; live ones that were written to are named in a note of
        the error and in its `spoiled`.
    """
    from umem.adapters.families import by_name
    from umem.adapters.install import install, live_tensors, unfillable_buffers

    with LoadSession(device=str(device), config=config, progress=progress) as session:
        checkpoint = session.open(path_or_id)
        with session.phase("plan"):
            live = live_tensors(module)
            targets = targets_of_module(
                module,
                dtype=_dtype_rule(dtype, checkpoint, live, key_mapping),
                device=lambda _name, own: session.platform.device if own == "meta" else own,
            )
            unfillable = without(unfillable_buffers(module), allow_missing)
            if unfillable:
                raise KeyMismatchError(missing=unfillable)
            load_plan = make_plan(
                checkpoint,
                targets,
                by_name(checkpoint, targets, key_mapping),
                window_bytes=session.config.window_bytes,
                live=live.keys(),
                allow_missing=allow_missing,
                allow_unexpected=allow_unexpected,
            )
        filled = {target.name for target in load_plan.filled}
        tensors = session.run(load_plan, live={name: tensor for name, tensor in live.items() if name in filled})
        with session.phase("install"):
            install(module, targets, {name: tensor for name, tensor in tensors.items() if name not in live})
        return session.report()


def _dtype_rule(
    dtype: str | torch.dtype | None,
    checkpoint: Checkpoint,
    live: Mapping[str, Any],
    key_mapping: Mapping[str, str] | None,
) -> Callable[[str, DType], DType]:
    """Given a target's name and own dtype, its final dtype."""
    from umem.adapters.families import renamed

    if dtype is None:
        return lambda _name, own: own
    stored = (
        {renamed(name, key_mapping): entry.dtype for name, entry in checkpoint.entries.items()}
        if dtype == "auto"
        else {}
    )
    wanted = None if dtype == "auto" else DType.from_torch(dtype)

    def rule(name: str, own: DType) -> DType:
        if name in live or own.kind != "float":
            return own
        return wanted or stored.get(name, own)

    return rule
