"""The words of a plan: writes, conversions, groups, routes. Data only."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from umem._types import DType
from umem.checkpoint.entries import Entry
from umem.planning.views import Pairing, View

__all__ = ["Adaptation", "Conversion", "Factor", "Group", "Route", "Write", "paired"]


class Route(StrEnum):
    """How bytes get from a checkpoint into final storage."""

    DIRECT = "direct"
    STREAMING = "streaming"
    MATERIALIZED = "materialized"
    MAPPED = "mapped"
    KEPT = "kept"


class Factor(NamedTuple):
    """A stored tensor that multiplies what is written.

    Attributes
    ----------
    entry
        The tensor.
    view
        Which item of it multiplies which item of the write; strides of 0 repeat.
    dtype
        What both are cast to before they are multiplied.
    """

    entry: Entry
    view: View
    dtype: DType

    @property
    def nbytes(self) -> int:
        """What the tensor takes, as it is stored and, where that is another dtype, as it multiplies."""
        if self.entry.dtype is self.dtype:
            return self.entry.nbytes
        return self.entry.nbytes + self.entry.nbytes // self.entry.dtype.itemsize * self.dtype.itemsize


def paired(source: View, factor: Factor | None, destination: View) -> Pairing:
    """The views of a write as one pairing: the source, the factor's if there is one, the destination."""
    return (source, destination) if factor is None else (source, factor.view, destination)


class Write(NamedTuple):
    """A view of a stored tensor fills a view of a target, multiplied by a factor's if there is one; all of one shape.

    A cast is implied where the dtypes differ.
    """

    entry: Entry
    source: View
    target: str
    destination: View
    factor: Factor | None = None

    @property
    def pairing(self) -> Pairing:
        """Its views: the source, the factor's if there is one, the destination."""
        return paired(self.source, self.factor, self.destination)


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
