"""Plans and reports as rich renderables, for a terminal of 80 columns and wider."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from umem._types import format_bytes
from umem.planning.budget import Budget
from umem.planning.plan import LoadPlan
from umem.probes.memory import MemorySnapshot
from umem.probes.platform import Platform
from umem.report.model import PHASES, LoadReport

__all__ = ["machine_table", "plan_table", "report_table"]

_SHOWN = 5


def plan_table(plan: LoadPlan) -> RenderableType:
    """What a load will do: sizes, routes with their reasons, the largest targets."""
    forecast = plan.forecast
    sizes = _facts()
    sizes.add_row("checkpoint", plan.checkpoint.identifier or plan.checkpoint.path)
    sizes.add_row("stored", f"{len(plan.checkpoint.entries)} tensors in {len(plan.checkpoint.shards)} files")
    for device, count in forecast.final_bytes_by_device.items():
        sizes.add_row(f"model on {device}", format_bytes(count))
    if forecast.offloaded_bytes:
        sizes.add_row("to write", f"{format_bytes(forecast.offloaded_bytes)} to the offload folder")
    sizes.add_row("window", format_bytes(forecast.window_bytes))
    if forecast.scratch_bytes:
        sizes.add_row("conversions", f"{format_bytes(forecast.scratch_bytes)} (estimate)")
    sizes.add_row("peak", Text(format_bytes(forecast.peak_bytes), style="bold"))
    sizes.add_row("to read", format_bytes(forecast.read_bytes))
    parts: list[RenderableType] = [sizes, _routes(plan)]
    remarks = dict.fromkeys(remark for _, remark in plan.remarks)
    for remark in remarks:
        concerned = tuple(target for target, said in plan.remarks if said == remark)
        parts.append(_names(remark, concerned))
    if plan.left_to_owner:
        parts.append(_names("initialised, not stored", plan.left_to_owner))
    if plan.ignored:
        parts.append(_names("stored, not read", plan.ignored))
    return Group(*parts)


def report_table(report: LoadReport) -> RenderableType:
    """What a load did: times by phase, throughput, memory against the forecast, routes."""
    peaks = report.peaks
    facts = _facts()
    times = " · ".join(f"{name} {report.seconds[name]:.2f}" for name in PHASES if report.seconds.get(name, 0) >= 0.005)
    facts.add_row("seconds", f"{report.total_s:.2f}  ({times})")
    facts.add_row("read", f"{format_bytes(report.plan.forecast.read_bytes)} at {format_bytes(report.bytes_per_s)}/s")
    facts.add_row("reader", f"{report.reader} ({report.reader_reason})")
    facts.add_row("copier", f"{report.copier} ({report.copier_reason})")
    forecast = format_bytes(report.plan.forecast.peak_bytes)
    facts.add_row("peak", f"{format_bytes(report.measured_peak_bytes)} measured, {forecast} forecast")
    facts.add_row(
        "", f"process {format_bytes(peaks.anonymous_bytes)}, page cache {format_bytes(peaks.page_cache_bytes)}"
    )
    facts.add_row("left behind", f"{format_bytes(peaks.page_cache_left_bytes)} of page cache")
    facts.add_row("MemAvailable", f"fell by {format_bytes(peaks.available_dip_bytes)}")
    facts.add_row(
        "faults", f"{peaks.major_faults} major; swap {peaks.swapped_in_pages} pages in, {peaks.swapped_out_pages} out"
    )
    return Group(facts, _routes(report.plan))


def machine_table(platform: Platform, memory: MemorySnapshot, budget: Budget) -> RenderableType:
    """What machine this is and what a load could take."""
    facts = _facts()
    facts.add_row("machine", f"{platform.kind} ({platform.evidence})")
    facts.add_row("device", platform.device)
    facts.add_row("memory", f"{format_bytes(memory.available_bytes)} of {format_bytes(memory.total_bytes)} available")
    facts.add_row(
        "swap", f"{format_bytes(memory.swap_free_bytes)} of {format_bytes(memory.swap_total_bytes)} free; never counted"
    )
    if memory.cgroup is not None:
        limit = memory.cgroup
        facts.add_row(
            "control group", f"{format_bytes(limit.headroom_bytes)} of {format_bytes(limit.limit_bytes)} left"
        )
        facts.add_row("", limit.path)
    facts.add_row("a load may take", f"{format_bytes(budget.available_bytes)} ({budget.source})")
    return facts


def _facts() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _routes(plan: LoadPlan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("route")
    table.add_column("bytes", justify="right")
    table.add_column("why")
    for (route, reason), count in sorted(plan.bytes_by_route().items(), key=lambda row: -row[1]):
        table.add_row(str(route), format_bytes(count), reason)
    return table


def _names(title: str, names: tuple[str, ...]) -> Text:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return Text(f"{title}: {', '.join(names[:_SHOWN])}{more}", style="dim")
