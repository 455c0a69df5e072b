"""When a load slows down and when it stops: a state machine over samples of memory. Pure; it samples nothing.

Three kinds of rule. *Room*: what is left of the system's memory and in the control groups now, soon at the pace at
which others take it, and after all that the load will still take. *Own*: the load's memory against its forecast.
*Rates*: swapping, refaults, faults, stalls and pressure, each of which needs a second witness. Who was to blame is
`overrun`'s business; what is done about it is the executor's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from umem.probes.memory import MemorySnapshot
from umem.probes.verdicts import Level, Rule, Sample, Verdict
from umem.settings import MIB, Bounds, Thresholds

__all__ = ["Expectation", "Floors", "Policy", "Room", "floors_within"]

_TREND_S = 0.1
_SHORTEST_TREND_S = 0.04
_RATE_S = 1.0
_PRESSURE_S = 2.0
_KEPT_S = 2.5
_CONFIRMATIONS = 2
_LEAST_SLACK_BYTES = 32 * MIB

_GROUP = "the control group's headroom"
_THRASHING = (Rule.SWAP_OUT, Rule.SWAP_IN, Rule.REFAULTS)


class Floors(NamedTuple):
    """Bytes left at which a load stops, slows down, and goes on at full speed again."""

    hard: int
    soft: int
    clear: int


class Room(NamedTuple):
    """What one limit leaves."""

    where: str
    left_bytes: int
    floors: Floors


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a load was let in for, in bytes.

    Attributes
    ----------
    taken_bytes
        What it will take of the system's memory.
    peak_bytes
        The most that its own memory may grow: storage that is there, but not yet touched, counts too.
    allowed_bytes
        The cap that the user set; None without one.
    system_reserve_bytes, group_reserve_bytes
        What the budget leaves free of the system's memory, and in the control group.
    counts_cache
        Whether the page cache of the files counts as the load's own.
    """

    taken_bytes: int
    peak_bytes: int
    allowed_bytes: int | None = None
    system_reserve_bytes: int = 0
    group_reserve_bytes: int = 0
    counts_cache: bool = True


def floors_within(reserve_bytes: int, thresholds: Thresholds) -> Floors:
    """The floors of a load whose budget leaves `reserve_bytes` free."""
    slack = max(_LEAST_SLACK_BYTES, reserve_bytes // 4)
    hard = max(0, reserve_bytes - slack) if thresholds.floor_bytes is None else thresholds.floor_bytes
    soft = max(0, reserve_bytes - slack // 2) if thresholds.soft_floor_bytes is None else thresholds.soft_floor_bytes
    soft = max(hard, soft)
    return Floors(hard, soft, max(soft, reserve_bytes - slack // 4))


class Policy:
    """Judges samples, in the order of their times, from `expect` to `rest`."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds = thresholds
        self.level = Level.NORMAL
        self._history: list[Sample] = []
        self._times: list[float] = []
        self._expected: Expectation | None = None
        self._floors = self._group_floors = Floors(0, 0, 0)
        self._start: Sample | None = None
        self._hard_samples = 0
        self._calm_since_s: float | None = None

    def expect(self, expected: Expectation, start: Sample) -> None:
        """A load begins, when memory is as in `start`."""
        self._expected, self._start = expected, start
        self._floors = floors_within(expected.system_reserve_bytes, self.thresholds)
        self._group_floors = floors_within(expected.group_reserve_bytes, self.thresholds)

    def rest(self) -> None:
        """The load is over; nothing is judged from here on."""
        self._expected = None
        self.level = Level.NORMAL

    def judge(self, sample: Sample) -> Verdict | None:
        """The change of level that `sample` brings, if any. The hard level is final."""
        self._remember(sample)
        if self._expected is None or self.level is Level.HARD:
            return None
        worst = max(self._findings(sample, self.rooms(sample)), key=lambda found: found.level, default=None)
        if worst is not None and worst.level is Level.HARD:
            self._hard_samples += 1
            if self._hard_samples < _CONFIRMATIONS and not _is_urgent(worst):
                worst = worst._replace(level=Level.SOFT)
        else:
            self._hard_samples = 0
        return self._changed(worst, sample)

    def _remember(self, sample: Sample) -> None:
        self._history.append(sample)
        self._times.append(sample.memory.time_s)
        old = bisect_right(self._times, sample.memory.time_s - _KEPT_S)
        del self._history[:old], self._times[:old]

    def _changed(self, worst: Verdict | None, sample: Sample) -> Verdict | None:
        if worst is not None:
            self._calm_since_s = None
            if worst.level > self.level:
                self.level = worst.level
                return worst
            return None
        if self.level is Level.NORMAL:
            return None
        now_s = sample.memory.time_s
        self._calm_since_s = now_s if self._calm_since_s is None else self._calm_since_s
        if now_s - self._calm_since_s < self.thresholds.calm_s:
            return None
        self.level, self._calm_since_s = Level.NORMAL, None
        tightest = min(self.rooms(sample), key=lambda room: room.left_bytes - room.floors.clear, default=None)
        where, left, clear = (tightest.where, tightest.left_bytes, tightest.floors.clear) if tightest else ("", 0, 0)
        return Verdict(now_s, Level.NORMAL, Rule.CALM, left, clear, where)

    def rooms(self, sample: Sample) -> list[Room]:
        """What each limit leaves; nothing before `expect`."""
        if self._expected is None:
            return []
        rooms, group = [], sample.memory.cgroup
        if sample.memory.available_bytes is not None:
            rooms.append(Room("MemAvailable", sample.memory.available_bytes, self._floors))
        headroom = group.headroom_bytes if group is not None else None
        if headroom is not None:
            rooms.append(Room(_GROUP, headroom, self._group_floors))
        return rooms

    def rooms_since_start(self, sample: Sample) -> list[tuple[Room, Room]]:
        """What each limit left when the load began, and what it leaves now; limits that were there both times."""
        if self._start is None:
            return []
        then = {room.where: room for room in self.rooms(self._start)}
        return [(then[room.where], room) for room in self.rooms(sample) if room.where in then]

    def is_in_group(self, verdict: Verdict) -> bool:
        """Whether a verdict is about the control group's memory, which only its members take."""
        return verdict.where == _GROUP

    def grown_bytes(self, sample: Sample) -> int:
        """What the load's own memory has grown since it began."""
        return sample.own_bytes - self._start.own_bytes if self._start is not None else 0

    def _findings(self, sample: Sample, rooms: Sequence[Room]) -> Iterator[Verdict]:
        yield from self._about_room(sample, rooms)
        yield from self._about_own(sample)
        yield from self._about_rates(sample, rooms)

    def _about_room(self, sample: Sample, rooms: Sequence[Room]) -> Iterator[Verdict]:
        remaining = self._remaining_bytes(sample)
        earlier = self._before(sample, _TREND_S, at_least_s=_SHORTEST_TREND_S)
        left_then = {room.where: room.left_bytes for room in self.rooms(earlier)} if earlier is not None else {}
        for room in rooms:
            yield from self._about_now(sample, room, remaining)
            if earlier is not None and room.where in left_then:
                soon = self._left_soon(sample, earlier, room.left_bytes, left_then[room.where], remaining)
                if soon < room.floors.hard:
                    yield Verdict(sample.memory.time_s, Level.HARD, Rule.TREND, soon, room.floors.hard, room.where)

    def _about_now(self, sample: Sample, room: Room, remaining: int) -> Iterator[Verdict]:
        now_s, (where, left, floors) = sample.memory.time_s, room
        soft = floors.soft if self.level is Level.NORMAL else floors.clear
        if left < floors.hard:
            yield Verdict(now_s, Level.HARD, Rule.FLOOR, left, floors.hard, where)
        elif left < soft:
            yield Verdict(now_s, Level.SOFT, Rule.FLOOR, left, soft, where)
        elif left - remaining < soft:
            yield Verdict(now_s, Level.SOFT, Rule.REST, left - remaining, soft, where)

    def _left_soon(self, sample: Sample, earlier: Sample, left: int, left_then: int, remaining: int) -> float:
        """What will be left when the load could have stopped, if it and the others go on as since `earlier`.

        The load itself takes no more than what it was let in for, so that only others can bring the floor near.
        """
        own = max(0, sample.own_bytes - earlier.own_bytes)
        others = max(0, left_then - left - own)
        ahead = self.thresholds.reaction_s / (sample.memory.time_s - earlier.memory.time_s)
        return left - others * ahead - min(remaining, own * ahead)

    def _remaining_bytes(self, sample: Sample) -> int:
        """What the load will still take."""
        return max(0, self._expected.taken_bytes - self.grown_bytes(sample)) if self._expected is not None else 0

    def _about_own(self, sample: Sample) -> Iterator[Verdict]:
        expected, start, now_s = self._expected, self._start, sample.memory.time_s
        if expected is None or start is None:
            return
        grown = self.grown_bytes(sample)
        if expected.counts_cache:
            grown += max(0, (sample.cached_file_bytes or 0) - (start.cached_file_bytes or 0))
        limits = self.thresholds
        for level, basis in ((Level.HARD, expected.allowed_bytes), (Level.SOFT, expected.peak_bytes)):
            if basis is None:
                continue
            most = max(basis, expected.peak_bytes)
            most += max(limits.overrun_bytes, int(limits.overrun_fraction * most))
            if grown > most:
                yield Verdict(now_s, level, Rule.OWN, grown, most, "the load's own memory")
                return

    def _about_rates(self, sample: Sample, rooms: Sequence[Room]) -> Iterator[Verdict]:
        now_s, limits = sample.memory.time_s, self.thresholds
        calm = 1.0 if self.level is Level.NORMAL else 0.5
        pressure = _rate(sample, self._before(sample, _PRESSURE_S), lambda memory: memory.pressure_full_us)
        stalled = None if pressure is None else pressure / 1e6
        is_short = any(room.left_bytes < room.floors.clear for room in rooms)
        is_stalled = stalled is not None and stalled >= calm * limits.pressure_fraction.soft
        if not (is_short or is_stalled):
            return
        is_thrashing = False
        earlier = self._before(sample, _RATE_S)
        for rule, bounds, read in self._rates(sample.memory.page_bytes or 4096):
            rate = _rate(sample, earlier, read)
            if rate is None or rate < calm * bounds.soft:
                continue
            is_thrashing |= rule in _THRASHING
            level = Level.HARD if rate >= bounds.hard else Level.SOFT
            yield Verdict(now_s, level, rule, rate, bounds[level - 1])
        if stalled is not None and is_stalled:
            is_hard = stalled >= limits.pressure_fraction.hard and (is_short or is_thrashing)
            level = Level.HARD if is_hard else Level.SOFT
            yield Verdict(now_s, level, Rule.PRESSURE, stalled, limits.pressure_fraction[level - 1])

    def _rates(self, page_bytes: int) -> Iterator[tuple[Rule, Bounds, Callable[[MemorySnapshot], float | None]]]:
        """The rules about counters: their bounds, and how to read the counter in the unit of the bounds."""
        limits = self.thresholds

        def pages(*names: str) -> Callable[[MemorySnapshot], float | None]:
            def read(memory: MemorySnapshot) -> float | None:
                known = [count for name in names if (count := getattr(memory, name)) is not None]
                return sum(known) * page_bytes if known else None

            return read

        yield Rule.SWAP_OUT, limits.swap_bytes_per_s, pages("swapped_out_pages")
        yield Rule.SWAP_IN, limits.swap_bytes_per_s, pages("swapped_in_pages")
        yield Rule.REFAULTS, limits.refaulted_bytes_per_s, pages("refaulted_file_pages", "refaulted_anonymous_pages")
        yield Rule.MAJOR_FAULTS, limits.major_faults_per_s, lambda memory: memory.major_faults
        yield Rule.ALLOCATION_STALLS, limits.allocation_stalls_per_s, lambda memory: memory.allocation_stalls
        yield Rule.COMPACTION_STALLS, limits.compaction_stalls_per_s, lambda memory: memory.compaction_stalls

    def _before(self, sample: Sample, span_s: float, *, at_least_s: float | None = None) -> Sample | None:
        """The latest sample at least `span_s` before, or else the first one, if it is `at_least_s` before."""
        now_s = sample.memory.time_s
        position = bisect_right(self._times, now_s - span_s) - 1
        found = self._history[max(0, position)]
        least_s = span_s if at_least_s is None else at_least_s
        return found if now_s - found.memory.time_s >= least_s else None


def _rate(sample: Sample, earlier: Sample | None, read: Callable[[MemorySnapshot], float | None]) -> float | None:
    """Growth a second of a counter since `earlier`; None where that is not known."""
    now, then = read(sample.memory), read(earlier.memory) if earlier is not None else None
    if earlier is None or now is None or then is None:
        return None
    return (now - then) / (sample.memory.time_s - earlier.memory.time_s)


def _is_urgent(found: Verdict) -> bool:
    """Whether there is no time for a second look: less than half of the floor is left, or will be."""
    return found.rule in (Rule.FLOOR, Rule.TREND) and found.value < found.threshold / 2
