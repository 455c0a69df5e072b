"""The settings of a load: one frozen record, and the one place that reads the environment.

What the settings mean for a machine is decided by planning and probes; nothing here samples anything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

from umem._types import format_bytes, parse_bytes, parse_seconds
from umem.errors import SettingsError

__all__ = ["MIB", "Bounds", "LoadSettings", "Residency", "Thresholds", "settings_from_environment"]

MIB = 1 << 20

#: A window must hold a block for each reader and the tiles of a conversion.
SMALLEST_WINDOW_BYTES = 16 * MIB

#: Environment variable -> field. Values are sizes (`512MiB`), times (`60s`), whole numbers or switches (`1`).
_VARIABLES = {
    "UMEM_WINDOW": "window_bytes",
    "UMEM_MEMORY_BUDGET": "memory_budget_bytes",
    "UMEM_RESERVE": "reserve_bytes",
    "UMEM_IO_THREADS": "io_threads",
    "UMEM_READER": "reader",
    "UMEM_WAIT_FOR_MEMORY": "wait_for_memory_s",
    "UMEM_RESIDENCY": "residency",
    "UMEM_GUARD": "guard",
}
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Residency(StrEnum):
    """Where the final tensors live: in memory of their own, or in the files' own pages."""

    OWNED = "owned"
    MAPPED = "mapped"


class Bounds(NamedTuple):
    """A rate or share at which a load goes on slower, and one at which it stops."""

    soft: float
    hard: float


_SWAP_BYTES_PER_S = Bounds(16 * MIB, 64 * MIB)
_REFAULTED_BYTES_PER_S = Bounds(64 * MIB, 256 * MIB)
_MAJOR_FAULTS_PER_S = Bounds(500, 2000)
_STALLS_PER_S = Bounds(500, 5000)
_PRESSURE_FRACTION = Bounds(0.05, 0.2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """When a running load slows down (soft) and when it stops (hard). None needs to be set.

    Attributes
    ----------
    floor_bytes, soft_floor_bytes
        Memory left (MemAvailable, or the control group's headroom) at which the load stops, and slows down. None:
        within the reserve that the budget leaves free, a quarter and an eighth below it, 32 and 16 MiB at least, so
        that a load that was let in can peak as forecast.
    reaction_s
        How long it takes from the decision to stop until the memory is free. The load stops when, at the pace of the
        last tenth of a second, the floor would be passed within this time.
    overrun_bytes, overrun_fraction
        How far the load's own memory may exceed its forecast before it slows down, and the memory budget that was set
        before it stops: the larger of the two.
    swap_bytes_per_s, refaulted_bytes_per_s
        Swapped in or out, and read again after it had been dropped, over a second.
    major_faults_per_s, allocation_stalls_per_s, compaction_stalls_per_s
        Faults of this process that read, allocations of the system that had to reclaim, and to compact, over a second.
    pressure_fraction
        The share of two seconds in which all tasks stood still for memory (PSI full). It slows a load down by itself,
        and stops one only together with swapping, refaults or too little memory left; the rates count only together
        with it or that. On a machine with room to spare other programs' rates are no reason to fail.
    calm_s
        How long everything must have been well until the load goes on at full speed.
    """

    floor_bytes: int | None = None
    soft_floor_bytes: int | None = None
    reaction_s: float = 0.1
    overrun_bytes: int = 256 * MIB
    overrun_fraction: float = 0.1
    swap_bytes_per_s: Bounds = _SWAP_BYTES_PER_S
    refaulted_bytes_per_s: Bounds = _REFAULTED_BYTES_PER_S
    major_faults_per_s: Bounds = _MAJOR_FAULTS_PER_S
    allocation_stalls_per_s: Bounds = _STALLS_PER_S
    compaction_stalls_per_s: Bounds = _STALLS_PER_S
    pressure_fraction: Bounds = _PRESSURE_FRACTION
    calm_s: float = 1.0

    def __post_init__(self) -> None:
        if self.soft_floor_bytes is not None and self.soft_floor_bytes < (self.floor_bytes or 0):
            raise SettingsError("soft_floor_bytes is below floor_bytes: a load slows down before it stops")
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Bounds) and not 0 < value.soft <= value.hard:
                raise SettingsError(f"{name}: the soft bound is above 0 and no more than the hard one")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSettings:
    """How to load. Every field has a default that suits most machines.

    Attributes
    ----------
    window_bytes
        The cap on everything live that is not final storage: staging, scratch, reads in flight.
    block_bytes
        The size of one read. None: 3 MiB past the page cache, 8 MiB through it and for URLs, an eighth of the window at
        most.
    io_threads
        Threads that read and scatter, no more than the window has room for. None: two to four that copy out of the page
        cache, by the number of cores; sixteen that wait for a drive or a server.
    memory_budget_bytes
        What the load may take where the model goes: on shared memory and on the processor model and window together,
        on a device with memory of its own the device's. None: what the machine has available.
    reserve_bytes
        Memory that a load leaves free where the model goes. None: by the class of the machine. Shared memory: 4 % of it
        and 4 GiB at least, 10 % on machines below 64 GiB; a device's own memory: 256 MiB; elsewhere 64 MiB.
    wait_for_memory_s
        How long a load that does not fit waits for memory to become free, in seconds, before it is refused.
    reader
        The name of the reader, or `auto`.
    residency
        `owned`: the model has memory of its own. `mapped`: it is the files' own pages, read when they are used; for
        models on the processor that are stored as they are used.
    sample_interval_s
        Seconds between two memory samples, at most 0.1; fewer when memory is short.
    thresholds
        When the load slows down or stops for lack of memory.
    guard
        Watch the load from a process of its own, which ends this process when memory is short and it does not answer.
    """

    window_bytes: int = 64 * MIB
    block_bytes: int | None = None
    io_threads: int | None = None
    memory_budget_bytes: int | None = None
    reserve_bytes: int | None = None
    wait_for_memory_s: float = 0.0
    reader: str = "auto"
    residency: Residency = Residency.OWNED
    sample_interval_s: float = 0.095
    thresholds: Thresholds = field(default_factory=Thresholds)
    guard: bool = False

    def __post_init__(self) -> None:
        if self.window_bytes < SMALLEST_WINDOW_BYTES:
            smallest = format_bytes(SMALLEST_WINDOW_BYTES)
            raise SettingsError(f"window_bytes={self.window_bytes}: the window needs at least {smallest}")
        if self.block_bytes is not None and not 64 * 1024 <= self.block_bytes <= self.window_bytes // 2:
            raise SettingsError(f"block_bytes={self.block_bytes}: a block has 64 KiB to half a window")
        if self.io_threads is not None and not 1 <= self.io_threads <= 64:
            raise SettingsError(f"io_threads={self.io_threads}: between 1 and 64")
        for name in ("memory_budget_bytes", "reserve_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise SettingsError(f"{name}={value}: a size in bytes is not negative")
        if not 0 <= self.wait_for_memory_s < math.inf:
            raise SettingsError(f"wait_for_memory_s={self.wait_for_memory_s}: a time in seconds, 0 for no waiting")
        if self.residency not in tuple(Residency):
            raise SettingsError(f"residency={self.residency!r}: {' or '.join(Residency)}")
        if not 0 < self.sample_interval_s <= 0.1:
            raise SettingsError(f"sample_interval_s={self.sample_interval_s}: above 0 and no more than 0.1")

    @property
    def largest_block_bytes(self) -> int:
        """The most that one read may have, whatever the reader."""
        return self.block_bytes or self.window_bytes // 8

    def with_changes(self, **changes: Any) -> LoadSettings:
        """A copy with some fields replaced; fields given as None keep their value."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def settings_from_environment(environment: Mapping[str, str] = os.environ) -> LoadSettings:
    """The default settings, changed by the `UMEM_*` variables.

    Raises
    ------
    SettingsError
        A value cannot be read, or a variable starts with `UMEM_` and is none that umem knows.
    """
    values: dict[str, object] = {}
    for variable, text in environment.items():
        if not variable.startswith("UMEM_"):
            continue
        if variable not in _VARIABLES:
            raise SettingsError(f"{variable} is no setting of umem; known: {', '.join(sorted(_VARIABLES))}")
        values[_VARIABLES[variable]] = _parsed(variable, text)
    return LoadSettings(**values)  # type: ignore[arg-type]


def _parsed(variable: str, text: str) -> object:
    name = _VARIABLES[variable]
    try:
        if name.endswith("_bytes"):
            return parse_bytes(text)
        if name.endswith("_s"):
            return parse_seconds(text)
        if name == "guard":
            return _switch(text)
        return int(text) if name == "io_threads" else text
    except ValueError as error:
        raise SettingsError(f"{variable}={text!r}: {error}") from None


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCH:
        raise ValueError("1 or 0")
    return _SWITCH[text.lower()]
