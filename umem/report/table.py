"""Plans and reports as rich renderables, for a terminal of 80 columns and wider."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from umem._types import format_bytes
from umem.machine import MachineSnapshot
from umem.planning.budget import Allowance
from umem.planning.plan import LoadPlan
from umem.report.live import change_line
from umem.report.model import PHASES, LoadReport

__all__ = ["machine_table", "plan_table", "report_table", "verdict_table"]

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
    for verdict in report.verdicts[:_SHOWN]:
        facts.add_row("watch", change_line(verdict, report.started_s))
    if len(report.verdicts) > _SHOWN:
        facts.add_row("", f"and {len(report.verdicts) - _SHOWN} more changes of pace")
    return Group(facts, _routes(report.plan))


def machine_table(machine: MachineSnapshot) -> RenderableType:
    """What machine this is and what a load could take."""
    platform, memory, budget = machine.platform, machine.memory, machine.budget
    facts = _facts()
    facts.add_row("machine", f"{platform.kind} ({platform.evidence})")
    for doubt in platform.doubts:
        facts.add_row("doubt", Text(doubt, style="yellow"))
    facts.add_row("device", platform.device)
    facts.add_row("memory", f"{format_bytes(memory.available_bytes)} of {format_bytes(memory.total_bytes)} available")
    cache, free = format_bytes(memory.file_cache_bytes), format_bytes(memory.free_bytes)
    facts.add_row("", f"{free} free, {cache} of page cache")
    if budget.large_blocks is not None:
        blocks = budget.large_blocks
        inside, size = format_bytes(blocks.in_blocks_bytes), format_bytes(blocks.block_bytes)
        facts.add_row("", f"{inside} free in blocks of {size} and more")
    if memory.huge_pages:
        pool = f"{format_bytes(memory.huge_page_pool_bytes)} free in {memory.huge_pages} pages set aside"
        facts.add_row("huge pages", f"{pool}; never counted")
    swap = f"{format_bytes(memory.swap_free_bytes)} of {format_bytes(memory.swap_total_bytes)} free; never counted"
    facts.add_row("swap", swap)
    if memory.pressure_some_percent is not None:
        facts.add_row("pressure", f"{memory.pressure_some_percent:.2f} % of the last 10 s stood still for memory")
    group = memory.cgroup
    if group is not None:
        left, limit = format_bytes(group.headroom_bytes), format_bytes(group.limit_bytes)
        facts.add_row("control group", f"{left} of {limit} left")
        facts.add_row("", group.path)
    for remark in machine.device_memory.remarks:
        facts.add_row("device", Text(remark, style="yellow"))
    if machine.others:
        claimed = format_bytes(sum(claim.memory_bytes for claim in machine.others))
        facts.add_row("other loads", f"{sum(claim.loads for claim in machine.others)}, which will take {claimed} more")
    facts.add_row("a load may take", _words(budget.tightest))
    if budget.device is not None:
        facts.add_row("and beside it", _words(budget.tightest_in_memory))
    reading = machine.reading
    facts.add_row("files", f"read by {reading.reader} when not cached; page cache: {reading.page_cache}")
    return facts


def verdict_table(plan: LoadPlan, machine: MachineSnapshot) -> RenderableType:
    """Whether a plan fits a machine, in short."""
    budget = machine.budget
    needs = budget.needs_of(plan)
    facts = _facts()
    facts.add_row("machine", f"{machine.platform.kind} ({machine.platform.evidence})")
    needed = needs.memory_bytes if budget.device is None else needs.device_bytes
    facts.add_row("a load may take", _words(budget.tightest))
    if budget.device is not None:
        facts.add_row(
            "and beside it", f"{_words(budget.tightest_in_memory)}; {format_bytes(needs.memory_bytes)} needed"
        )
    fits = budget.shortfall_of(needs) is None
    verdict = Text("it fits" if fits else "it does not fit", style="bold green" if fits else "bold red")
    facts.add_row("needed", Text.assemble(f"{format_bytes(needed)}: ", verdict))
    return facts


def _words(allowance: Allowance | None) -> str:
    if allowance is None:
        return "? (the machine does not tell)"
    return f"{format_bytes(allowance.available_bytes)} ({allowance.source})"


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
