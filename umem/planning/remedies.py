"""The refusal of a plan that does not fit: what is needed, what there is, and what would really make it fit.

Every remedy is tried against the budget first, and named only if the plan fits with it. Pure: processes and sizes are
handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from umem._types import DType, format_bytes
from umem.errors import InsufficientMemoryError, ProcessMemory, Remedy
from umem.planning.budget import Budget, Limit, Needs, Shortfall
from umem.planning.plan import LoadPlan
from umem.planning.writes import Group, Route

__all__ = ["Circumstances", "check_budget"]

_NARROW = DType.BF16
_SHOWN = 3
_MOST_PROCESSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What else is known of the machine, for remedies.

    Attributes
    ----------
    processes
        Other processes and what each holds of the memory that is short, the system's or the device's, largest first.
    pids_in_group
        Those in the control group that limits the load.
    huge_page_pool_bytes
        Free huge pages that were set aside.
    cache_on_device_bytes
        Page cache in the device's memory that the budget does not count as free.
    further
        What whoever built the model has tried and found to fit.
    """

    processes: tuple[ProcessMemory, ...] = ()
    pids_in_group: frozenset[int] = frozenset()
    huge_page_pool_bytes: int = 0
    cache_on_device_bytes: int = 0
    further: tuple[Remedy, ...] = ()


def check_budget(
    plan: LoadPlan, budget: Budget, circumstances: Callable[[Shortfall], Circumstances] = lambda _: Circumstances()
) -> None:
    """Return if `plan` fits `budget`.

    Parameters
    ----------
    circumstances
        Called only where it does not fit, and told where.

    Raises
    ------
    InsufficientMemoryError
        It does not; the error names needed, available, the source, the largest parts, and what would make it fit.
    """
    shortfall = budget.shortfall_of(budget.needs_of(plan))
    if shortfall is None:
        return
    known = circumstances(shortfall)
    remedies = list(_remedies(plan, budget, shortfall, known))
    largest = plan.largest_targets()
    raise InsufficientMemoryError(
        _message(plan, budget, shortfall, known, remedies),
        needed_bytes=shortfall.needed_bytes,
        available_bytes=shortfall.allowance.available_bytes,
        source=shortfall.allowance.source,
        largest=largest,
        processes=known.processes,
        remedies=remedies,
    )


def _message(plan: LoadPlan, budget: Budget, shortfall: Shortfall, known: Circumstances, remedies: list[Remedy]) -> str:
    forecast, allowance = plan.forecast, shortfall.allowance
    sizes = f"model {format_bytes(forecast.allocated_bytes)}, window {format_bytes(forecast.window_bytes)}"
    where = f" on {budget.device}" if allowance in budget.on_device else ""
    parts = f"({sizes}, conversions {format_bytes(forecast.scratch_bytes)})"
    need = f"{format_bytes(shortfall.needed_bytes)}{where} {parts}"
    if shortfall.is_fragmentation:
        need = (
            f"{format_bytes(forecast.peak_bytes)} {parts}, of it {format_bytes(shortfall.needed_bytes)} in large blocks"
        )
    there = f"{format_bytes(allowance.available_bytes)} are available ({allowance.source})"
    largest = ", ".join(f"{name} ({format_bytes(size)})" for name, size in plan.largest_targets(_SHOWN))
    lines = [f"the load needs {need}; {there}. Nothing was read.", f"  Largest parts: {largest}"]
    if known.processes:
        shown = (f"{pid} {name} ({format_bytes(size)})" for pid, name, size in known.processes[:_SHOWN])
        lines.append(f"  Biggest other processes: {', '.join(shown)}")
    if remedies:
        lines.append("  What would make it fit:")
        lines += [f"    - {remedy.text}" for remedy in remedies]
    else:
        lines.append("  Nothing that umem knows of would make it fit here; it needs a machine with more memory.")
    return "\n".join(lines)


def _remedies(plan: LoadPlan, budget: Budget, shortfall: Shortfall, known: Circumstances) -> Iterator[Remedy]:
    if shortfall.is_fragmentation:
        yield Remedy(
            "reboot",
            "reboot: the free memory is in pieces too small for the driver, and compacting recovers little of it",
        )
        return
    needs = budget.needs_of(plan)
    if budget.without(Limit.USER).shortfall_of(needs) is None:
        needed = needs.memory_bytes if budget.device is None else needs.device_bytes
        yield Remedy("raise_budget", f"allow a memory budget of {format_bytes(needed)}; the machine has it", needed)
    yield from _smaller_plans(plan, budget, needs)
    yield from known.further
    yield from _processes_to_stop(budget, needs, shortfall, known)
    more = known.huge_page_pool_bytes
    if more and budget.with_more(more, Limit.SYSTEM).shortfall_of(needs) is None:
        text = f"give back the huge pages that are set aside and free ({format_bytes(more)}): sysctl vm.nr_hugepages=0"
        yield Remedy("free_huge_pages", text, more)
    more = known.cache_on_device_bytes
    if more and budget.with_more(more, Limit.DEVICE).shortfall_of(needs) is None:
        text = (
            f"drop the page cache that lies in the device's memory ({format_bytes(more)}):"
            " sync; echo 1 > /proc/sys/vm/drop_caches (as root)"
        )
        yield Remedy("drop_caches", text, more)


def _smaller_plans(plan: LoadPlan, budget: Budget, needs: Needs) -> Iterator[Remedy]:
    """Remedies that change what is loaded, each with what it would need."""
    narrow = _saving(needs, _narrowed(plan), budget)
    if narrow != needs and budget.shortfall_of(narrow) is None:
        needed = narrow.memory_bytes + narrow.device_bytes
        text = f"load it as {_NARROW.torch_name} (dtype={_NARROW.torch_name!r}): {format_bytes(needed)}"
        yield Remedy("dtype", text, needed)
    packed = _saving(needs, _kept_quantized(plan), budget)
    if packed != needs and budget.shortfall_of(packed) is None:
        needed = packed.memory_bytes + packed.device_bytes
        text = f"keep the quantized weights as they are stored, without dequantizing: {format_bytes(needed)}"
        yield Remedy("keep_quantized", text, needed)
    on_processor = Needs(plan.forecast.peak_bytes, 0)
    if budget.device is not None and needs.device_bytes and budget.shortfall_of(on_processor) is None:
        needed = on_processor.memory_bytes
        text = f"leave it in the system's memory (device='cpu'): {format_bytes(needed)}"
        yield Remedy("offload", text, needed)


def _saving(needs: Needs, saved: Counter[str], budget: Budget) -> Needs:
    """`needs` with so much less on each device."""
    if budget.device is None:
        return Needs(needs.memory_bytes - saved.total(), needs.device_bytes)
    return Needs(needs.memory_bytes - saved["cpu"], needs.device_bytes - saved[budget.device])


def _narrowed(plan: LoadPlan) -> Counter[str]:
    """Bytes saved on each device by a dtype of 16 bits."""
    saved: Counter[str] = Counter()
    for (device, dtype), count in plan.forecast.allocated_bytes_by_place.items():
        if dtype.kind == "float" and dtype.bits > _NARROW.bits:
            saved[device] += count - count * _NARROW.bits // dtype.bits
    return saved


def _kept_quantized(plan: LoadPlan) -> Counter[str]:
    """Bytes saved on each device if what is stored in coded numbers stayed so."""
    saved: Counter[str] = Counter()
    for group in plan.groups:
        if _dequantizes(group, plan):
            device = plan.targets[group.targets[0]].device
            saved[device] += max(0, _filled_bytes(group, plan) - group.read_bytes)
    return saved


def _dequantizes(group: Group, plan: LoadPlan) -> bool:
    """Whether coded numbers, or integers that hold them packed, become ordinary floats."""
    stored = {entry.dtype.kind for entry in group.entries}
    final = {plan.targets[name].dtype.kind for name in group.targets}
    return group.route is not Route.DIRECT and bool(stored & {"coded", "int"}) and final == {"float"}


def _filled_bytes(group: Group, plan: LoadPlan) -> int:
    if group.writes:
        return sum(write.destination.items * plan.targets[write.target].dtype.itemsize for write in group.writes)
    return sum(plan.targets[name].nbytes for name in group.targets)


def _processes_to_stop(budget: Budget, needs: Needs, shortfall: Shortfall, known: Circumstances) -> Iterator[Remedy]:
    """The least that would suffice: the smallest such process, else the fewest of the largest."""
    usable = known.processes
    if shortfall.allowance.limit is Limit.GROUP:
        usable = tuple(process for process in usable if process.pid in known.pids_in_group)
    side = Limit.DEVICE if shortfall.allowance in budget.on_device else Limit.SYSTEM

    def suffices(chosen: tuple[ProcessMemory, ...]) -> bool:
        freed = sum(process.nbytes for process in chosen)
        in_group = sum(process.nbytes for process in chosen if process.pid in known.pids_in_group)
        raised = budget.with_more(freed, side).with_more(in_group, Limit.GROUP)
        return raised.shortfall_of(needs) is None

    for count in range(1, _MOST_PROCESSES + 1):
        found = [chosen for chosen in combinations(usable[:8], count) if suffices(chosen)]
        if found:
            least = min(found, key=lambda chosen: sum(process.nbytes for process in chosen))
            freed = sum(process.nbytes for process in least)
            names = " and ".join(f"{process.pid} ({process.name})" for process in least)
            yield Remedy("stop_process", f"stop process {names}, which frees {format_bytes(freed)}", freed)
            return
