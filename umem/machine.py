"""The machine as a load sees it: its class, its memory, what a load could take. Wires probes to the budget.

A snapshot can be saved and read elsewhere: class and budget are then worked out anew from the facts in it, so that a
plan can be held against a machine that is not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from umem._display import Displayed
from umem.checkpoint.pagecache import CachePolicy
from umem.errors import SnapshotError, UnsupportedError
from umem.planning import Budget, LargeBlocks, MemorySupply, budget_from
from umem.probes import (
    DeviceMemory,
    MemoryProbe,
    MemorySnapshot,
    Platform,
    PlatformClass,
    PlatformFacts,
    classify,
    gather_facts,
    read_device_memory,
)
from umem.reservations import Claim, Reservations
from umem.settings import LoadSettings, settings_from_environment

__all__ = ["MachineSnapshot", "Reading", "device_key", "facts_of", "probe"]

_SCHEMA, _VERSION = "umem.probe", 1
_LARGE_BLOCK_BYTES = 32 << 20
_ALL_OF_MEMORY_FRACTION = 0.98

_CACHE_POLICIES = {
    PlatformClass.CPU: CachePolicy.RESTORE,
    PlatformClass.UNIFIED: CachePolicy.DROP,
    PlatformClass.COHERENT_NUMA: CachePolicy.DROP,
    PlatformClass.COHERENT_CDMM: CachePolicy.KEEP,
    PlatformClass.DISCRETE: CachePolicy.KEEP,
}


class Reading(NamedTuple):
    """How files that are not in the page cache are read for this machine, and what becomes of their pages in it."""

    reader: str
    page_cache: CachePolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSnapshot(Displayed):
    """The machine at one moment.

    Attributes
    ----------
    facts
        What every source said.
    platform
        The class that follows from them.
    memory, device_memory
        The system's memory and the device's.
    others
        What other loads will still take.
    budget
        What a load could take.
    """

    facts: PlatformFacts
    platform: Platform
    memory: MemorySnapshot
    device_memory: DeviceMemory
    others: tuple[Claim, ...]
    budget: Budget

    @property
    def reading(self) -> Reading:
        """How files are read here: past the page cache, where the system has a way.

        Page cache may stay where it costs the device nothing: not on shared memory, and not where it can lie in the
        device's memory.
        """
        reader = "odirect" if self.facts.kernel.system in (None, "Linux") else "buffered"
        return Reading(reader, _CACHE_POLICIES[self.platform.kind])

    def with_settings(self, settings: LoadSettings) -> Self:
        """The same machine with a budget by other settings."""
        supply = _supply(self.platform, self.memory, self.device_memory, self.others, self.facts)
        budget = budget_from(supply, reserve_bytes=settings.reserve_bytes, allowed_bytes=settings.memory_budget_bytes)
        return replace(self, budget=budget)

    def to_json(self) -> dict[str, Any]:
        """The snapshot as JSON values: no names of hosts, users, groups or processes, no numbers of devices."""
        others = {"loads": len(self.others), "memory_bytes": sum(claim.memory_bytes for claim in self.others)}
        reading = self.reading
        return {
            "schema": _SCHEMA,
            "version": _VERSION,
            "platform": self.platform.to_json(),
            "facts": self.facts.to_json(),
            "memory": self.memory.to_json(),
            "device_memory": self.device_memory.to_json(),
            "other_loads": others,
            "budget": _budget_json(self.budget),
            "reading": {"reader": reading.reader, "page_cache": str(reading.page_cache)},
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the snapshot to a file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str], settings: LoadSettings | None = None) -> Self:
        """The snapshot in a file, with a budget by `settings`.

        Raises
        ------
        SnapshotError
            The file is not there, or is no snapshot that this version can read.
        """
        try:
            saved = json.loads(Path(path).read_text())
        except OSError as error:
            raise SnapshotError(error.strerror or str(error), path=os.fspath(path)) from None
        except ValueError:
            raise SnapshotError("no JSON", path=os.fspath(path)) from None
        if not isinstance(saved, dict) or saved.get("schema") != _SCHEMA:
            raise SnapshotError("not a snapshot of a machine", path=os.fspath(path))
        if saved.get("version") != _VERSION:
            raise SnapshotError(f"version {saved.get('version')} is not {_VERSION}", path=os.fspath(path))
        try:
            return cls.from_json(saved, settings)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"a part of it has another form ({error})", path=os.fspath(path)) from error

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], settings: LoadSettings | None = None) -> Self:
        """The snapshot that `to_json` gave, with its class and budget worked out anew."""
        facts = PlatformFacts.from_json(saved["facts"])
        other = saved.get("other_loads") or {}
        others = (
            (Claim(memory_bytes=int(other["memory_bytes"]), loads=int(other["loads"])),) if other.get("loads") else ()
        )
        return cls.judged(
            facts,
            MemorySnapshot.from_json(saved["memory"]),
            DeviceMemory.from_json(saved.get("device_memory") or {}).checked(),
            others,
            settings or settings_from_environment(),
        )

    @classmethod
    def judged(
        cls,
        facts: PlatformFacts,
        memory: MemorySnapshot,
        device_memory: DeviceMemory,
        others: Sequence[Claim],
        settings: LoadSettings,
    ) -> Self:
        """The snapshot of these readings: their class, and a budget by `settings`."""
        snapshot = cls(
            facts=facts,
            platform=classify(facts),
            memory=memory,
            device_memory=device_memory,
            others=tuple(others),
            budget=Budget(),
        )
        return snapshot.with_settings(settings)


def probe(
    *,
    device: str = "auto",
    settings: LoadSettings | None = None,
    facts: PlatformFacts | None = None,
    reservations: Reservations | None = None,
) -> MachineSnapshot:
    """What machine this is and what a load to `device` could take now.

    Parameters
    ----------
    facts
        What is known of the machine already, which does not change; gathered where None.
    reservations
        Where other loads say what they will take; the user's own where None.
    """
    facts = facts or facts_of(device)
    platform = classify(facts)
    device_memory = read_device_memory(platform, facts)
    others = (reservations or Reservations.of_this_user()).others()
    with MemoryProbe() as memory_probe:
        memory = memory_probe.sample()
    return MachineSnapshot.judged(facts, memory, device_memory, others, settings or settings_from_environment())


def facts_of(device: str) -> PlatformFacts:
    """What every source says of `device`, which torch can use.

    Raises
    ------
    UnsupportedError
        Torch cannot use it.
    """
    facts = gather_facts(device)
    obstacle = facts.torch.failures.get("properties")
    if obstacle is not None:
        raise UnsupportedError(f"torch cannot use {facts.torch.device}: {obstacle}; what there is says: umem probe")
    return facts


def device_key(facts: PlatformFacts) -> str:
    """What one device is called by all loads: its number, its place on the bus, else its name in torch."""
    return facts.driver.uuid or facts.driver.bus_id or facts.torch.device


def _supply(
    platform: Platform,
    memory: MemorySnapshot,
    device: DeviceMemory,
    others: Sequence[Claim],
    facts: PlatformFacts,
) -> MemorySupply:
    group = memory.cgroup
    own_memory = platform.kind.has_own_memory
    free, source = _device_free(platform, device) if own_memory else (None, "")
    pool, pool_source = (None, "") if own_memory else _pool(platform, memory, device)
    key = device_key(facts)
    return MemorySupply(
        is_shared=platform.kind is PlatformClass.UNIFIED,
        total_bytes=memory.total_bytes,
        available_bytes=_host_available(memory, device),
        group_headroom_bytes=group.headroom_bytes if group else None,
        pool_bytes=pool,
        pool_source=pool_source,
        device=platform.device if own_memory else None,
        device_free_bytes=free,
        device_source=source,
        claimed_bytes=sum(claim.memory_bytes for claim in others),
        claimed_in_group_bytes=sum(claim.memory_bytes for claim in others if group and claim.group == group.path),
        claimed_on_device_bytes=sum(claim.device_bytes.get(key, 0) for claim in others),
        other_loads=sum(claim.loads for claim in others),
        large_blocks=_large_blocks(platform, memory),
    )


def _host_available(memory: MemorySnapshot, device: DeviceMemory) -> int | None:
    if memory.available_bytes is None:
        return None
    return max(0, memory.available_bytes - (device.foreign_available_bytes or 0))


def _device_free(platform: Platform, device: DeviceMemory) -> tuple[int | None, str]:
    """Free memory of a device's own. Where it is a NUMA node, page cache in it that is not in use can be had too."""
    if device.node_free_bytes is not None:
        free = device.node_free_bytes + (device.node_inactive_cache_bytes or 0)
        return free, f"free memory and inactive page cache of node {platform.node}"
    if device.free_bytes is not None:
        return device.free_bytes, f"free memory of {platform.device}"
    return device.total_bytes or platform.total_bytes, f"the size of {platform.device}, whose free memory is unknown"


def _pool(platform: Platform, memory: MemorySnapshot, device: DeviceMemory) -> tuple[int | None, str]:
    """The part of a shared memory that the device may use, where that is less than all of it."""
    if device.pool_bytes is not None:
        free = max(0, device.pool_bytes - (device.pool_used_bytes or 0))
        return free, f"what {platform.device} may use of the memory"
    total, system = platform.total_bytes, memory.total_bytes
    if total is None or system is None or total >= _ALL_OF_MEMORY_FRACTION * system:
        return None, ""
    return total, f"the size of {platform.device} by its driver"


def _large_blocks(platform: Platform, memory: MemorySnapshot) -> LargeBlocks | None:
    inside = memory.free_in_blocks_of(_LARGE_BLOCK_BYTES)
    if platform.kind is not PlatformClass.UNIFIED or inside is None or memory.free_bytes is None:
        return None
    return LargeBlocks(_LARGE_BLOCK_BYTES, memory.free_bytes, inside)


def _budget_json(budget: Budget) -> dict[str, Any]:
    return {
        "available_bytes": budget.available_bytes,
        "source": budget.source,
        "device": budget.device,
        "memory": [_allowance_json(allowance) for allowance in budget.memory],
        "on_device": [_allowance_json(allowance) for allowance in budget.on_device],
    }


def _allowance_json(allowance: Any) -> dict[str, Any]:
    return {
        "limit": str(allowance.limit),
        "available_bytes": allowance.available_bytes,
        "source": allowance.source,
    }
