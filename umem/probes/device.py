"""Memory of the device at one moment, asked only after the machine's class is known and only where the answer counts.

On shared memory the CUDA allocator is not asked at all: its "free" is MemFree, which counts page cache as used
(measured by others on GB10: 103 GiB free become 41 GiB when a file of 60 GiB is written), and the call itself can fail
there. A reading with more free than there is in total is discarded, whoever gives it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from umem._types import format_bytes
from umem.probes.facts import PlatformFacts
from umem.probes.platform import Platform, PlatformClass

__all__ = ["DeviceMemory", "read_device_memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """What bears on what a device can still take, in bytes. None is unknown, or means nothing on this machine.

    Attributes
    ----------
    free_bytes, total_bytes
        The allocator's numbers, on devices with memory of their own.
    node_free_bytes, node_inactive_cache_bytes, node_active_cache_bytes
        Where the device's memory is a NUMA node: its MemFree, and the page cache of files in it.
    foreign_available_bytes
        What MemAvailable counts of nodes without processors, which is the devices' and not the host's: free, and file
        cache that is not in use.
    pool_bytes, pool_used_bytes
        On shared memory, the most of it that the device may use, and what of that is in use: Metal's recommended
        working set, or the graphics pool (GTT) of an AMD processor.
    remarks
        Readings that were discarded, and questions that failed.
    """

    free_bytes: int | None = None
    total_bytes: int | None = None
    node_free_bytes: int | None = None
    node_inactive_cache_bytes: int | None = None
    node_active_cache_bytes: int | None = None
    foreign_available_bytes: int | None = None
    pool_bytes: int | None = None
    pool_used_bytes: int | None = None
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The readings as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Self:
        """The readings that `to_json` gave; what is missing is unknown."""
        known = {field.name: facts[field.name] for field in fields(cls) if field.name in facts}
        return cls(**known | {"remarks": tuple(known.get("remarks") or ())})

    def checked(self) -> Self:
        """These readings without those that cannot be."""
        values = asdict(self)
        remarks = list(self.remarks)
        for free, total in (("free_bytes", "total_bytes"), ("pool_used_bytes", "pool_bytes")):
            if values[free] is not None and values[total] is not None and values[free] > values[total]:
                words = f"{format_bytes(values[free])} of {format_bytes(values[total])}"
                remarks.append(f"{free.removesuffix('_bytes').replace('_', ' ')} {words}: discarded")
                values[free] = None
        return type(self)(**values | {"remarks": tuple(remarks)})


def read_device_memory(
    platform: Platform,
    facts: PlatformFacts,
    *,
    sys: Path = Path("/sys"),
    load: Callable[[str], Any] = import_module,
) -> DeviceMemory:
    """The memory of the platform's device now.

    Parameters
    ----------
    load
        Imports torch; tests give one of their own.
    """
    if platform.kind is PlatformClass.UNIFIED:
        return _shared_pool(platform, facts, sys, load).checked()
    if not platform.kind.has_own_memory:
        return DeviceMemory()
    remarks: list[str] = []
    free, total = _allocator_memory(platform, load, remarks)
    values: dict[str, int | None] = {"free_bytes": free, "total_bytes": total}
    if platform.kind is PlatformClass.COHERENT_NUMA:
        values |= _nodes(platform, facts, sys)
    return DeviceMemory(**values, remarks=tuple(remarks)).checked()


def _allocator_memory(
    platform: Platform, load: Callable[[str], Any], remarks: list[str]
) -> tuple[int | None, int | None]:
    kind = "cuda" if platform.backend in ("cuda", "hip") else platform.backend
    if kind not in ("cuda", "xpu"):
        return None, None
    try:
        free, total = getattr(load("torch"), kind).mem_get_info(platform.device)
    except Exception as error:  # noqa: BLE001 - backends raise what they like, and an unknown size ends no load
        remarks.append(f"the device does not tell its free memory: {error}".partition("\n")[0])
        return None, None
    return int(free), int(total)


def _shared_pool(platform: Platform, facts: PlatformFacts, sys: Path, load: Callable[[str], Any]) -> DeviceMemory:
    if platform.backend == "mps":
        metal = load("torch").mps
        return DeviceMemory(
            pool_bytes=int(metal.recommended_max_memory()), pool_used_bytes=int(metal.driver_allocated_memory())
        )
    if platform.backend == "hip" and facts.kernel.graphics_pool_bytes is not None:
        used = [_number(path) for path in sorted((sys / "class/drm").glob("card*/device/mem_info_gtt_used"))]
        return DeviceMemory(
            pool_bytes=facts.kernel.graphics_pool_bytes, pool_used_bytes=used[0] if len(used) == 1 else None
        )
    return DeviceMemory()


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _nodes(platform: Platform, facts: PlatformFacts, sys: Path) -> dict[str, int | None]:
    readings = {node.number: _node_memory(sys, node.number) for node in facts.kernel.nodes if not node.has_processors}
    own = readings.get(platform.node, {}) if platform.node is not None else {}
    foreign = [
        reading["MemFree"] + reading["Inactive(file)"]
        for reading in readings.values()
        if "MemFree" in reading and "Inactive(file)" in reading
    ]
    return {
        "node_free_bytes": own.get("MemFree"),
        "node_inactive_cache_bytes": own.get("Inactive(file)"),
        "node_active_cache_bytes": own.get("Active(file)"),
        "foreign_available_bytes": sum(foreign) if readings and len(foreign) == len(readings) else None,
    }


def _node_memory(sys: Path, number: int) -> dict[str, int]:
    try:
        text = (sys / f"devices/system/node/node{number}/meminfo").read_text()
    except OSError:
        return {}
    names = r"(MemFree|Active\(file\)|Inactive\(file\)):\s+(\d+) kB"
    return {name: int(value) * 1024 for name, value in re.findall(names, text)}
