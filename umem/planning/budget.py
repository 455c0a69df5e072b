"""What a load may take, where each number comes from, and whether a plan fits: checked before any tensor byte is read.

The numbers come from probes; this module only compares them. On shared memory and on the processor a budget has one
side, the system's memory: MemAvailable, capped by the control group and by what the device may use of it. Swap is never
counted, nor the device allocator's own number where there is one memory. A device with memory of its own adds a second
side: the model is held against the device's memory, the window and what stays on the processor against the system's.
What would make a plan fit is `remedies`' business.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Self

from umem._types import format_bytes
from umem.planning.plan import LoadPlan

__all__ = ["Allowance", "Budget", "LargeBlocks", "Limit", "MemorySupply", "Needs", "Shortfall", "budget_from"]

_MIB, _GIB = 1 << 20, 1 << 30

#: Where processor and accelerator share one memory the driver and the desktop need room too, and machines have frozen
#: with 2 to 4 GiB available: 4 % of the memory and 4 GiB at least on large machines, 10 % on small ones.
_SHARED_RESERVE_FRACTION = 0.04
_SMALL_SHARED_RESERVE_FRACTION = 0.1
_LEAST_SHARED_RESERVE_BYTES = 4 * _GIB
_LARGE_MACHINE_BYTES = 64 * _GIB

#: What the system, a control group, and the libraries on a device need beside a load.
_SYSTEM_RESERVE_BYTES = 64 * _MIB
_DEVICE_RESERVE_BYTES = 256 * _MIB

#: Drivers for shared memory allocate in blocks of 32 MiB. With fewer free than this, loads on GB10 have been seen to
#: stall for minutes while the kernel compacts, with 118 GiB available.
_FEWEST_LARGE_BLOCKS = 200


class Limit(StrEnum):
    """What sets an allowance; `POOL` is the part of a shared memory that the device may use."""

    SYSTEM = "system"
    GROUP = "group"
    DEVICE = "device"
    POOL = "pool"
    USER = "user"


class Allowance(NamedTuple):
    """Bytes that may be taken as far as one limit goes, the words for where the number comes from, what stays free."""

    limit: Limit
    available_bytes: int
    source: str
    reserve_bytes: int = 0


class LargeBlocks(NamedTuple):
    """Free memory, how much of it lies in blocks of at least `block_bytes`; in bytes."""

    block_bytes: int
    free_bytes: int
    in_blocks_bytes: int


class Needs(NamedTuple):
    """What a plan takes of the system's memory and of the device's own; in bytes."""

    memory_bytes: int
    device_bytes: int


class Shortfall(NamedTuple):
    """Where a plan does not fit: the allowance, and what would be needed of it."""

    needed_bytes: int
    allowance: Allowance
    is_fragmentation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySupply:
    """What probes found that bears on a budget, in bytes; None is unknown or absent.

    Attributes
    ----------
    is_shared
        Processor and accelerator share one memory.
    total_bytes, available_bytes
        MemTotal, and MemAvailable without memory of devices.
    group_headroom_bytes
        What the control group still gives.
    pool_bytes, pool_source
        On shared memory, what the device may still take of it.
    device
        The device with memory of its own; None where there is one memory.
    device_free_bytes, device_source
        What it has free.
    claimed_bytes, claimed_in_group_bytes, claimed_on_device_bytes
        What other loads will still take: of the system's memory, within the same control group, of the device.
    other_loads
        Their number.
    large_blocks
        On shared memory with an accelerator, how much of the free memory lies in large blocks.
    """

    is_shared: bool = False
    total_bytes: int | None = None
    available_bytes: int | None = None
    group_headroom_bytes: int | None = None
    pool_bytes: int | None = None
    pool_source: str = ""
    device: str | None = None
    device_free_bytes: int | None = None
    device_source: str = ""
    claimed_bytes: int = 0
    claimed_in_group_bytes: int = 0
    claimed_on_device_bytes: int = 0
    other_loads: int = 0
    large_blocks: LargeBlocks | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a load may take.

    Attributes
    ----------
    memory
        The limits on the system's memory. Empty where the machine does not tell.
    on_device
        The limits on the memory of `device`, which has its own. Empty where there is one memory, or it does not tell.
    device
        That device; None where there is one memory.
    large_blocks
        How much of the free memory lies in large blocks, where that counts.
    """

    memory: tuple[Allowance, ...] = ()
    on_device: tuple[Allowance, ...] = ()
    device: str | None = None
    large_blocks: LargeBlocks | None = None

    @property
    def tightest(self) -> Allowance | None:
        """The tightest limit on where the model goes."""
        return _tightest(self.memory if self.device is None else self.on_device)

    @property
    def tightest_in_memory(self) -> Allowance | None:
        """The tightest limit on the system's memory."""
        return _tightest(self.memory)

    @property
    def available_bytes(self) -> int | None:
        """Bytes that may be taken where the model goes; None where the machine does not tell."""
        return self.tightest.available_bytes if self.tightest else None

    @property
    def source(self) -> str:
        """Where that number comes from, for people."""
        return self.tightest.source if self.tightest else "the machine does not tell"

    def reserve_bytes(self, limit: Limit) -> int:
        """What stays free of the system's memory as far as that limit goes."""
        return max((allowance.reserve_bytes for allowance in self.memory if allowance.limit is limit), default=0)

    def with_more(self, nbytes: int, *limits: Limit) -> Self:
        """The budget if these limits gave so much more."""

        def raised(allowances: Iterable[Allowance]) -> tuple[Allowance, ...]:
            return tuple(
                allowance._replace(available_bytes=allowance.available_bytes + nbytes * (allowance.limit in limits))
                for allowance in allowances
            )

        return replace(self, memory=raised(self.memory), on_device=raised(self.on_device))

    def without(self, limit: Limit) -> Self:
        """The budget if that limit were not there."""
        return replace(
            self,
            memory=tuple(allowance for allowance in self.memory if allowance.limit is not limit),
            on_device=tuple(allowance for allowance in self.on_device if allowance.limit is not limit),
        )

    def needs_of(self, plan: LoadPlan) -> Needs:
        """What `plan` takes on each side. Conversions may hold their tensors on both, and are counted on both."""
        forecast = plan.forecast
        if self.device is None:
            return Needs(forecast.peak_bytes, 0)
        on_device = forecast.allocated_bytes_on(self.device)
        beside = forecast.window_bytes + forecast.scratch_bytes
        return Needs(forecast.allocated_bytes_on("cpu") + beside, on_device + forecast.scratch_bytes * (on_device > 0))

    def shortfall_of(self, needs: Needs) -> Shortfall | None:
        """Where `needs` do not fit; None if they do."""
        sides = ((needs.device_bytes, _tightest(self.on_device)), (needs.memory_bytes, self.tightest_in_memory))
        for needed, allowance in sides:
            if allowance is not None and needed > allowance.available_bytes:
                return Shortfall(needed, allowance)
        return self._fragmentation(needs.memory_bytes)

    def _fragmentation(self, needed_bytes: int) -> Shortfall | None:
        """Memory that is free, and enough, yet lies in pieces. Where page cache fills it, nothing can be said."""
        blocks = self.large_blocks
        if blocks is None or blocks.free_bytes < needed_bytes:
            return None
        wanted = min(needed_bytes, _FEWEST_LARGE_BLOCKS * blocks.block_bytes)
        if blocks.in_blocks_bytes >= wanted:
            return None
        size = format_bytes(blocks.block_bytes)
        source = f"free in blocks of {size} and more, of {format_bytes(blocks.free_bytes)} free in all"
        return Shortfall(wanted, Allowance(Limit.SYSTEM, blocks.in_blocks_bytes, source), is_fragmentation=True)


def _tightest(allowances: Iterable[Allowance]) -> Allowance | None:
    return min(allowances, key=lambda allowance: allowance.available_bytes, default=None)


def budget_from(supply: MemorySupply, *, reserve_bytes: int | None = None, allowed_bytes: int | None = None) -> Budget:
    """What a load may take of `supply`.

    Parameters
    ----------
    reserve_bytes
        What stays free where the model goes. None: 4 % of a shared memory and 4 GiB at least (10 % of one below
        64 GiB), 256 MiB of a device's own memory, 64 MiB elsewhere.
    allowed_bytes
        The user's own cap on where the model goes, from which nothing is taken off.
    """
    two_sided = supply.device is not None
    memory_reserve = _memory_reserve(supply) if reserve_bytes is None or two_sided else reserve_bytes
    group_reserve = _SYSTEM_RESERVE_BYTES if reserve_bytes is None or two_sided else reserve_bytes
    memory = [
        _allowance(Limit.SYSTEM, "MemAvailable", supply.available_bytes, memory_reserve, supply.claimed_bytes, supply),
        _allowance(
            Limit.GROUP,
            "the control group's headroom",
            supply.group_headroom_bytes,
            group_reserve,
            supply.claimed_in_group_bytes,
            supply,
        ),
        _allowance(Limit.POOL, supply.pool_source, supply.pool_bytes, reserve_bytes or 0, supply.claimed_bytes, supply),
    ]
    device_reserve = _DEVICE_RESERVE_BYTES if reserve_bytes is None else reserve_bytes
    device = _allowance(
        Limit.DEVICE,
        supply.device_source,
        supply.device_free_bytes,
        device_reserve,
        supply.claimed_on_device_bytes,
        supply,
    )
    user = _allowance(Limit.USER, "the memory budget that was set", allowed_bytes, 0, 0, supply)
    return Budget(
        memory=_known(memory if two_sided else [*memory, user]),
        on_device=_known([device, user]) if two_sided else (),
        device=supply.device,
        large_blocks=supply.large_blocks,
    )


def _known(allowances: Iterable[Allowance | None]) -> tuple[Allowance, ...]:
    return tuple(allowance for allowance in allowances if allowance is not None)


def _memory_reserve(supply: MemorySupply) -> int:
    if not supply.is_shared or supply.total_bytes is None:
        return _SYSTEM_RESERVE_BYTES
    if supply.total_bytes < _LARGE_MACHINE_BYTES:
        return int(_SMALL_SHARED_RESERVE_FRACTION * supply.total_bytes)
    return max(_LEAST_SHARED_RESERVE_BYTES, int(_SHARED_RESERVE_FRACTION * supply.total_bytes))


def _allowance(
    limit: Limit, name: str, available_bytes: int | None, reserve_bytes: int, claimed_bytes: int, supply: MemorySupply
) -> Allowance | None:
    if available_bytes is None:
        return None
    less = [f"{format_bytes(reserve_bytes)} of reserve"] if reserve_bytes else []
    if claimed_bytes:
        loads = "another load" if supply.other_loads == 1 else f"{supply.other_loads} other loads"
        less.append(f"{format_bytes(claimed_bytes)} that {loads} will take")
    words = f"{name} less {' and '.join(less)}" if less else name
    return Allowance(limit, max(0, available_bytes - reserve_bytes - claimed_bytes), words, reserve_bytes)
