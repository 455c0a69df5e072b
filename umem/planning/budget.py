"""Whether a plan fits: a budget is a number of bytes with its source; the check comes before any tensor byte is read.

The numbers themselves come from probes; this module only compares them. Memory that is only reachable through swap is
never counted, and the device allocator's own number never is where processor and device share one memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from umem._types import format_bytes
from umem.errors import InsufficientMemoryError
from umem.planning.plan import LoadPlan

__all__ = ["Budget", "budget_from", "check_budget", "shortfall"]


@dataclass(frozen=True, slots=True)
class Budget:
    """What a load may take.

    Attributes
    ----------
    available_bytes
        Bytes that the final model plus the window may take; None where the machine does not tell.
    source
        Where the number comes from, for people.
    """

    available_bytes: int | None
    source: str


def budget_from(
    *, available_bytes: int | None, headroom_bytes: int | None, reserve_bytes: int, allowed_bytes: int | None
) -> Budget:
    """The tightest of what the machine has, what the control group leaves, and what the user allows.

    Parameters
    ----------
    available_bytes, headroom_bytes
        MemAvailable and the control group's headroom; None where there is none.
    reserve_bytes
        What stays free of the machine's memory or the group's.
    allowed_bytes
        The user's own cap, from which nothing is taken off.
    """
    reserve = f"less {format_bytes(reserve_bytes)} of reserve"
    candidates = []
    if available_bytes is not None:
        candidates.append(Budget(max(0, available_bytes - reserve_bytes), f"MemAvailable {reserve}"))
    if headroom_bytes is not None:
        candidates.append(Budget(max(0, headroom_bytes - reserve_bytes), f"the control group's headroom {reserve}"))
    if allowed_bytes is not None:
        candidates.append(Budget(allowed_bytes, "the memory budget that was set"))
    unknown = Budget(None, "the machine does not tell")
    return min(candidates, key=lambda budget: budget.available_bytes or 0, default=unknown)


def shortfall(plan: LoadPlan, budget: Budget, beside: Budget | None = None) -> tuple[int, Budget] | None:
    """What `plan` needs, in bytes, and the budget that it does not fit; None if it fits.

    Parameters
    ----------
    beside
        What may be taken of the system's memory, where `budget` is of a device with memory of its own.
    """
    forecast = plan.forecast
    needs = [(forecast.peak_bytes, budget)]
    if beside is not None:
        on_processor = forecast.final_bytes_by_device.get("cpu", 0)
        needs = [
            (forecast.allocated_bytes - on_processor + forecast.scratch_bytes, budget),
            (on_processor + forecast.window_bytes + forecast.scratch_bytes, beside),
        ]
    for needed, of in needs:
        if of.available_bytes is not None and needed > of.available_bytes:
            return needed, of
    return None


def check_budget(plan: LoadPlan, budget: Budget, beside: Budget | None = None) -> None:
    """Return if the forecast peak of `plan` fits; arguments as for `shortfall`.

    Raises
    ------
    InsufficientMemoryError
        It does not; the error names needed, available, the source and the largest parts.
    """
    found = shortfall(plan, budget, beside)
    if found is None:
        return
    needed, budget = found
    largest = plan.largest_targets()
    parts = ", ".join(f"{name} ({format_bytes(size)})" for name, size in largest[:3])
    raise InsufficientMemoryError(
        f"the load needs {format_bytes(needed)} (model {format_bytes(plan.forecast.allocated_bytes)}, window"
        f" {format_bytes(plan.forecast.window_bytes)}, conversions {format_bytes(plan.forecast.scratch_bytes)});"
        f" {format_bytes(budget.available_bytes)} are available ({budget.source}). Largest parts: {parts}."
        " Nothing was read. Stop other processes, choose a smaller dtype, offload to the processor's memory or to disk,"
        " or allow more with a larger memory budget",
        needed_bytes=needed,
        available_bytes=budget.available_bytes or 0,
        source=budget.source,
        largest=largest,
    )
