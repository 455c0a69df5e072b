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
from collections.abc import Iterable

__all__ = ["DropBehind", "cached_bytes", "cached_bytes_of_files", "evict"]

_CACHESTAT = 451
_FOLIO_BYTES = 2 << 20
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")

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
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            cached = cached_bytes(descriptor)
        finally:
            os.close(descriptor)
        if cached is None:
            return None
        total += cached
    return total


def evict(descriptor: int, end: int = 0) -> None:
    """Give back a file's cached pages up to `end` (0: all of them). Does nothing where the system has no such call."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, end, os.POSIX_FADV_DONTNEED)


class DropBehind:
    """Evicts a file's pages behind parallel readers that take its blocks in order.

    Blocks are numbered in file order. When all blocks up to some point are done, the pages up to that point go.
    """

    def __init__(self, path: str, ends: list[int]) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._ends = ends
        self._done = [False] * len(ends)
        self._next = 0
        self._evicted = 0
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
                evict(self._descriptor, low_water)

    def close(self) -> None:
        """Evict the rest of the file."""
        evict(self._descriptor)
        os.close(self._descriptor)
