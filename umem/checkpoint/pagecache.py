"""The page cache that files hold: how much of a range is in it, and how to give it back without root.

`cachestat` (Linux 6.5) counts; elsewhere the answer is None. `posix_fadvise(DONTNEED)` keeps large folios that a range
covers only in part, so eviction here is cumulative and ends on 2 MiB (measured on Linux 6.18: ranges of 100 kB leave
510 of 512 MiB cached, a 2 MiB-aligned low-water mark leaves none).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

__all__ = ["CachePolicy", "DropBehind", "cached_bytes", "cached_bytes_of_files", "cached_ranges", "evict", "opened"]

_CACHESTAT = 451
_FOLIO_BYTES = 2 << 20
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_END = (1 << 63) - 1

_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def cached_bytes(descriptor: int, start: int = 0, length: int = 0) -> int | None:
    """Bytes of a file's range that are in the page cache, in whole pages; length 0: to the end. None if unknown."""
    span, counts = _Range(start, length), _Counts()
    failed = _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(span), ctypes.byref(counts), 0)
    return None if failed else int(counts.cached) * _PAGE_BYTES


def cached_bytes_of_files(paths: Iterable[str]) -> int | None:
    """Bytes of these files that are in the page cache; None if that is unknown for one of them."""
    total = 0
    for path in paths:
        with opened(path) as descriptor:
            cached = None if descriptor is None else cached_bytes(descriptor)
        if cached is None:
            return None
        total += cached
    return total


def cached_ranges(path: str) -> list[range] | None:
    """The parts of a file that are in the page cache, to 2 MiB: pieces of that size are in when half of them is.

    Halves the file until a part is in the cache whole or not at all, so a file that is either costs one call.
    """
    with opened(path) as descriptor:
        if descriptor is None or cached_bytes(descriptor) is None:
            return None
        found: list[range] = []
        for part in _cached_parts(descriptor, 0, os.fstat(descriptor).st_size):
            joins = found and found[-1].stop == part.start
            found.append(range(found.pop().start if joins else part.start, part.stop))
    return found


def _cached_parts(descriptor: int, start: int, end: int) -> Iterator[range]:
    cached = cached_bytes(descriptor, start, end - start) if end > start else 0
    if not cached:
        return
    if cached >= end - start:
        yield range(start, end)
    elif end - start <= _FOLIO_BYTES:
        if 2 * cached >= end - start:
            yield range(start, end)
    else:
        middle = start + max(1, (end - start) // (2 * _FOLIO_BYTES)) * _FOLIO_BYTES
        yield from _cached_parts(descriptor, start, middle)
        yield from _cached_parts(descriptor, middle, end)


@contextlib.contextmanager
def opened(path: str) -> Iterator[int | None]:
    """A descriptor of the file; None if it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def evict(descriptor: int, start: int = 0, end: int = 0) -> None:
    """Give back a file's cached pages from `start` to `end` (0: its end). Nothing where the system has no such call."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, start, max(0, end - start), os.POSIX_FADV_DONTNEED)


class CachePolicy(StrEnum):
    """What a load leaves in the page cache of the files that it reads."""

    KEEP = "keep"
    """Whatever the kernel keeps."""

    RESTORE = "restore"
    """What was there before, to 2 MiB."""

    DROP = "drop"
    """Nothing: where processor and accelerator share one memory, a cached checkpoint is a second copy of the model."""


class DropBehind:
    """Evicts a file's pages behind parallel readers that take its blocks in order.

    When all blocks up to some point are done, the pages up to that point go.

    Parameters
    ----------
    ends
        Where each block ends; blocks are numbered in file order.
    kept
        Ranges whose pages stay, ascending, on multiples of 2 MiB or the file's end.
    """

    def __init__(self, path: str, ends: Sequence[int], kept: Sequence[range] = ()) -> None:
        self._path = path
        self._ends = ends
        self._done = [False] * len(ends)
        self._next = 0
        self._evicted = 0
        self._runs = _between(kept)
        self._lock = threading.Lock()

    def block_done(self, number: int) -> None:
        """Block `number` is read; evict what is whole behind it."""
        with self._lock:
            self._done[number] = True
            while self._next < len(self._done) and self._done[self._next]:
                self._next += 1
            if self._next == 0:
                return
            low_water = self._ends[self._next - 1] // _FOLIO_BYTES * _FOLIO_BYTES
            if low_water > self._evicted:
                self._evicted = low_water
                self._evict_up_to(low_water)

    def close(self) -> None:
        """Evict the rest of the file."""
        self._evict_up_to(_END)

    def _evict_up_to(self, end: int) -> None:
        """Each run is evicted from its start: what an earlier call had to leave, part of a folio, goes then."""
        with opened(self._path) as descriptor:
            while descriptor is not None and self._runs and self._runs[0].start < end:
                run = self._runs[0]
                evict(descriptor, run.start, min(run.stop, end))
                if run.stop > end:
                    break
                self._runs.pop(0)


def _between(kept: Sequence[range]) -> list[range]:
    """The ranges that lie between the given ones, from the start of a file to beyond its end."""
    bounds = [0, *(bound for part in kept for bound in (part.start, part.stop)), _END]
    return [range(start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=True) if start < end]
