"""The policy: loads that go as forecast are left alone, whatever else goes wrong is seen, and by the right rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umem.errors import SettingsError
from umem.planning import MemorySupply, budget_from
from umem.planning.budget import Limit
from umem.probes import CgroupMemory, Expectation, Level, MemorySnapshot, Policy, Rule, Sample, Verdict, floors_within
from umem.settings import MIB, Bounds, Thresholds

GIB = 1 << 30
STEP_S = 0.01


def sample(time_s: float, *, available: int, own: int = 0, headroom: int | None = None, **counts: Any) -> Sample:
    groups = () if headroom is None else (CgroupMemory("/g", 1 << 40, (1 << 40) - headroom),)
    memory = MemorySnapshot(
        time_s=time_s, available_bytes=available, anonymous_bytes=own, page_bytes=4096, cgroups=groups, **counts
    )
    return Sample(memory, 0)


def verdicts(policy: Policy, expected: Expectation, samples: Iterable[Sample]) -> list[Verdict]:
    found = []
    for number, now in enumerate(samples):
        if number == 0:
            policy.expect(expected, now)
        verdict = policy.judge(now)
        if verdict is not None:
            found.append(verdict)
    return found


def quiet(seconds: float, *, start_s: float = 0.0, **facts: Any) -> Iterator[Sample]:
    for number in range(int(seconds / STEP_S)):
        yield sample(start_s + number * STEP_S, **facts)


def expectation(taken: int, reserve: int = 64 * MIB, **changes: Any) -> Expectation:
    facts = {"taken_bytes": taken, "peak_bytes": taken, "system_reserve_bytes": reserve, "group_reserve_bytes": reserve}
    return Expectation(**facts | changes)


@given(
    needed=st.integers(1, 200 * GIB),
    total=st.integers(1 * GIB, 512 * GIB),
    spare=st.integers(0, GIB),
    is_shared=st.booleans(),
    seconds=st.floats(0.02, 60),
    reserve=st.none() | st.integers(0, 8 * GIB),
)
def test_a_load_that_the_budget_let_in_can_peak_as_forecast(
    needed: int, total: int, spare: int, is_shared: bool, seconds: float, reserve: int | None
) -> None:
    supply = MemorySupply(is_shared=is_shared, total_bytes=total, available_bytes=1 << 62)
    kept = budget_from(supply, reserve_bytes=reserve).reserve_bytes(Limit.SYSTEM)
    available = needed + kept + spare
    fits = budget_from(dataclasses.replace(supply, available_bytes=available), reserve_bytes=reserve)
    assert (fits.available_bytes or 0) >= needed
    policy = Policy(Thresholds())
    steps = [step / 20 for step in range(21)] + [1.0] * 5
    series = (
        sample(step * seconds + STEP_S * number, available=available - int(step * needed), own=int(step * needed))
        for number, step in enumerate(steps)
    )
    assert verdicts(policy, expectation(needed, kept), series) == []


@pytest.mark.parametrize("rate", [64 * MIB, 1 * GIB, 6 * GIB])
def test_another_that_takes_the_memory_stops_the_load_before_it_is_gone(rate: int) -> None:
    start = 3 * GIB + 512 * MIB
    policy = Policy(Thresholds(floor_bytes=2 * GIB, soft_floor_bytes=3 * GIB))
    fall = (sample(t * STEP_S, available=start - int(t * STEP_S * rate)) for t in range(10**6))
    found: list[Verdict] = []
    policy.expect(expectation(GIB), next(fall))
    for now in fall:
        found += [verdict] if (verdict := policy.judge(now)) is not None else []
        if policy.level is Level.HARD:
            break
    levels = [verdict.level for verdict in found]
    assert levels == [Level.SOFT, Level.HARD]
    left = now.memory.available_bytes or 0
    assert 2 * GIB - 4 * rate * STEP_S < left <= 2 * GIB + 2 * rate * policy.thresholds.reaction_s


def test_what_the_load_still_takes_counts_before_it_is_taken() -> None:
    policy = Policy(Thresholds())
    falls = [sample(t * 0.2, available=2 * GIB - t * 100 * MIB) for t in range(11)]
    (verdict,) = verdicts(policy, expectation(1 * GIB), falls)
    assert (verdict.level, verdict.rule) == (Level.SOFT, Rule.REST)
    assert "once the load is whole" in verdict.words


def test_the_group_counts_like_the_system() -> None:
    policy = Policy(Thresholds())
    series = [*quiet(0.1, available=100 * GIB, headroom=200 * MIB)]
    series += quiet(0.1, start_s=0.1, available=100 * GIB, headroom=20 * MIB)
    found = verdicts(policy, expectation(50 * MIB), series)
    assert (found[-1].level, found[-1].where) == (Level.HARD, "the control group's headroom")
    assert policy.is_in_group(found[-1])


def test_full_speed_comes_back_after_a_calm_and_not_at_the_edge() -> None:
    policy = Policy(Thresholds(calm_s=0.5))
    floors = floors_within(64 * MIB, policy.thresholds)
    assert 0 < floors.hard < floors.soft < floors.clear < 64 * MIB
    series = [*quiet(0.2, available=floors.soft - MIB)]
    series += quiet(2.0, start_s=0.2, available=floors.soft + MIB)
    series += quiet(0.4, start_s=2.2, available=GIB)
    assert [verdict.level for verdict in verdicts(policy, expectation(0), series)] == [Level.SOFT]
    more = quiet(0.4, start_s=2.6, available=GIB)
    found = [verdict for now in more if (verdict := policy.judge(now)) is not None]
    assert [(verdict.level, verdict.rule) for verdict in found] == [(Level.NORMAL, Rule.CALM)]


def test_one_sample_is_no_evidence() -> None:
    policy = Policy(Thresholds())
    series = [*quiet(0.2, available=GIB), sample(0.2, available=30 * MIB), *quiet(0.2, start_s=0.21, available=GIB)]
    verdicts(policy, expectation(0), series)
    assert policy.level is not Level.HARD


@pytest.mark.parametrize(
    ("counter", "rule", "a_second"),
    [
        ("swapped_out_pages", Rule.SWAP_OUT, 40_000),
        ("swapped_in_pages", Rule.SWAP_IN, 40_000),
        ("refaulted_file_pages", Rule.REFAULTS, 100_000),
        ("major_faults", Rule.MAJOR_FAULTS, 4_000),
        ("allocation_stalls", Rule.ALLOCATION_STALLS, 8_000),
        ("compaction_stalls", Rule.COMPACTION_STALLS, 8_000),
    ],
)
def test_a_rate_needs_a_second_witness(counter: str, rule: Rule, a_second: int) -> None:
    def series(available: int, stalled: float) -> Iterator[Sample]:
        for number in range(400):
            time_s = number * STEP_S
            counts = {counter: int(a_second * time_s), "pressure_full_us": int(1e6 * stalled * time_s)}
            yield sample(time_s, available=available, **counts)

    alone = Policy(Thresholds())
    assert verdicts(alone, expectation(0), series(50 * GIB, 0.0)) == []
    stalled = verdicts(Policy(Thresholds()), expectation(0), series(50 * GIB, 0.1))
    assert (Level.HARD, rule) in [(verdict.level, verdict.rule) for verdict in stalled]
    short = verdicts(Policy(Thresholds()), expectation(0), series(50 * MIB, 0.0))
    assert (Level.HARD, rule) in [(verdict.level, verdict.rule) for verdict in short]


def test_pressure_alone_slows_a_load_down() -> None:
    series = (sample(t * STEP_S, available=50 * GIB, pressure_full_us=int(t * STEP_S * 5e5)) for t in range(400))
    found = verdicts(Policy(Thresholds()), expectation(0), series)
    assert [(verdict.level, verdict.rule) for verdict in found] == [(Level.SOFT, Rule.PRESSURE)]
    assert found[0].words.startswith("all tasks stood still for memory 50 %")


def test_own_memory_above_the_forecast_slows_down_and_above_the_budget_stops() -> None:
    growing = [sample(t * STEP_S, available=50 * GIB, own=t * 16 * MIB) for t in range(200)]
    expected = expectation(GIB, allowed_bytes=2 * GIB)
    found = verdicts(Policy(Thresholds()), expected, growing)
    assert [(verdict.level, verdict.rule) for verdict in found] == [(Level.SOFT, Rule.OWN), (Level.HARD, Rule.OWN)]
    assert found[0].value > GIB + 256 * MIB
    assert found[1].value > 2 * GIB + 256 * MIB
    unbound = verdicts(Policy(Thresholds()), expectation(GIB), growing)
    assert [verdict.level for verdict in unbound] == [Level.SOFT]


def test_nothing_is_judged_before_and_after_a_load() -> None:
    policy = Policy(Thresholds())
    assert all(policy.judge(now) is None for now in quiet(0.2, available=0))
    policy.expect(expectation(0), sample(0.2, available=GIB))
    policy.rest()
    assert all(policy.judge(now) is None for now in quiet(0.2, start_s=0.3, available=0))


def test_bounds_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(SettingsError, match="swap_bytes_per_s"):
        Thresholds(swap_bytes_per_s=Bounds(2, 1))
    with pytest.raises(SettingsError, match="soft_floor_bytes"):
        Thresholds(floor_bytes=2, soft_floor_bytes=1)
