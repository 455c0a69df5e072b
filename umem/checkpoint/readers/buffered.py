"""`preadv` through the page cache, straight into the given buffers: fast when warm, and on every file system.

`DontCacheReader` reads the same way and has the kernel drop behind itself what it had to bring in (RWF_DONTCACHE, Linux
6.14, on file systems that know it). Pages that were cached before stay, so the cache is left as it was, to the page.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from umem.checkpoint.entries import Shard
from umem.checkpoint.pages import fault_in
from umem.checkpoint.readers.base import (
    BEHIND_URLS,
    COPYING,
    address_of,
    ended_early,
    open_shard,
    read_failed,
    why_not_at_first_read,
)

__all__ = ["BufferedReader", "DontCacheReader"]

_RWF_DONTCACHE = 0x80
_MOST_BUFFERS = os.sysconf("SC_IOV_MAX") if hasattr(os, "preadv") else 1


class BufferedReader:
    """Reads through the page cache."""

    name = "buffered"
    holds_copy = True
    pace = COPYING

    def open(self, shard: Shard, block_bytes: int) -> contextlib.closing[_Handle]:
        """The shard, opened; its reads may be of any length."""
        del block_bytes
        return contextlib.closing(_Handle(shard, flags=0))

    def alignment(self, shard: Shard) -> int:
        """Any memory is filled alike."""
        del shard
        return 1

    def why_not(self, shard: Shard) -> str | None:
        """It reads every local file."""
        return BEHIND_URLS if shard.is_remote else None


class DontCacheReader:
    """Reads through the page cache and leaves nothing there."""

    name = "dontcache"
    holds_copy = True
    pace = COPYING

    def open(self, shard: Shard, block_bytes: int) -> contextlib.closing[_Handle]:
        """The shard, opened; its reads may be of any length."""
        del block_bytes
        return contextlib.closing(_Handle(shard, flags=_RWF_DONTCACHE))

    def alignment(self, shard: Shard) -> int:
        """Any memory is filled alike."""
        del shard
        return 1

    def why_not(self, shard: Shard) -> str | None:
        """Whether kernel and file system know the flag; they say so at the first read."""
        if not hasattr(os, "preadv") and not shard.is_remote:
            return "the system has no preadv"
        return why_not_at_first_read(self, shard, 1, "the system refuses RWF_DONTCACHE")


class _Handle:
    def __init__(self, shard: Shard, *, flags: int) -> None:
        self._path = shard.path
        self._flags = flags
        self._descriptor = open_shard(shard)

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        waiting = [buffer for buffer in buffers if buffer.nbytes]
        for buffer in waiting:
            fault_in(address_of(buffer), buffer.nbytes)
        first = 0
        while first < len(waiting):
            count = self._read(offset, waiting[first : first + _MOST_BUFFERS])
            offset += count
            while count and count >= waiting[first].nbytes:
                count -= waiting[first].nbytes
                first += 1
            if count:
                waiting[first] = waiting[first][count:]

    def _read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        try:
            count = os.preadv(self._descriptor, buffers, offset, self._flags)
        except OSError as error:
            raise read_failed(self._path, offset, error) from error
        if count == 0:
            raise ended_early(self._path, offset)
        return count

    def close(self) -> None:
        os.close(self._descriptor)
