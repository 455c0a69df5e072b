"""Signals that are wrong on some machine in the field: alone, none of them may decide the class or the budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from umem.checkpoint.pagecache import CachePolicy
from umem.machine import MachineSnapshot
from umem.probes import (
    DeviceMemory,
    DriverFacts,
    KernelFacts,
    MemorySnapshot,
    Node,
    NvmlFacts,
    PlatformClass,
    PlatformFacts,
    TorchFacts,
    classify,
    read_device_memory,
)
from umem.settings import LoadSettings

MIB, GIB = 1 << 20, 1 << 30
REFUSED = {"total_bytes": "NVMLError_NotSupported: Not Supported"}
CARD = PlatformFacts(
    driver=DriverFacts(name="a card", total_bytes=32 * GIB, integrated=0, pageable_access=0, numa_config=0),
    torch=TorchFacts(backend="cuda", device="cuda:0", name="a card", total_bytes=32 * GIB, integrated=0),
    nvml=NvmlFacts(name="a card", total_bytes=32 * GIB),
    kernel=KernelFacts(system="Linux", machine="x86_64", total_bytes=128 * GIB),
)


def changed(facts: PlatformFacts = CARD, **sources: dict[str, Any]) -> PlatformFacts:
    return replace(facts, **{name: replace(getattr(facts, name), **values) for name, values in sources.items()})


SHARED = changed(
    driver={"name": "a box", "integrated": 1, "total_bytes": 120 * GIB},
    torch={"name": "a box", "integrated": 1, "total_bytes": 120 * GIB},
    nvml={"total_bytes": None, "failures": REFUSED},
    kernel={"total_bytes": 120 * GIB},
)
UNASKED = changed(driver={"integrated": None}, torch={"integrated": None})


def machine(facts: PlatformFacts, device: DeviceMemory, **memory: int) -> MachineSnapshot:
    snapshot = MemorySnapshot(time_s=0.0, **memory)  # type: ignore[arg-type]
    return MachineSnapshot.judged(facts, snapshot, device.checked(), (), LoadSettings())


def test_the_integrated_attribute_is_the_test() -> None:
    assert classify(CARD).kind is PlatformClass.DISCRETE
    assert classify(SHARED).kind is PlatformClass.UNIFIED
    assert classify(SHARED).doubts == ()


def test_unified_addressing_is_no_unified_memory() -> None:
    assert classify(changed(driver={"unified_addressing": 1})).kind is PlatformClass.DISCRETE


def test_pageable_access_is_no_unified_memory() -> None:
    platform = classify(changed(driver={"pageable_access": 1}, nvml={"addressing_mode": "hmm"}))
    assert (platform.kind, platform.pageable) == (PlatformClass.DISCRETE, True)


@pytest.mark.parametrize("name", ["NVIDIA GB10", "Orin (nvgpu)", "NVIDIA Thor"])
def test_a_name_makes_no_unified_memory(name: str) -> None:
    assert classify(changed(driver={"name": name}, torch={"name": name})).kind is PlatformClass.DISCRETE
    renamed = changed(SHARED, driver={"name": "ASUS box"}, torch={"name": "ASUS box"})
    assert classify(renamed).kind is PlatformClass.UNIFIED


def test_one_architecture_has_machines_of_several_classes() -> None:
    """GH200 shares its architecture, 9.0, with H100: only the attributes tell them apart."""
    hopper = {"name": "NVIDIA Hopper"}
    assert classify(changed(driver=hopper)).kind is PlatformClass.DISCRETE
    coherent = changed(driver=hopper | {"numa_config": 1, "numa_id": 1, "host_page_tables": 1})
    assert classify(coherent).kind is PlatformClass.COHERENT_NUMA


@pytest.mark.parametrize("facts", [CARD, UNASKED], ids=["known", "unknown"])
def test_a_refusal_of_nvml_makes_no_unified_memory(facts: PlatformFacts) -> None:
    refused = changed(facts, nvml={"total_bytes": None, "failures": REFUSED})
    assert classify(refused).kind is PlatformClass.DISCRETE


@pytest.mark.parametrize("facts", [CARD, UNASKED], ids=["known", "unknown"])
def test_equal_totals_make_no_unified_memory(facts: PlatformFacts) -> None:
    total = {"total_bytes": 32 * GIB}
    same = changed(facts, kernel=total, nvml=total)
    assert classify(same).kind is PlatformClass.DISCRETE


def test_unequal_totals_make_no_memory_of_its_own() -> None:
    platform = classify(changed(SHARED, driver={"total_bytes": 94 * GIB}, torch={"total_bytes": 94 * GIB}))
    assert platform.kind is PlatformClass.UNIFIED
    assert platform.total_bytes == 94 * GIB
    assert "totals differ" in platform.doubts[0]


def test_address_translation_makes_no_unified_memory() -> None:
    ats = changed(driver={"host_page_tables": 1, "pageable_access": 1}, nvml={"addressing_mode": "ats"})
    assert classify(ats).kind is PlatformClass.COHERENT_CDMM
    assert classify(changed(ats, driver={"numa_config": 1})).kind is PlatformClass.COHERENT_NUMA


def test_not_being_integrated_does_not_keep_page_cache_out_of_the_device() -> None:
    facts = changed(driver={"numa_config": 1, "numa_id": 1, "host_page_tables": 1})
    device = DeviceMemory(
        free_bytes=2 * GIB,
        node_free_bytes=2 * GIB,
        node_inactive_cache_bytes=20 * GIB,
        node_active_cache_bytes=8 * GIB,
        foreign_available_bytes=22 * GIB,
    )
    found = machine(facts, device, total_bytes=160 * GIB, available_bytes=100 * GIB)
    assert found.budget.available_bytes == 22 * GIB - 256 * MIB
    assert found.budget.tightest_in_memory is not None
    assert found.budget.tightest_in_memory.available_bytes == 78 * GIB - 64 * MIB
    assert found.reading.page_cache is CachePolicy.DROP


def test_the_memory_of_the_system_is_not_the_memory_of_a_card() -> None:
    device = DeviceMemory(free_bytes=30 * GIB, total_bytes=32 * GIB)
    found = machine(CARD, device, total_bytes=1000 * GIB, available_bytes=990 * GIB)
    assert found.budget.available_bytes == 30 * GIB - 256 * MIB


def test_the_free_memory_of_the_allocator_is_not_asked_on_shared_memory() -> None:
    def load(name: str) -> Any:
        raise AssertionError(f"{name} was asked")

    platform = classify(SHARED)
    assert read_device_memory(platform, SHARED, load=load) == DeviceMemory()
    found = machine(SHARED, DeviceMemory(), total_bytes=120 * GIB, available_bytes=100 * GIB, free_bytes=3 * GIB)
    assert found.budget.available_bytes == 100 * GIB - int(0.04 * 120 * GIB)


def test_more_free_than_there_is_in_total_is_no_reading() -> None:
    device = DeviceMemory(free_bytes=43 * GIB, total_bytes=24 * GIB).checked()
    assert device.free_bytes is None
    assert "43.00 GiB of 24.00 GiB" in device.remarks[0]
    found = machine(CARD, device, total_bytes=64 * GIB, available_bytes=60 * GIB)
    assert found.budget.available_bytes == 24 * GIB - 256 * MIB


def test_swap_is_no_memory() -> None:
    facts = PlatformFacts(kernel=KernelFacts(total_bytes=64 * GIB))
    found = machine(facts, DeviceMemory(), total_bytes=64 * GIB, available_bytes=GIB, swap_free_bytes=500 * GIB)
    assert found.budget.available_bytes == GIB - 64 * MIB


@pytest.mark.parametrize(("total", "kind"), [(120 * GIB, PlatformClass.UNIFIED), (32 * GIB, PlatformClass.DISCRETE)])
def test_sources_that_contradict_each_other_are_settled_by_the_totals(total: int, kind: PlatformClass) -> None:
    facts = changed(SHARED, driver={"integrated": 1, "total_bytes": total}, torch={"integrated": 0})
    platform = classify(facts)
    assert platform.kind is kind
    assert "contradict" in platform.doubts[0]


def test_where_no_source_knows_equal_totals_and_a_further_sign_make_one_memory() -> None:
    unknown = changed(SHARED, driver={"integrated": None}, torch={"integrated": None})
    platform = classify(unknown)
    assert platform.kind is PlatformClass.UNIFIED
    assert "nothing says" in platform.doubts[0]
    card = classify(UNASKED)
    assert (card.kind, len(card.doubts)) == (PlatformClass.DISCRETE, 1)


def test_a_node_of_the_devices_size_stands_in_for_a_driver_that_cannot_be_asked() -> None:
    nodes = (
        Node(number=0, total_bytes=480 * GIB, has_processors=True),
        Node(number=2, total_bytes=31 * GIB, has_processors=False),
    )
    facts = PlatformFacts(torch=CARD.torch, kernel=replace(CARD.kernel, nodes=nodes, machine="aarch64"))
    platform = classify(facts)
    assert (platform.kind, platform.node) == (PlatformClass.COHERENT_NUMA, 2)
    assert classify(changed(facts, kernel={"machine": "x86_64"})).kind is PlatformClass.DISCRETE
