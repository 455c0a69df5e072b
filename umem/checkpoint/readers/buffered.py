"""`preadv` through the page cache, straight into the given buffers. Works on every file system; fast when warm."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from umem.checkpoint.entries import Shard
from umem.checkpoint.readers.base import ended_early, open_shard, read_failed

__all__ = ["BufferedReader"]

_MOST_BUFFERS = os.sysconf("SC_IOV_MAX") if hasattr(os, "preadv") else 1


class BufferedReader:
    """Reads through the page cache."""

    name = "buffered"
    holds_replies = False
    fills_page_cache = True

    def open(self, shard: Shard, block_bytes: int) -> contextlib.closing[_BufferedHandle]:
        """The shard, opened; its reads may be of any length."""
        del block_bytes
        return contextlib.closing(_BufferedHandle(shard))

    def alignment(self, shard: Shard) -> int:
        """Any memory is filled alike."""
        del shard
        return 1

    def why_not(self, shard: Shard) -> str | None:
        """It reads every local file."""
        return "they are behind URLs" if shard.is_remote else None


class _BufferedHandle:
    def __init__(self, shard: Shard) -> None:
        self._path = shard.path
        self._descriptor = open_shard(shard)

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        waiting = [buffer for buffer in buffers if buffer.nbytes]
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
            count = os.preadv(self._descriptor, buffers, offset)
        except OSError as error:
            raise read_failed(self._path, offset, error) from error
        if count == 0:
            raise ended_early(self._path, offset)
        return count

    def close(self) -> None:
        os.close(self._descriptor)
