"""`mmap` as a source: maps a span of the file, copies it out, unmaps it. Little is mapped at any time.

For files that can only be mapped; elsewhere the other readers are faster. A mapping of a file that is cut short kills
the process that touches it (SIGBUS), so each span is faulted in by `MADV_POPULATE_READ` (Linux 5.14), which fails in
words. What remains is a file cut short between that and the copy, some milliseconds later.
Parameters that stay mapped are not a reader's business: see `strategies.mapped`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence

from umem.checkpoint.entries import Shard
from umem.checkpoint.readers.base import (
    COPYING,
    ended_early,
    move_bytes,
    open_shard,
    read_failed,
    why_not_at_first_read,
)

__all__ = ["MappedReader"]

_MADV_POPULATE_READ = 22


class MappedReader:
    """Reads from short-lived mappings of the file."""

    name = "mapped"
    holds_copy = True
    pace = COPYING

    def open(self, shard: Shard, block_bytes: int) -> contextlib.closing[_MappedHandle]:
        """The shard, opened; no more than `block_bytes` and a page at each end of it are mapped at a time."""
        return contextlib.closing(_MappedHandle(shard, block_bytes))

    def alignment(self, shard: Shard) -> int:
        """Any memory is filled alike."""
        del shard
        return 1

    def why_not(self, shard: Shard) -> str | None:
        """Whether the first page can be mapped and faulted in."""
        return why_not_at_first_read(self, shard, mmap.PAGESIZE, "the file cannot be mapped and faulted in")


class _MappedHandle:
    def __init__(self, shard: Shard, block_bytes: int) -> None:
        self._path = shard.path
        self._span = max(block_bytes, mmap.PAGESIZE)
        self._descriptor = open_shard(shard)

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        end = offset + sum(buffer.nbytes for buffer in buffers)
        waiting = [buffer for buffer in buffers if buffer.nbytes][::-1]
        while offset < end:
            stop = min(offset + self._span, end)
            with self._mapping(offset, stop) as source:
                place = 0
                while place < len(source):
                    buffer = waiting.pop()
                    count = min(buffer.nbytes, len(source) - place)
                    move_bytes(buffer[:count], source[place : place + count])
                    place += count
                    if count < buffer.nbytes:
                        waiting.append(buffer[count:])
            offset = stop

    @contextlib.contextmanager
    def _mapping(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes [start, stop) of the file, present in memory."""
        if os.fstat(self._descriptor).st_size < stop:
            raise ended_early(self._path, os.fstat(self._descriptor).st_size)
        first = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            # Private and writable, as `ctypes` wants memory whose address it tells; nobody writes to it.
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            mapping = mmap.mmap(self._descriptor, stop - first, mmap.MAP_PRIVATE, protection, offset=first)
            mapping.madvise(_MADV_POPULATE_READ)
        except OSError as error:
            raise read_failed(self._path, start, error) from error
        with mapping, memoryview(mapping) as whole, whole[start - first :] as span:
            yield span

    def close(self) -> None:
        os.close(self._descriptor)
