"""The command line: `umem load`, `umem plan`, `umem probe`, `umem ttff`. The only place that prints.

Results go to standard output, as a table or with `--json` as JSON; progress and errors go to standard error,
progress only on a terminal. Exit status: 0 done, 1 refused or failed, 2 used wrongly, 130 interrupted.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, Self

import typer

from umem._types import format_bytes, parse_bytes, parse_seconds
from umem.errors import RunFailedError, SettingsError, UmemError
from umem.measurement.page_cache import CACHES
from umem.settings import LoadSettings, settings_from_environment

if TYPE_CHECKING:
    from rich.console import RenderableType

    from umem.strategies import Progress

__all__ = ["app", "main"]

_INTERRUPTED = 130
_SAY_EVERY_S = 5.0

app = typer.Typer(
    name="umem",
    help="Load model checkpoints without ever holding more than the model and a small window.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

_Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="A directory, a file, a URL, or a hub id (org/name).")
]
_Device = Annotated[str, typer.Option(help="Where the model goes: auto, cpu, cuda, cuda:1, mps.")]
_DType = Annotated[str, typer.Option(help="auto (what the config says), bfloat16, float16, float32.")]
_Window = Annotated[str | None, typer.Option(help="Cap on all memory besides the model, like 64MiB.")]
_MemoryBudget = Annotated[str | None, typer.Option(help="What a load may take where the model goes, like 20GiB.")]
_Wait = Annotated[str | None, typer.Option(help="Wait up to so long, like 60s, for memory to become free.")]
_Reader = Annotated[str | None, typer.Option(help="How files are read: auto, odirect, dontcache, buffered, mapped.")]
_Residency = Annotated[str | None, typer.Option(help="owned, or mapped: the model is the files' own pages (cpu).")]
_Missing = Annotated[list[str] | None, typer.Option(help="Pattern of parameters that may be absent, like 'score.*'.")]
_Unexpected = Annotated[list[str] | None, typer.Option(help="Pattern of stored tensors that may be left out.")]
_Guard = Annotated[bool, typer.Option("--guard", help="End this process from another if it hangs with memory short.")]
_Offload = Annotated[str | None, typer.Option(help="Where what does not fit the device goes: cpu, disk.")]
_OffloadFolder = Annotated[Path | None, typer.Option(help="Where weights on disk are written, if they must be.")]
_Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")]
_Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run model code that comes with the checkpoint.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(
    epilog="Examples:  [bold]umem load ./Qwen3-30B-A3B[/]   [bold]umem load ./model --json --chart load.svg[/]"
)
def load(
    checkpoint: _Checkpoint,
    device: _Device = "auto",
    dtype: _DType = "auto",
    window: _Window = None,
    memory_budget: _MemoryBudget = None,
    wait_for_memory: _Wait = None,
    reader: _Reader = None,
    residency: _Residency = None,
    offload: _Offload = None,
    offload_folder: _OffloadFolder = None,
    allow_missing: _Missing = None,
    allow_unexpected: _Unexpected = None,
    revision: _Revision = None,
    trust_remote_code: _Remote = False,
    chart: Annotated[Path | None, typer.Option(help="Write a picture of memory over time (SVG) here.")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show memory and each change of pace during the load.")
    ] = False,
    guard: _Guard = False,
    as_json: _Json = False,
) -> None:
    """Load a model, as `from_pretrained` would, and report what it took."""
    from umem.api import load as load_model
    from umem.report.chart import memory_chart
    from umem.report.table import report_table

    with _LiveTable() if watch else _ProgressBar() as view:
        _, report = load_model(
            checkpoint,
            device=device,
            dtype=dtype,
            allow_missing=allow_missing or (),
            allow_unexpected=allow_unexpected or (),
            settings=_settings(window, memory_budget, reader, residency, wait_for_memory, guard=guard or None),
            progress=view.update,
            return_report=True,
            **_host_settings(revision, trust_remote_code, offload, offload_folder),
        )
    if chart is not None:
        chart.write_text(memory_chart(report))
    _show(report.to_json, lambda: report_table(report), as_json)


@app.command(epilog="Examples:  [bold]umem plan ./Qwen3-30B-A3B[/]   [bold]umem plan org/name --platform spark.json[/]")
def plan(
    checkpoint: _Checkpoint,
    device: _Device = "auto",
    dtype: _DType = "auto",
    window: _Window = None,
    memory_budget: _MemoryBudget = None,
    platform: Annotated[
        Path | None, typer.Option(help="Plan for the machine in this file, saved there by umem probe --save.")
    ] = None,
    reader: _Reader = None,
    residency: _Residency = None,
    offload: _Offload = None,
    offload_folder: _OffloadFolder = None,
    allow_missing: _Missing = None,
    allow_unexpected: _Unexpected = None,
    revision: _Revision = None,
    trust_remote_code: _Remote = False,
    as_json: _Json = False,
) -> None:
    """Say what a load would read and take, and whether it fits, without reading a tensor byte."""
    from rich.console import Group

    from umem.admission import circumstances
    from umem.api import plan as plan_load
    from umem.api import probe as probe_machine
    from umem.machine import MachineSnapshot
    from umem.planning import check_budget
    from umem.report.table import plan_table, verdict_table

    settings = _settings(window, memory_budget, reader, residency)
    if platform is not None and device != "auto":
        raise typer.BadParameter("the machine in --platform has a device already", param_hint="--device")
    saved = None if platform is None else MachineSnapshot.load(platform, settings)
    made = plan_load(
        checkpoint,
        device=device,
        dtype=dtype,
        allow_missing=allow_missing or (),
        allow_unexpected=allow_unexpected or (),
        settings=settings,
        machine=saved,
        **_host_settings(revision, trust_remote_code, offload, offload_folder),
    )
    machine = saved or probe_machine(device=device, settings=settings)
    budget = machine.budget

    def facts() -> dict[str, Any]:
        reading = machine.reading
        return made.to_json() | {
            "platform": machine.platform.to_json(),
            "budget": {
                "available_bytes": budget.available_bytes,
                "source": budget.source,
                "fits": budget.shortfall_of(budget.needs_of(made)) is None,
            },
            "reading": {"reader": reading.reader, "page_cache": str(reading.page_cache)},
        }

    _show(facts, lambda: Group(plan_table(made), verdict_table(made, machine)), as_json)
    check_budget(made, budget, lambda shortfall: circumstances(machine, shortfall, here=saved is None))


@app.command(epilog="Examples:  [bold]umem probe --json[/]   [bold]umem probe --save spark.json[/]")
def probe(
    device: _Device = "auto",
    save: Annotated[Path | None, typer.Option(help="Save what was found, for umem plan --platform elsewhere.")] = None,
    as_json: _Json = False,
) -> None:
    """Say what machine this is, what memory it has, and what a load could take."""
    from umem.api import probe as probe_machine
    from umem.report.table import machine_table

    machine = probe_machine(device=device)
    if save is not None:
        try:
            machine.save(save)
        except OSError as error:
            raise typer.BadParameter(f"{save}: {error.strerror}", param_hint="--save") from None
    _show(machine.to_json, lambda: machine_table(machine), as_json)


@app.command(
    epilog="Examples:  [bold]umem ttff ./model[/]   [bold]umem ttff ./model --baseline transformers --html ttff.html[/]"
)
def ttff(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A directory, or a hub id in the cache.")],
    baseline: Annotated[
        list[str] | None, typer.Option(help="Compare with transformers, accelerate or safetensors; may be repeated.")
    ] = None,
    cache: Annotated[list[str] | None, typer.Option(help="cold or warm page cache; both if not said.")] = None,
    repeats: Annotated[int, typer.Option(help="Rounds; the loaders take turns.")] = 3,
    device: _Device = "auto",
    dtype: _DType = "auto",
    window: _Window = None,
    memory_budget: _MemoryBudget = None,
    reader: _Reader = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with pictures of memory over time here.")] = None,
    as_json: _Json = False,
) -> None:
    """Measure the time from the start of a process to a model's first forward pass, each run a fresh process."""
    from umem.measurement.page import ttff_page
    from umem.measurement.table import ttff_table
    from umem.measurement.ttff import Measurement, measure

    if html is not None and (html.is_dir() or not html.resolve().parent.is_dir()):
        raise SettingsError(f"--html {html}: give the name of a file in a directory that is there")
    wanted = Measurement(
        checkpoint=checkpoint,
        device=device,
        dtype=dtype,
        baselines=tuple(baseline or ()),
        caches=tuple(cache or CACHES),
        repeats=repeats,
        settings=_changed_settings(_settings(window, memory_budget, reader, None)),
    )
    result = measure(wanted, _say if sys.stderr.isatty() else lambda _line: None)
    if html is not None:
        html.write_text(ttff_page(result))
    _show(lambda: result, lambda: ttff_table(result), as_json)
    if not result["equal"]:
        raise RunFailedError("the loaders did not give the same weights and logits; their times cannot be compared")


def main() -> NoReturn:
    """Run the command line; every error that umem raises on purpose becomes one message."""
    try:
        status = app(prog_name="umem", standalone_mode=False) or 0
    except (typer.Abort, KeyboardInterrupt):
        status = _INTERRUPTED
    except UmemError as error:
        _say(str(error))
        for note in getattr(error, "__notes__", ()):
            _say(note)
        sys.exit(1)
    except Exception as error:
        if not hasattr(error, "show"):
            raise
        error.show()
        sys.exit(getattr(error, "exit_code", 2))
    if status == _INTERRUPTED:
        _say("interrupted; everything that was taken is freed")
    sys.exit(status)


def _settings(
    window: str | None,
    memory_budget: str | None,
    reader: str | None,
    residency: str | None,
    wait_for_memory: str | None = None,
    *,
    guard: bool | None = None,
) -> LoadSettings:
    settings = settings_from_environment().with_changes(reader=reader, residency=residency, guard=guard)
    if window is not None:
        settings = replace(settings, window_bytes=parse_bytes(window))
    if memory_budget is not None:
        settings = replace(settings, memory_budget_bytes=parse_bytes(memory_budget))
    if wait_for_memory is not None:
        settings = replace(settings, wait_for_memory_s=parse_seconds(wait_for_memory))
    return settings


def _changed_settings(settings: LoadSettings) -> dict[str, Any]:
    """What options changed of the environment's settings, for a process that has the same environment."""
    base = settings_from_environment()
    names = ("window_bytes", "memory_budget_bytes", "reader")
    return {name: getattr(settings, name) for name in names if getattr(settings, name) != getattr(base, name)}


def _host_settings(
    revision: str | None, trust_remote_code: bool, offload: str | None, offload_folder: Path | None
) -> dict[str, Any]:
    given = {
        "revision": revision,
        "trust_remote_code": trust_remote_code or None,
        "offload": offload,
        "offload_folder": offload_folder,
    }
    return {name: value for name, value in given.items() if value is not None}


def _show(facts: Callable[[], dict[str, Any]], table: Callable[[], RenderableType], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts(), indent=2))
        return
    from rich.console import Console

    Console().print(table())


def _say(message: str) -> None:
    print(f"umem: {message}", file=sys.stderr)


class _ProgressBar:
    """A bar on a terminal: bytes, rate, what the window holds, or what the load waits for. Nothing elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._said_s = -math.inf

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

            self._bar = Progress(
                TextColumn("loading"),
                BarColumn(bar_width=24),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TextColumn("{task.fields[window]}", style="dim"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Show how far the load is."""
        if self._bar is None:
            return
        if progress.waiting:
            self._say_what_it_waits_for(progress)
            return
        window = f"window {format_bytes(progress.window_bytes)}"
        if self._task is None:
            self._task = self._bar.add_task("loading", total=progress.total_bytes, window=window)
        self._bar.update(self._task, completed=progress.read_bytes, total=progress.total_bytes, window=window)

    def _say_what_it_waits_for(self, progress: Progress) -> None:
        if progress.elapsed_s - self._said_s >= _SAY_EVERY_S:
            self._said_s = progress.elapsed_s
            self._bar.console.print(progress.waiting, style="dim", markup=False, highlight=False)


class _LiveTable:
    """Memory and pace during the load: a table that is drawn anew on a terminal, a line for each change elsewhere."""

    def __init__(self) -> None:
        self._live: Any = None
        self._started_s = time.monotonic()
        self._said = 0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, progress: Progress) -> None:
        """Show memory now, or say what has changed."""
        from umem.report.live import change_line, live_table

        if self._live is not None:
            table = progress.waiting or live_table(progress, self._started_s)
            self._live.update(table, refresh=True)
            return
        for verdict in progress.verdicts[self._said :]:
            _say(change_line(verdict, self._started_s))
        self._said = len(progress.verdicts)
