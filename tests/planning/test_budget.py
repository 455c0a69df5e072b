"""Budgets: the tightest limit on each side, and whether a plan's needs fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.writers import random_tensor, write_safetensors
from umem._types import DType
from umem.adapters.families import by_name
from umem.checkpoint import open_checkpoint
from umem.planning import LargeBlocks, Limit, LoadPlan, MemorySupply, Needs, Target, Targets, budget_from, make_plan

MIB, GIB = 1 << 20, 1 << 30


def plan_on(directory: Path, devices: dict[str, str]) -> LoadPlan:
    """A plan of one tensor of 4000 bytes for each name, on the device given."""
    checkpoint = open_checkpoint(
        write_safetensors(directory / "x.safetensors", {n: random_tensor((1000,)) for n in devices})
    )
    targets = Targets(Target(name, DType.F32, (1000,), device) for name, device in devices.items())
    return make_plan(checkpoint, targets, by_name(checkpoint, targets), window_bytes=16 * MIB)


@pytest.mark.parametrize(
    ("available", "headroom", "allowed", "expected", "limit"),
    [
        (100, None, None, 90, Limit.SYSTEM),
        (100, 50, None, 40, Limit.GROUP),
        (50, 100, None, 40, Limit.SYSTEM),
        (100, 50, 30, 30, Limit.USER),
        (100, 50, 45, 40, Limit.GROUP),
        (5, None, None, 0, Limit.SYSTEM),
        (None, None, 70, 70, Limit.USER),
        (None, None, None, None, None),
    ],
)
def test_the_tightest_limit_is_the_budget(
    available: int | None, headroom: int | None, allowed: int | None, expected: int | None, limit: Limit | None
) -> None:
    supply = MemorySupply(available_bytes=available, group_headroom_bytes=headroom)
    budget = budget_from(supply, reserve_bytes=10, allowed_bytes=allowed)
    assert budget.available_bytes == expected
    assert (budget.tightest and budget.tightest.limit) == limit


@pytest.mark.parametrize(
    ("is_shared", "total", "reserve"),
    [
        (True, 122 * GIB, int(0.04 * 122 * GIB)),
        (True, 80 * GIB, 4 * GIB),
        (True, 8 * GIB, int(0.1 * 8 * GIB)),
        (False, 122 * GIB, 64 * MIB),
    ],
)
def test_a_shared_memory_keeps_a_reserve_for_its_driver(is_shared: bool, total: int, reserve: int) -> None:
    budget = budget_from(MemorySupply(is_shared=is_shared, total_bytes=total, available_bytes=total))
    assert budget.available_bytes == total - reserve


def test_the_reserve_of_a_machine_is_not_taken_from_a_small_group() -> None:
    supply = MemorySupply(
        is_shared=True, total_bytes=122 * GIB, available_bytes=100 * GIB, group_headroom_bytes=4 * GIB
    )
    assert budget_from(supply).available_bytes == 4 * GIB - 64 * MIB


def test_what_other_loads_will_take_is_not_counted_twice() -> None:
    supply = MemorySupply(available_bytes=100, claimed_bytes=60, other_loads=2)
    budget = budget_from(supply, reserve_bytes=0)
    assert budget.available_bytes == 40
    assert "2 other loads" in budget.source


def test_a_device_with_memory_of_its_own_has_two_sides(tmp_path: Path) -> None:
    supply = MemorySupply(
        available_bytes=64 * MIB + 17 * MIB, device="cuda:0", device_free_bytes=GIB, device_source="x"
    )
    plan = plan_on(tmp_path, {"a": "cuda:0", "b": "cpu", "c": "cuda:0"})
    budget = budget_from(supply, allowed_bytes=8000)
    needs = budget.needs_of(plan)
    assert needs == Needs(memory_bytes=16 * MIB + 4000, device_bytes=8000)
    assert budget.shortfall_of(needs) is None
    tight = budget_from(supply, allowed_bytes=7999).shortfall_of(needs)
    assert tight is not None
    assert (tight.needed_bytes, tight.allowance.limit) == (8000, Limit.USER)


def test_the_window_needs_memory_of_the_system_where_the_model_does_not(tmp_path: Path) -> None:
    supply = MemorySupply(
        available_bytes=64 * MIB + 15 * MIB, device="cuda:0", device_free_bytes=GIB, device_source="x"
    )
    budget = budget_from(supply)
    shortfall = budget.shortfall_of(budget.needs_of(plan_on(tmp_path, {"a": "cuda:0"})))
    assert shortfall is not None
    assert (shortfall.needed_bytes, shortfall.allowance.limit) == (16 * MIB, Limit.SYSTEM)


@pytest.mark.parametrize(
    ("free", "in_blocks", "needed", "fits"),
    [
        (100 * GIB, 90 * GIB, 50 * GIB, True),
        (100 * GIB, 0, 50 * GIB, False),
        (100 * GIB, 200 * 32 * MIB, 50 * GIB, True),
        (100 * GIB, 200 * 32 * MIB - 1, 50 * GIB, False),
        (100 * GIB, GIB, GIB, True),  # a small load fits into the large blocks that there are
        (30 * GIB, 0, 50 * GIB, True),  # page cache fills the rest: nothing can be said
    ],
)
def test_free_memory_in_pieces_is_no_memory(free: int, in_blocks: int, needed: int, fits: bool) -> None:
    blocks = LargeBlocks(32 * MIB, free, in_blocks)
    budget = budget_from(MemorySupply(is_shared=True, available_bytes=110 * GIB, large_blocks=blocks))
    shortfall = budget.shortfall_of(Needs(needed, 0))
    assert (shortfall is None) == fits
    assert shortfall is None or shortfall.is_fragmentation
