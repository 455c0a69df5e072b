"""The words of a plan: writes, conversions, groups, routes. Data only."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from umem.checkpoint.entries import Entry
from umem.planning.views import View

__all__ = ["Adaptation", "Conversion", "Factor", "Group", "Route", "Write"]


class Route(StrEnum):
    """How bytes get from a checkpoint into final storage."""

    DIRECT = "direct"
    STREAMING = "streaming"
    MATERIALIZED = "materialized"
    MAPPED = "mapped"
    KEPT = "kept"


class Factor(NamedTuple):
    """A stored tensor that multiplies what is written; `view` has the target's shape, and strides of 0 to repeat."""

    entry: Entry
    view: View


class Write(NamedTuple):
    """A view of a stored tensor fills a view of a target; both have the same shape, in items.

    A cast is implied where the stored dtype is not the target's; a factor multiplies after it.
    """

    entry: Entry
    source: View
    target: str
    destination: View
    factor: Factor | None = None


class Conversion(NamedTuple):
    """A step that umem cannot express as views: its owner runs it on whole tensors.

    Attributes
    ----------
    name
        Names it for the owner, unique in the plan.
    entries
        What it reads.
    targets
        What it fills, whole.
    reason
        Why it is no set of writes, for people.
    """

    name: str
    entries: tuple[Entry, ...]
    targets: tuple[str, ...]
    reason: str


class Adaptation(NamedTuple):
    """What an adapter found: which stored tensors fill which targets.

    Attributes
    ----------
    writes, conversions
        The two ways in which targets are filled.
    unexpected
        Stored names of tensors that have no place in the model.
    mismatched
        (target, what is stored, what the model has), where shapes do not fit.
    may_lack
        Targets that the model family allows a checkpoint to lack.
    ignored
        Stored names of tensors that the model family says to leave out.
    remarks
        What people should know of single targets: (target, remark).
    """

    writes: list[Write]
    conversions: list[Conversion]
    unexpected: list[str]
    mismatched: list[tuple[str, str, str]]
    may_lack: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    remarks: tuple[tuple[str, str], ...] = ()


class Group(NamedTuple):
    """The smallest set of work whose sources must be live together, and its route.

    Attributes
    ----------
    name
        A target's name, or the conversion's.
    route, reason
        How it goes, and why.
    entries
        The stored tensors that it reads.
    targets
        The targets that it writes to.
    writes
        The writes; empty for a materialized group.
    scratch_bytes
        What it needs live beyond the window, in bytes.
    """

    name: str
    route: Route
    reason: str
    entries: tuple[Entry, ...]
    targets: tuple[str, ...]
    writes: tuple[Write, ...] = ()
    scratch_bytes: int = 0

    @property
    def read_bytes(self) -> int:
        """Bytes that it reads."""
        return sum(entry.nbytes for entry in self.entries)
