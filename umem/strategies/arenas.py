"""Small final tensors share pages, side by side as they lie in their file: where each goes. Data only.

Neighbours are then one request, read straight to their place whatever their size. Pages go back to the system with the
last tensor in them, so an arena is small. Large tensors have pages of their own, devices their own allocators.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from umem.planning.targets import Target

__all__ = ["ARENA_BYTES", "Arena", "Tenant", "arenas_of"]

#: Large enough that one more system call and one more request a piece do not show.
ARENA_BYTES = 4 << 20

#: What tensors without a place in the file begin at, as torch's own do.
_ALIGNMENT = 64

#: Runs of less are copied by the reader anyway, and would leave gaps that are large beside them.
_LEAST_CONGRUENT_BYTES = 64 * 1024


class Tenant(NamedTuple):
    """A target for an arena, and its bytes; `start` is where they begin in that shard, None if not stored as such."""

    target: Target
    nbytes: int
    shard: int
    start: int | None


class Arena(NamedTuple):
    """Targets, and the bytes [start, end) of the arena that each takes."""

    nbytes: int
    places: list[tuple[Target, int, int]]


class _Run(NamedTuple):
    """Neighbours in a file, or a tensor by itself."""

    nbytes: int
    tenants: list[Tenant]


def arenas_of(tenants: Iterable[Tenant], alignments: Sequence[int]) -> Iterator[Arena]:
    """Arenas for `tenants`, which come in file order; none is empty.

    Parameters
    ----------
    alignments
        By shard, the congruence of addresses and offsets that spares the reader a copy. Arenas begin at pages.
    """
    used, places = 0, list[tuple[Target, int, int]]()
    for run in _runs(tenants):
        begin = used + _gap(used, run, alignments)
        if places and begin + run.nbytes > ARENA_BYTES:
            yield Arena(used, places)
            begin, places = _gap(0, run, alignments), []
        used = begin
        for tenant in run.tenants:
            places.append((tenant.target, used, used + tenant.nbytes))
            used += tenant.nbytes
    if places:
        yield Arena(used, places)


def _gap(used: int, run: _Run, alignments: Sequence[int]) -> int:
    """Bytes to leave before a run."""
    first = run.tenants[0]
    if first.start is not None and run.nbytes >= _LEAST_CONGRUENT_BYTES and alignments[first.shard] > 1:
        return (first.start - used) % alignments[first.shard]
    return -used % _ALIGNMENT


def _runs(tenants: Iterable[Tenant]) -> Iterator[_Run]:
    nbytes, run = 0, list[Tenant]()
    for tenant in tenants:
        if run and not (_follows(run[0], nbytes, tenant) and nbytes + tenant.nbytes <= ARENA_BYTES):
            yield _Run(nbytes, run)
            nbytes, run = 0, []
        run.append(tenant)
        nbytes += tenant.nbytes
    if run:
        yield _Run(nbytes, run)


def _follows(first: Tenant, nbytes: int, tenant: Tenant) -> bool:
    """Whether a tenant is the neighbour of the `nbytes` from `first` on, and its items stay aligned behind them."""
    if tenant.start is None or first.start is None or tenant.shard != first.shard:
        return False
    return tenant.start == first.start + nbytes and nbytes % tenant.target.dtype.itemsize == 0
