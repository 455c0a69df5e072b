"""Refusals: what the error carries, and that each remedy in it would really be enough."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.writers import random_tensor, write_safetensors
from umem._types import DType
from umem.adapters.families import by_name
from umem.checkpoint import open_checkpoint
from umem.errors import InsufficientMemoryError, ProcessMemory
from umem.planning import (
    Adaptation,
    Budget,
    Circumstances,
    Conversion,
    LargeBlocks,
    LoadPlan,
    MemorySupply,
    Target,
    Targets,
    budget_from,
    check_budget,
    make_plan,
)

MIB, GIB = 1 << 20, 1 << 30
WINDOW = 16 * MIB


def float_plan(directory: Path, device: str = "cpu") -> LoadPlan:
    """4440 bytes in three F32 tensors."""
    tensors = {"large": random_tensor((1000,)), "small": random_tensor((10,)), "middle": random_tensor((100,))}
    checkpoint = open_checkpoint(write_safetensors(directory / "x.safetensors", tensors))
    targets = Targets(Target(name, DType.F32, tuple(t.shape), device) for name, t in tensors.items())
    return make_plan(checkpoint, targets, by_name(checkpoint, targets), window_bytes=WINDOW)


def dequantized_plan(directory: Path) -> LoadPlan:
    """1000 stored bytes that a conversion makes 2000 of."""
    raw = random_tensor((250,)).view(torch.uint8)
    checkpoint = open_checkpoint(write_safetensors(directory / "q.safetensors", {"q": raw}))
    conversion = Conversion("w", (checkpoint.entries["q"],), ("w",), "dequantized")
    targets = Targets([Target("w", DType.BF16, (1000,))])
    return make_plan(checkpoint, targets, Adaptation([], [conversion], [], []), window_bytes=WINDOW)


def refusal(plan: LoadPlan, budget: Budget, **known: object) -> InsufficientMemoryError:
    with pytest.raises(InsufficientMemoryError, match="Nothing was read") as caught:
        check_budget(plan, budget, lambda _: replace(Circumstances(), **known))  # type: ignore[arg-type]
    return caught.value


def with_available(count: int, **supply: object) -> Budget:
    return budget_from(MemorySupply(available_bytes=count, **supply), reserve_bytes=0)  # type: ignore[arg-type]


def actions(error: InsufficientMemoryError) -> list[str]:
    return [remedy.action for remedy in error.remedies]


def test_the_facts_are_in_the_error(tmp_path: Path) -> None:
    plan = float_plan(tmp_path)
    needed = WINDOW + 4440
    check_budget(plan, with_available(needed))
    check_budget(plan, Budget())
    processes = (ProcessMemory(71, "trainer", 3 * GIB), ProcessMemory(72, "browser", GIB))
    error = refusal(plan, with_available(needed - 1), processes=processes)
    assert (error.needed_bytes, error.available_bytes, error.source) == (needed, needed - 1, "MemAvailable")
    assert error.largest == (("large", 4000), ("middle", 400), ("small", 40))
    assert error.processes == processes
    assert isinstance(error, MemoryError)
    for word in ("large", "trainer", "72", "bfloat16"):
        assert word in str(error)


def test_another_dtype_is_named_where_it_is_enough(tmp_path: Path) -> None:
    plan = float_plan(tmp_path)
    error = refusal(plan, with_available(WINDOW + 2220))
    assert [(remedy.action, remedy.nbytes) for remedy in error.remedies] == [("dtype", WINDOW + 2220)]
    assert actions(refusal(plan, with_available(WINDOW + 2219))) == []


def test_quantized_weights_are_named_where_keeping_them_is_enough(tmp_path: Path) -> None:
    plan = dequantized_plan(tmp_path)
    assert plan.forecast.allocated_bytes == 2000
    error = refusal(plan, with_available(plan.forecast.peak_bytes - 1000))
    assert [(remedy.action, remedy.nbytes) for remedy in error.remedies] == [
        ("keep_quantized", plan.forecast.peak_bytes - 1000)
    ]
    assert actions(refusal(plan, with_available(plan.forecast.peak_bytes - 1001))) == []


def test_a_larger_budget_is_named_only_where_the_machine_has_it(tmp_path: Path) -> None:
    plan = float_plan(tmp_path)
    enough = budget_from(MemorySupply(available_bytes=GIB), reserve_bytes=0, allowed_bytes=1000)
    assert actions(refusal(plan, enough)) == ["raise_budget"]
    short = budget_from(MemorySupply(available_bytes=2000), reserve_bytes=0, allowed_bytes=1000)
    assert actions(refusal(plan, short)) == []


def test_the_least_process_that_is_enough_is_named(tmp_path: Path) -> None:
    plan, short = float_plan(tmp_path), with_available(1000)
    lack = WINDOW + 4440 - 1000
    many = (ProcessMemory(1, "a", 9 * lack), ProcessMemory(2, "b", lack), ProcessMemory(3, "c", lack - 1))
    error = refusal(plan, short, processes=many)
    assert [(remedy.action, remedy.nbytes) for remedy in error.remedies] == [("stop_process", lack)]
    assert "2 (b)" in error.remedies[0].text
    two = (ProcessMemory(1, "a", lack // 2 + 1), ProcessMemory(2, "b", lack // 2 + 1))
    assert "1 (a) and 2 (b)" in refusal(plan, short, processes=two).remedies[0].text
    assert actions(refusal(plan, short, processes=two[:1])) == []


def test_stopping_a_process_elsewhere_does_not_help_a_control_group(tmp_path: Path) -> None:
    plan = float_plan(tmp_path)
    short = budget_from(MemorySupply(available_bytes=GIB, group_headroom_bytes=1000), reserve_bytes=0)
    process = (ProcessMemory(5, "a", GIB),)
    assert actions(refusal(plan, short, processes=process)) == []
    assert actions(refusal(plan, short, processes=process, pids_in_group=frozenset([5]))) == ["stop_process"]


def test_stopping_a_process_does_not_help_a_budget_that_was_set(tmp_path: Path) -> None:
    short = budget_from(MemorySupply(available_bytes=2000), reserve_bytes=0, allowed_bytes=1000)
    assert actions(refusal(float_plan(tmp_path), short, processes=(ProcessMemory(5, "a", GIB),))) == []


def test_huge_pages_that_are_set_aside(tmp_path: Path) -> None:
    plan, short = float_plan(tmp_path), with_available(1000)
    assert actions(refusal(plan, short, huge_page_pool_bytes=GIB)) == ["free_huge_pages"]
    assert actions(refusal(plan, short, huge_page_pool_bytes=MIB)) == []


def test_a_device_that_is_full(tmp_path: Path) -> None:
    plan = float_plan(tmp_path, "cuda:0")
    facts = {"device": "cuda:0", "device_free_bytes": 1000, "device_source": "free memory of cuda:0"}
    roomy = with_available(GIB, **facts)
    error = refusal(plan, roomy)
    assert (error.needed_bytes, error.available_bytes) == (4440, 1000)
    assert actions(error) == ["offload"]
    assert actions(refusal(plan, with_available(WINDOW, **facts))) == []
    assert actions(refusal(plan, roomy, cache_on_device_bytes=GIB)) == ["offload", "drop_caches"]
    assert "stop_process" in actions(refusal(plan, roomy, processes=(ProcessMemory(5, "a", GIB),)))


def test_memory_in_pieces_needs_a_reboot_and_nothing_else(tmp_path: Path) -> None:
    blocks = LargeBlocks(32 * MIB, 100 * GIB, 0)
    error = refusal(
        float_plan(tmp_path), with_available(110 * GIB, large_blocks=blocks), processes=(ProcessMemory(5, "a", GIB),)
    )
    assert actions(error) == ["reboot"]
    assert "blocks of 32.00 MiB" in error.source


def test_a_card_whose_window_has_no_room(tmp_path: Path) -> None:
    facts = {"device": "cuda:0", "device_free_bytes": GIB, "device_source": "free memory of cuda:0"}
    short = budget_from(MemorySupply(available_bytes=64 * MIB + WINDOW - 1, **facts))  # type: ignore[arg-type]
    error = refusal(float_plan(tmp_path, "cuda:0"), short, processes=(ProcessMemory(5, "a", MIB),))
    assert (error.needed_bytes, error.available_bytes) == (WINDOW, WINDOW - 1)
    assert actions(error) == ["stop_process"]
