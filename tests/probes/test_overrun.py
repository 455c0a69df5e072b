"""Who is blamed when a load was stopped."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from umem.errors import MemoryOverrunError
from umem.probes import CgroupMemory, Expectation, Level, MemorySnapshot, Policy, Rule, Sample, Verdict, overrun_error
from umem.settings import MIB, Thresholds


def sample(time_s: float, *, available: int, headroom: int, own: int) -> Sample:
    group = CgroupMemory("/g", 4096 * MIB, 4096 * MIB - headroom)
    return Sample(MemorySnapshot(time_s=time_s, available_bytes=available, anonymous_bytes=own, cgroups=(group,)), 0)


def stopped(
    rule: Rule, *, where: str, own: int, system: int, group: int, grown: Mapping[int, int]
) -> MemoryOverrunError:
    """The error after the load took `own`, and `system` and `group` bytes went in all."""
    policy = Policy(Thresholds())
    first = sample(10.0, available=2048 * MIB, headroom=1024 * MIB, own=300 * MIB)
    last = sample(11.0, available=2048 * MIB - system, headroom=1024 * MIB - group, own=300 * MIB + own)
    policy.expect(Expectation(taken_bytes=800 * MIB, peak_bytes=800 * MIB), first)
    verdict = Verdict(11.0, Level.HARD, rule, 1.0, 2.0, where)
    return overrun_error(verdict, policy, [first, last], [verdict], grown, lambda pid: f"program{pid}")


GROUP = "the control group's headroom"


def test_the_process_that_took_it() -> None:
    error = stopped(
        Rule.FLOOR, where=GROUP, own=100 * MIB, system=900 * MIB, group=700 * MIB, grown={4: 20 * MIB, 5: 580 * MIB}
    )
    assert (error.cause, error.process) == ("other_process", (5, "program5", 580 * MIB))
    assert "program5 (pid 5) 580.00 MiB" in str(error)
    assert error.series[-1]["headroom_bytes"] == 324 * MIB
    assert error.verdicts == (
        {"time_s": 1.0, "level": "hard", "rule": "floor", "value": 1.0, "threshold": 2.0, "where": GROUP},
    )


def test_a_process_elsewhere_is_not_blamed_for_what_the_load_took_itself() -> None:
    error = stopped(Rule.TREND, where=GROUP, own=700 * MIB, system=1500 * MIB, group=705 * MIB, grown={5: 800 * MIB})
    assert (error.cause, error.process) == ("own", None)
    assert "reserve_bytes" in str(error)


def test_memory_that_went_to_no_process() -> None:
    error = stopped(Rule.FLOOR, where="MemAvailable", own=MIB, system=900 * MIB, group=MIB, grown={5: 30 * MIB})
    assert (error.cause, error.process) == ("other_process", None)
    assert "899.00 MiB went elsewhere, to no process that can be looked into" in str(error)


@pytest.mark.parametrize(
    ("rule", "cause"),
    [
        (Rule.SWAP_OUT, "swap"),
        (Rule.REFAULTS, "thrash"),
        (Rule.MAJOR_FAULTS, "thrash"),
        (Rule.COMPACTION_STALLS, "fragmentation"),
        (Rule.PRESSURE, "pressure"),
    ],
)
def test_a_rate_names_its_cause_and_the_process_that_grew(rule: Rule, cause: str) -> None:
    error = stopped(rule, where="", own=MIB, system=900 * MIB, group=MIB, grown={5: 800 * MIB})
    assert error.cause == cause
    assert error.process is not None
    assert error.process.pid == 5
    assert isinstance(error, MemoryError)
