"""A running load for people: memory and pace now as a table of 80 columns, and a line for each change of pace."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from umem._types import format_bytes
from umem.probes.verdicts import Level, Sample, Verdict

if TYPE_CHECKING:
    from umem.strategies import Progress

__all__ = ["change_line", "live_table"]

_PACE = {Level.NORMAL: "full speed", Level.SOFT: "slower", Level.HARD: "stopped"}
_STYLE = {Level.NORMAL: "green", Level.SOFT: "yellow", Level.HARD: "bold red"}
_LATEST = 4


def change_line(verdict: Verdict, started_s: float) -> str:
    """One change of pace: when, to which, why."""
    return f"{verdict.time_s - started_s:7.2f} s  {_PACE[verdict.level]}: {verdict.words}"


def live_table(progress: Progress, started_s: float) -> RenderableType:
    """How far the load is, what memory is left, and the latest changes of pace; `started_s` by `time.monotonic()`."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rate = progress.read_bytes / progress.elapsed_s if progress.elapsed_s else 0.0
    done, total = format_bytes(progress.read_bytes), format_bytes(progress.total_bytes)
    table.add_row("read", f"{done} of {total} at {format_bytes(rate)}/s, {progress.elapsed_s:.1f} s")
    level = progress.verdicts[-1].level if progress.verdicts else Level.NORMAL
    table.add_row("pace", Text(_PACE[level], style=_STYLE[level]))
    if progress.sample is not None:
        for name, words in _memory(progress.sample, progress.window_bytes):
            table.add_row(name, words)
    for verdict in progress.verdicts[-_LATEST:]:
        table.add_row("", Text(change_line(verdict, started_s), style=_STYLE[verdict.level]))
    return table


def _memory(sample: Sample, window_bytes: int) -> list[tuple[str, str]]:
    memory = sample.memory
    left = f"{format_bytes(memory.available_bytes)} available"
    if memory.cgroup is not None:
        left += f", {format_bytes(memory.cgroup.headroom_bytes)} in the control group"
    own = f"{format_bytes(sample.own_bytes)}, window {format_bytes(window_bytes)}"
    rows = [("left", left), ("process", f"{own}, files' page cache {format_bytes(sample.cached_file_bytes)}")]
    if memory.swap_total_bytes:
        used = memory.swap_total_bytes - (memory.swap_free_bytes or 0)
        rows.append(("swap", f"{format_bytes(used)} of {format_bytes(memory.swap_total_bytes)} in use"))
    if memory.pressure_full_percent is not None:
        rows.append(("pressure", f"all stood still for memory {memory.pressure_full_percent:.2f} % of the last 10 s"))
    return rows
