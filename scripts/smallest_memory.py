"""The smallest memory cgroup in which a loader still finishes, by bisection; no swap.

The limit holds for the whole process, its interpreter and imports included, and for the page cache that it fills. A
load that is killed, raises, or takes many times as long as without a limit does not finish.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from umem.errors import RunFailedError
from umem.measurement.fresh import Facts

STEP_BYTES = 4 << 20
_TIMES_AS_LONG, _AT_LEAST_S = 20, 60.0
_MOST_RAISES = 8

#: Limit in bytes and timeout in seconds, or None for neither -> the figures of a run; raises RunFailedError.
LimitedRun = Callable[[int | None, float | None], Facts]


class _Search:
    """Runs under limits, and what came of each."""

    def __init__(self, run: LimitedRun, timeout_s: float) -> None:
        self._run, self._timeout_s = run, timeout_s
        self.attempts: list[dict[str, Any]] = []

    def facts_at(self, limit_bytes: int) -> Facts | None:
        """The figures of a run, None if it did not finish."""
        try:
            facts = self._run(limit_bytes, self._timeout_s)
        except RunFailedError as error:
            self.attempts.append({"limit_bytes": limit_bytes, "failure": str(error)})
            return None
        self.attempts.append({"limit_bytes": limit_bytes, "load_s": facts["load_s"]})
        return facts

    def failure_below(self, limit_bytes: int) -> str:
        """Why the highest smaller limit that failed did; empty if none was tried."""
        failed = [one for one in self.attempts if "failure" in one and one["limit_bytes"] < limit_bytes]
        return str(max(failed, key=lambda one: one["limit_bytes"])["failure"]) if failed else ""


def smallest_memory(run: LimitedRun, model_bytes: int, repeats: int) -> dict[str, Any]:
    """The smallest limit, to a step, at which `repeats` runs in a row finish, and their seconds against unlimited runs.

    `model_bytes` is what the result takes, which no limit can be below.
    """
    unlimited = [run(None, None) for _ in range(repeats)]
    base = median(facts["base_bytes"] for facts in unlimited)
    unlimited_s = median(facts["load_s"] for facts in unlimited)
    search = _Search(run, max(_AT_LEAST_S, _TIMES_AS_LONG * unlimited_s))
    fails = model_bytes // STEP_BYTES * STEP_BYTES
    finishes = _up(max(base + facts["peak_bytes"] for facts in unlimited))
    while search.facts_at(finishes) is None:
        if len(search.attempts) == _MOST_RAISES:
            raise RunFailedError(f"it finishes under no limit: {search.failure_below(finishes + 1)}")
        fails, finishes = finishes, _up(finishes * 5 / 4)
    while finishes - fails > STEP_BYTES:
        middle = _up((fails + finishes) / 2)
        fails, finishes = (fails, middle) if search.facts_at(middle) is not None else (middle, finishes)
    limited: list[Facts] = []
    while len(limited) < repeats:
        facts = search.facts_at(finishes)
        if facts is None:
            limited, finishes = [], finishes + STEP_BYTES
        else:
            limited.append(facts)
    limited_s = median(facts["load_s"] for facts in limited)
    return {
        "limit_bytes": finishes,
        "base_bytes": base,
        "beyond_base_bytes": finishes - base,
        "limited_s": limited_s,
        "unlimited_s": unlimited_s,
        "to_unlimited": limited_s / unlimited_s,
        "failure_below": search.failure_below(finishes),
        "attempts": search.attempts,
    }


def _up(count: float) -> int:
    return int(-(-count // STEP_BYTES) * STEP_BYTES)
