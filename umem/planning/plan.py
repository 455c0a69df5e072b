"""The load plan: groups with a route and a reason each, the coverage proof, the forecast. Pure data, made without I/O.

`make_plan` takes what an adapter found and either proves that it loads every target exactly once, or raises one error
that lists every difference. Running a plan is `strategies`' business; whether it fits the machine is `budget`'s.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umem._display import Displayed
from umem._types import DType
from umem.checkpoint.entries import Checkpoint, Entry
from umem.errors import CoverageError, KeyMismatchError, ShapeMismatch
from umem.planning.coverage import prove_coverage
from umem.planning.keys import near_names, without
from umem.planning.residency import as_kept, as_mapped
from umem.planning.targets import DISK, Target, Targets
from umem.planning.views import View
from umem.planning.writes import Adaptation, Conversion, Group, Route, Write
from umem.settings import Residency

__all__ = ["PLAN_SCHEMA_VERSION", "Forecast", "LoadPlan", "make_plan"]

PLAN_SCHEMA_VERSION = 1

#: Routes whose bytes stay where they are.
_UNMOVED = (Route.MAPPED, Route.KEPT)

#: A stack and a concatenation of a conversion hold its result twice beside its sources.
_RESULTS_ALIVE = 2


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a load will take, in bytes, said before the first tensor byte is read.

    Attributes
    ----------
    final_bytes
        The final storage of the targets that this load allocates or fills, on disk too.
    allocated_bytes_by_place
        The part of it, in memory, that is not there yet, by device and dtype.
    window_bytes
        The cap on everything else that is live; 0 where nothing is read because all targets stay mapped.
    scratch_bytes
        The largest materialized group's need beyond the window (an estimate: its owner's code decides), and the
        factors by which streamed tensors are multiplied.
    read_bytes
        Bytes read from the files.
    final_bytes_by_device
        `final_bytes`, by device.
    offloaded_bytes
        Bytes written to files, for targets on disk that are not stored as they are used.
    """

    final_bytes: int
    allocated_bytes_by_place: Mapping[tuple[str, DType], int]
    window_bytes: int
    scratch_bytes: int
    read_bytes: int
    final_bytes_by_device: Mapping[str, int]
    offloaded_bytes: int = 0

    @property
    def allocated_bytes(self) -> int:
        """The part of the final storage, in memory, that is not there yet."""
        return sum(self.allocated_bytes_by_place.values())

    def allocated_bytes_on(self, device: str) -> int:
        """The part of it that will live on `device`."""
        return sum(count for (place, _), count in self.allocated_bytes_by_place.items() if place == device)

    @property
    def peak_bytes(self) -> int:
        """The most that the load adds to what the machine has in use."""
        return self.allocated_bytes + self.window_bytes + self.scratch_bytes


@dataclass(frozen=True, slots=True)
class LoadPlan(Displayed):
    """Everything that a load will do.

    Attributes
    ----------
    checkpoint
        What is read.
    targets
        What is filled.
    groups
        How, in file order of their first source.
    left_to_owner
        Targets that the checkpoint lacks and that may be absent; their module initialises them.
    ignored
        Stored tensors that are not read: unexpected ones that may be there, and doubles of tied tensors.
    forecast
        What it takes.
    remarks
        What people should know of single targets: (target, remark).
    """

    checkpoint: Checkpoint
    targets: Targets
    groups: tuple[Group, ...]
    left_to_owner: tuple[str, ...]
    ignored: tuple[str, ...]
    forecast: Forecast
    remarks: tuple[tuple[str, str], ...] = ()

    @property
    def filled(self) -> list[Target]:
        """The targets that the groups write to, each once, in the order of the model."""
        written = self.targets.with_names(name for group in self.groups for name in group.targets)
        return [written[name] for name in self.targets if name in written]

    def bytes_by_route(self) -> dict[tuple[Route, str], int]:
        """Bytes read by (route, reason)."""
        totals: Counter[tuple[Route, str]] = Counter()
        for group in self.groups:
            totals[group.route, group.reason] += group.read_bytes
        return dict(totals)

    def largest_targets(self, count: int = 5) -> list[tuple[str, int]]:
        """The largest targets: (name, bytes), largest first."""
        return sorted(((target.name, target.nbytes) for target in self.filled), key=lambda part: -part[1])[:count]

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; sizes in bytes."""
        forecast = self.forecast
        return {
            "schema": "umem.plan",
            "version": PLAN_SCHEMA_VERSION,
            "checkpoint": {
                "path": self.checkpoint.path,
                "id": self.checkpoint.identifier,
                "shards": len(self.checkpoint.shards),
                "entries": len(self.checkpoint.entries),
                "data_bytes": self.checkpoint.data_bytes,
            },
            "forecast": {
                "final_bytes": forecast.final_bytes,
                "window_bytes": forecast.window_bytes,
                "scratch_bytes": forecast.scratch_bytes,
                "peak_bytes": forecast.peak_bytes,
                "read_bytes": forecast.read_bytes,
                "final_bytes_by_device": dict(forecast.final_bytes_by_device),
                "offloaded_bytes": forecast.offloaded_bytes,
            },
            "routes": [
                {"route": str(route), "reason": reason, "read_bytes": count}
                for (route, reason), count in self.bytes_by_route().items()
            ],
            "left_to_owner": list(self.left_to_owner),
            "ignored": list(self.ignored),
            "remarks": [{"target": target, "remark": remark} for target, remark in self.remarks],
            "groups": [
                {
                    "name": group.name,
                    "route": str(group.route),
                    "reason": group.reason,
                    "read_bytes": group.read_bytes,
                    "sources": [entry.name for entry in group.entries],
                    "targets": list(group.targets),
                }
                for group in self.groups
            ],
        }


def make_plan(
    checkpoint: Checkpoint,
    targets: Targets,
    adaptation: Adaptation,
    *,
    window_bytes: int,
    live: Collection[str] = (),
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    residency: Residency = Residency.OWNED,
) -> LoadPlan:
    """Prove that `adaptation` fills every target exactly once, and forecast what that takes.

    Parameters
    ----------
    window_bytes
        The cap on everything live that is not final storage.
    live
        Targets, by first name, whose storage is there already.
    allow_missing, allow_unexpected
        Shell-style patterns of target names that may stay unfilled, and of stored names that may be left unread.
    residency
        Whether the targets get memory of their own or stay mapped.

    Raises
    ------
    KeyMismatchError
        Names, shapes or dtypes differ; nothing is missing from its lists.
    UnsupportedError
        The targets cannot stay mapped.
    CoverageError
        The adapter left out or doubled elements.
    """
    writes_of: defaultdict[str, list[Write]] = defaultdict(list)
    writes, doubled = _without_doubles(adaptation.writes, targets)
    for write in writes:
        writes_of[targets[write.target].name].append(write)
    converted = targets.with_names(name for conversion in adaptation.conversions for name in conversion.targets)
    mismatched = [ShapeMismatch(*facts) for facts in adaptation.mismatched]
    mismatched += _incompatible_dtypes(writes, targets)
    spoiled = {targets[mismatch.target].name for mismatch in mismatched if mismatch.target in targets}
    absent = [name for name in targets if name not in writes_of and name not in converted and name not in spoiled]
    missing = without((name for name in absent if name not in adaptation.may_lack), allow_missing)
    unexpected = without(adaptation.unexpected, allow_unexpected)
    if missing or unexpected or mismatched:
        near = near_names(missing, adaptation.unexpected) | near_names(unexpected, absent)
        raise KeyMismatchError(missing=missing, unexpected=unexpected, mismatched=mismatched, near=near)
    _prove_all(writes_of, targets, converted)
    groups = _groups(writes, adaptation.conversions, targets)
    if residency == Residency.MAPPED:
        groups = as_mapped(groups, checkpoint, targets, live)
    groups = as_kept(groups, checkpoint, targets)
    return LoadPlan(
        checkpoint=checkpoint,
        targets=targets,
        groups=groups,
        left_to_owner=tuple(absent),
        ignored=tuple(sorted({*adaptation.unexpected, *adaptation.ignored, *doubled})),
        forecast=_forecast(groups, targets, window_bytes, live),
        remarks=adaptation.remarks,
    )


def _prove_all(writes_of: Mapping[str, Sequence[Write]], targets: Targets, converted: Collection[str]) -> None:
    """Prove the coverage of every target; layers are alike, so equal sets of views are proven once."""
    proven: set[tuple[tuple[int, ...], tuple[View, ...]]] = set()
    for name, filling in writes_of.items():
        if name in converted:
            raise CoverageError("writes and a conversion both fill it", target=name)
        case = targets[name].shape, tuple(write.destination for write in filling)
        if case not in proven:
            prove_coverage(name, *case)
            proven.add(case)


def _without_doubles(writes: Sequence[Write], targets: Targets) -> tuple[list[Write], list[str]]:
    """The writes, without whole tensors that fill a tied target again under another of its names."""
    whole_by_target: dict[str, Write] = {}
    kept, doubled = [], []
    for write in writes:
        target = targets[write.target]
        if target.aliases and write.destination == View.whole(target.shape):
            first = whole_by_target.setdefault(target.name, write)
            if first is not write and first.target != write.target:
                doubled.append(write.entry.name)
                continue
        kept.append(write)
    return kept, doubled


def _incompatible_dtypes(writes: Iterable[Write], targets: Targets) -> list[ShapeMismatch]:
    """Casts that would change more than precision: between kinds, or of coded numbers without their scale."""
    wrong = {}
    for write in writes:
        target = targets[write.target]
        stored = write.entry.dtype
        if write.factor is not None and stored.kind in ("float", "coded") and target.dtype.kind == "float":
            continue
        if stored is target.dtype or (stored.kind == target.dtype.kind and stored.kind in ("float", "complex")):
            continue
        why = " without its scale" if stored.kind == "coded" else ""
        wrong[target.name] = ShapeMismatch(target.name, f"{stored.label}{why}", target.dtype.label)
    return list(wrong.values())


def _groups(writes: Sequence[Write], conversions: Sequence[Conversion], targets: Targets) -> tuple[Group, ...]:
    by_entry: defaultdict[str, list[Write]] = defaultdict(list)
    for write in writes:
        by_entry[write.entry.name].append(write)
    groups = [_write_group(filling, targets) for filling in by_entry.values()]
    groups += [_materialized_group(conversion, targets) for conversion in conversions]
    groups.sort(key=lambda group: (group.entries[0].shard, group.entries[0].start))
    return tuple(groups)


def _write_group(writes: list[Write], targets: Targets) -> Group:
    entry, first = writes[0].entry, writes[0].target
    names = (first,) if len(writes) == 1 else tuple(dict.fromkeys(write.target for write in writes))
    final_dtypes = [targets[name].dtype for name in names]
    casts = [dtype for dtype in final_dtypes if dtype is not entry.dtype]
    factors = {write.factor.entry.name: write.factor for write in writes if write.factor is not None}
    if factors:
        kinds = " and ".join(sorted({factor.entry.dtype.label for factor in factors.values()}))
        reason = f"{entry.dtype.label} scaled by {kinds} to {final_dtypes[0].label}"
        entries = (entry, *(factor.entry for factor in factors.values()))
        scratch = sum(factor.nbytes for factor in factors.values())
        return Group(first, Route.STREAMING, reason, entries, names, tuple(writes), scratch)
    if casts:
        return Group(first, Route.STREAMING, _cast_reason(entry.dtype, casts[0]), (entry,), names, tuple(writes))
    plain = len(writes) == 1 and writes[0].destination == View.whole(targets[first].shape)
    reason = "stored as it is used" if plain else "stored bytes fill a view"
    return Group(first, Route.DIRECT, reason, (entry,), names, tuple(writes))


def _cast_reason(stored: DType, final: DType) -> str:
    return f"cast {stored.label} to {final.label}"


def _materialized_group(conversion: Conversion, targets: Targets) -> Group:
    final_bytes = sum(targets[name].nbytes for name in conversion.targets)
    passing_bytes = sum(targets[name].nbytes for name in conversion.targets if targets[name].device == DISK)
    source_bytes = sum(entry.nbytes for entry in conversion.entries)
    return Group(
        name=conversion.name,
        route=Route.MATERIALIZED,
        reason=conversion.reason,
        entries=_in_file_order(conversion.entries),
        targets=conversion.targets,
        scratch_bytes=source_bytes + (_RESULTS_ALIVE - 1) * final_bytes + passing_bytes,
    )


def _in_file_order(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    return tuple(sorted(entries, key=lambda entry: (entry.shard, entry.start)))


def _forecast(groups: Collection[Group], targets: Targets, window_bytes: int, live: Collection[str]) -> Forecast:
    moved = [group for group in groups if group.route not in _UNMOVED]
    unmoved = targets.with_names(name for group in groups if group.route in _UNMOVED for name in group.targets)
    written = targets.with_names(name for group in groups for name in group.targets)
    by_device: Counter[str] = Counter()
    by_place: Counter[tuple[str, DType]] = Counter()
    offloaded_bytes = 0
    for name, target in written.items():
        nbytes = target.nbytes
        by_device[target.device] += nbytes
        if name in unmoved:
            continue
        if target.device == DISK:
            offloaded_bytes += nbytes
        elif name not in live:
            by_place[target.device, target.dtype] += nbytes
    return Forecast(
        final_bytes=by_device.total(),
        allocated_bytes_by_place=dict(by_place),
        window_bytes=window_bytes if moved or not groups else 0,
        scratch_bytes=_scratch_bytes(groups),
        read_bytes=sum(group.read_bytes for group in moved),
        final_bytes_by_device=dict(by_device),
        offloaded_bytes=offloaded_bytes,
    )


def _scratch_bytes(groups: Iterable[Group]) -> int:
    """The largest conversion's need; factors of all groups are small and are held together."""
    conversions = max((group.scratch_bytes for group in groups if group.route is Route.MATERIALIZED), default=0)
    factors = {
        (write.factor.entry.name, write.factor.dtype): write.factor.nbytes
        for group in groups
        for write in group.writes
        if write.factor is not None
    }
    return conversions + sum(factors.values())
