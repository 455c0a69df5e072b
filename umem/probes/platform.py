"""What kind of machine this is: whether the processor and the accelerator share one memory. A pure function of facts.

`integrated == 1` is the test for shared memory (NVIDIA, RTX Spark porting guide, "Unified Memory Architecture"). The
device's name, its architecture, unified addressing, a refusal of NVML, the totals, or address translation through the
host's page tables alone decide nothing: each of them is wrong on some machine in the field. Where the driver and torch
contradict each other the totals decide; where neither knows, only equal totals with a further sign make one memory.
`doubts` says so.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from umem._types import format_bytes
from umem.probes.facts import PlatformFacts, gather_facts

__all__ = ["Platform", "PlatformClass", "classify", "probe_platform"]

#: Totals that differ by less mean the same memory: drivers and firmware keep some of it for themselves.
_SAME_FRACTION = 0.02

#: A device's memory as a node of the system lacks what its driver keeps.
_SAME_NODE_FRACTION = 0.1

_NUMA_NODE = 1


class PlatformClass(StrEnum):
    """How the accelerator's memory relates to the system's.

    `UNIFIED`: one memory for both. `COHERENT_NUMA`: memory of its own, which is also a NUMA node of the system, so that
    page cache and processes may live in it (GH200, GB200). `COHERENT_CDMM`: the same hardware with that memory kept to
    the driver, budgeted as `DISCRETE`. `CPU`: no accelerator.
    """

    CPU = "cpu"
    UNIFIED = "unified"
    COHERENT_NUMA = "coherent_numa"
    COHERENT_CDMM = "coherent_cdmm"
    DISCRETE = "discrete"

    @property
    def has_own_memory(self) -> bool:
        """Whether the device has memory besides the system's."""
        return self not in (PlatformClass.CPU, PlatformClass.UNIFIED)


@dataclass(frozen=True, slots=True)
class Platform:
    """The class of the machine, the device to load to, and why.

    Attributes
    ----------
    kind
        The class.
    device
        The device, as torch writes it.
    evidence
        What the class was decided by, for people.
    backend
        `cuda`, `hip`, `xpu`, `mps`, or None for the processor.
    total_bytes
        The device's memory, as far as it is believed; on shared memory the smaller of the device's and the system's.
    node
        The NUMA node that is the device's memory (`COHERENT_NUMA`); None where unknown.
    pageable
        Whether the device can read the system's pageable memory (HMM or address translation); None where unknown.
    doubts
        Contradictions and gaps in what the sources said.
    """

    kind: PlatformClass
    device: str
    evidence: str
    backend: str | None = None
    total_bytes: int | None = None
    node: int | None = None
    pageable: bool | None = None
    doubts: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The platform as JSON values."""
        return asdict(self)


def probe_platform(device: str = "auto", *, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Platform:
    """The class of this machine, seen from `device` (`auto`: the best there is). Imports torch unless it is `cpu`."""
    return classify(gather_facts(device, proc=proc, sys=sys))


def classify(facts: PlatformFacts) -> Platform:
    """The class of the machine that said this."""
    backend, device = facts.torch.backend, facts.torch.device
    if backend is None:
        evidence = facts.torch.failures.get("accelerator", "the model goes to the processor's memory")
        return Platform(PlatformClass.CPU, device, evidence, total_bytes=facts.kernel.total_bytes)
    if backend == "mps":
        return _metal(facts)
    if backend not in ("cuda", "hip", "xpu"):
        evidence = f"{backend} is taken to have memory of its own"
        return Platform(PlatformClass.DISCRETE, device, evidence, backend)
    integrated, evidence, doubts = _integrated(facts)
    if integrated:
        return _unified(facts, evidence, doubts)
    return _with_own_memory(facts, evidence, doubts)


def _metal(facts: PlatformFacts) -> Platform:
    if facts.kernel.machine == "arm64":
        kind, evidence = PlatformClass.UNIFIED, "Apple silicon has one memory"
    else:
        kind, evidence = PlatformClass.DISCRETE, "Metal on a processor that is not Apple's: a card of its own"
    return Platform(kind, facts.torch.device, evidence, "mps", facts.kernel.total_bytes)


def _name(facts: PlatformFacts) -> str:
    return facts.driver.name or facts.torch.name or facts.nvml.name or facts.torch.device


def _integrated(facts: PlatformFacts) -> tuple[bool, str, tuple[str, ...]]:
    """Whether the device is integrated, what says so, and what casts doubt on it."""
    said = {"driver": facts.driver.integrated, "torch": facts.torch.integrated}
    known = {source: value for source, value in said.items() if value is not None}
    name = _name(facts)
    if len(set(known.values())) == 1:
        value = next(iter(known.values()))
        return bool(value), f"{name}: integrated={value} ({', '.join(known)})", ()
    if known:
        together = _same(_device_total(facts), facts.kernel.total_bytes, _SAME_FRACTION)
        words = " and ".join(f"integrated={value} by {source}" for source, value in known.items())
        sizes = "is" if together else "is not"
        evidence = f"{name}: {words}; the device's memory {sizes} of the system's size"
        return together, evidence, ("the driver and torch contradict each other",)
    signs = _signs_of_one_memory(facts)
    if _device_total(facts) is not None and _device_total(facts) == facts.kernel.total_bytes and signs:
        evidence = f"{name}: the device's memory is the system's to the byte, and {' and '.join(signs)}"
        return True, evidence, ("nothing says whether the device is integrated",)
    return False, f"{name}: nothing says that it is integrated", ("nothing says whether the device is integrated",)


def _signs_of_one_memory(facts: PlatformFacts) -> list[str]:
    """Signs that mean nothing alone, and confirm that two equal totals are one memory."""
    signs = {
        "it uses the host's page tables": facts.driver.host_page_tables == 1 or facts.nvml.addressing_mode == "ats",
        "NVML knows no memory of it": facts.nvml.total_bytes is None and "total_bytes" in facts.nvml.failures,
        f"the board is a {facts.kernel.device_tree}": facts.kernel.device_tree is not None,
    }
    return [sign for sign, holds in signs.items() if holds]


def _device_total(facts: PlatformFacts) -> int | None:
    return facts.driver.total_bytes or facts.torch.total_bytes


def _same(one: int | None, other: int | None, fraction: float) -> bool:
    return one is not None and other is not None and abs(one - other) <= fraction * max(one, other)


def _unified(facts: PlatformFacts, evidence: str, doubts: tuple[str, ...]) -> Platform:
    device, system = _device_total(facts), facts.kernel.total_bytes
    is_pool = _same(device, facts.kernel.graphics_pool_bytes, _SAME_FRACTION)  # as AMD's driver tells it
    known = device is not None and system is not None
    if known and not is_pool and not _same(device, system, _SAME_FRACTION):
        sizes = f"{format_bytes(device)} of device memory, {format_bytes(system)} of system memory"
        doubts = (*doubts, f"the totals differ: {sizes}; the smaller counts")
    return Platform(
        PlatformClass.UNIFIED,
        facts.torch.device,
        evidence,
        facts.torch.backend,
        min((total for total in (device, system) if total is not None), default=None),
        pageable=_pageable(facts),
        doubts=doubts,
    )


def _with_own_memory(facts: PlatformFacts, evidence: str, doubts: tuple[str, ...]) -> Platform:
    node = _own_node(facts)
    total = _device_total(facts)
    if node is not None:
        kind, why = PlatformClass.COHERENT_NUMA, f"its memory is NUMA node {node}"
    elif facts.driver.numa_config == _NUMA_NODE:
        kind, why = PlatformClass.COHERENT_NUMA, "its memory is a NUMA node of unknown number"
    elif facts.driver.host_page_tables == 1:
        kind, why = PlatformClass.COHERENT_CDMM, "it uses the host's page tables, its memory is no NUMA node"
    else:
        kind, why = PlatformClass.DISCRETE, "memory of its own" + (", HMM" if _pageable(facts) else "")
    if facts.nvml.total_bytes is not None and total is not None and facts.nvml.total_bytes < total * 0.9:
        sizes = f"NVML says {format_bytes(facts.nvml.total_bytes)}, the driver {format_bytes(total)}"
        doubts = (*doubts, f"the device's size: {sizes}")
    return Platform(
        kind,
        facts.torch.device,
        f"{evidence}; {why}",
        facts.torch.backend,
        total,
        node,
        _pageable(facts),
        doubts,
    )


def _own_node(facts: PlatformFacts) -> int | None:
    """The node that is the device's memory: as the driver says; by its size where the driver cannot be asked.

    Only Arm machines have such devices; elsewhere a node without processors is an extension of the system's memory.
    """
    if facts.driver.numa_config == _NUMA_NODE:
        return facts.driver.numa_id
    if facts.driver.numa_config is not None or facts.kernel.machine != "aarch64":
        return None
    bare = [node for node in facts.kernel.nodes if not node.has_processors]
    total = facts.torch.total_bytes
    return next((node.number for node in bare if _same(node.total_bytes, total, _SAME_NODE_FRACTION)), None)


def _pageable(facts: PlatformFacts) -> bool | None:
    value = facts.driver.pageable_access
    return None if value is None else bool(value)
