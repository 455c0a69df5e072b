"""What a watch sees and says: one sample of a load's memory, the level at which it goes on, a change of it and why."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple

from umem._types import format_bytes
from umem.probes.memory import MemorySnapshot

__all__ = ["Level", "Rule", "Sample", "Verdict"]

_COUNTS = (
    "swapped_in_pages",
    "swapped_out_pages",
    "refaulted_file_pages",
    "refaulted_anonymous_pages",
    "major_faults",
    "allocation_stalls",
    "compaction_stalls",
    "pressure_full_us",
)


class Sample(NamedTuple):
    """One moment of a load, in bytes; None where unknown.

    `cached_file_bytes` is the page cache that the checkpoint's files hold; `device_bytes` is what this process holds of
    a memory that the processor and the device share, where that is not part of `memory`.
    """

    memory: MemorySnapshot
    cached_file_bytes: int | None
    device_bytes: int | None = None

    @property
    def own_bytes(self) -> int:
        """Anonymous, shared and device memory of this process."""
        memory = self.memory
        return (memory.anonymous_bytes or 0) + (memory.shared_bytes or 0) + (self.device_bytes or 0)

    def to_json(self, first: Sample) -> dict[str, int | float | None]:
        """The signals that matter, in short. Times and counts are since `first`; sizes are what they were."""
        memory, start = self.memory, first.memory

        def since(name: str) -> int | None:
            now, then = getattr(memory, name), getattr(start, name)
            return None if now is None or then is None else now - then

        return {
            "time_s": memory.time_s - start.time_s,
            "anonymous_bytes": memory.anonymous_bytes,
            "file_bytes": memory.file_bytes,
            "device_bytes": self.device_bytes,
            "page_cache_bytes": self.cached_file_bytes,
            "available_bytes": memory.available_bytes,
            "headroom_bytes": memory.cgroup.headroom_bytes if memory.cgroup else None,
            **{name: since(name) for name in _COUNTS},
        }


class Level(IntEnum):
    """How a load goes on: at full speed, slower and with little in flight, not at all."""

    NORMAL = 0
    SOFT = 1
    HARD = 2


class Rule(StrEnum):
    """What changed the level.

    `FLOOR`: less is left than the floor. `TREND`: less will be left before the load could stop. `REST`: less will be
    left when the load has taken the rest. `OWN`: the load took more than its forecast. The others are rates.
    """

    FLOOR = "floor"
    TREND = "trend"
    REST = "rest"
    OWN = "own"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    REFAULTS = "refaults"
    MAJOR_FAULTS = "major_faults"
    ALLOCATION_STALLS = "allocation_stalls"
    COMPACTION_STALLS = "compaction_stalls"
    PRESSURE = "pressure"
    CALM = "calm"


_EVENTS = (Rule.MAJOR_FAULTS, Rule.ALLOCATION_STALLS, Rule.COMPACTION_STALLS)
_WORDS = {
    Rule.FLOOR: "{value} left of {where}, the floor is {threshold}",
    Rule.TREND: "{value} soon left of {where} at this pace, the floor is {threshold}",
    Rule.REST: "{value} left of {where} once the load is whole, the floor is {threshold}",
    Rule.OWN: "{where} has grown by {value}, {threshold} at most was forecast",
    Rule.SWAP_OUT: "{value}/s swapped out, the bound is {threshold}/s",
    Rule.SWAP_IN: "{value}/s swapped in, the bound is {threshold}/s",
    Rule.REFAULTS: "{value}/s read again after it was dropped, the bound is {threshold}/s",
    Rule.MAJOR_FAULTS: "{value} page faults a second that read, the bound is {threshold}",
    Rule.ALLOCATION_STALLS: "{value} allocations a second had to reclaim, the bound is {threshold}",
    Rule.COMPACTION_STALLS: "{value} allocations a second had to compact, the bound is {threshold}",
    Rule.PRESSURE: "all tasks stood still for memory {value} of the time, the bound is {threshold}",
    Rule.CALM: "{value} left of {where}, at ease again above {threshold}",
}


class Verdict(NamedTuple):
    """A change of level: when (`time.monotonic()`), by which rule, the value that it saw, and the threshold.

    Values are bytes, bytes or events a second, or a share, as the rule has it; `where` names the memory in question.
    """

    time_s: float
    level: Level
    rule: Rule
    value: float
    threshold: float
    where: str = ""

    @property
    def words(self) -> str:
        """What was seen, for people."""
        value, threshold = (self._amount(number) for number in (self.value, self.threshold))
        return _WORDS[self.rule].format(value=value, threshold=threshold, where=self.where)

    def _amount(self, number: float) -> str:
        if self.rule is Rule.PRESSURE:
            return f"{100 * number:.0f} %"
        if self.rule in _EVENTS:
            return f"{number:.0f}"
        return format_bytes(number)

    def to_json(self, started_s: float) -> dict[str, str | float]:
        """The verdict as JSON values; the time is since `started_s`."""
        return {
            "time_s": self.time_s - started_s,
            "level": self.level.name.lower(),
            "rule": str(self.rule),
            "value": self.value,
            "threshold": self.threshold,
            "where": self.where,
        }
