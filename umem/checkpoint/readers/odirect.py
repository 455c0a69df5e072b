"""O_DIRECT: past the page cache, by aligned spans into a small buffer, from which the bytes are moved on.

Filling the page cache costs more processor time than moving the bytes once more (2.3 s a GiB against 0.2 on the
two-core test machine), and leaves the checkpoint in memory twice. Heads and tails that are not aligned are read over;
the last span of a file may be short. Alignment is what the file system says (`statx`, Linux 6.1), else 4096.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence

from umem.checkpoint.entries import Shard
from umem.checkpoint.readers.base import ended_early, open_shard, read_failed
from umem.errors import CheckpointError

__all__ = ["ODirectReader"]

_FLAG = getattr(os, "O_DIRECT", 0)
_USUAL_ALIGNMENT = 4096
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_STATX_BYTES = 256
_STATX_MASK_OFFSET, _MEMORY_ALIGN_OFFSET, _OFFSET_ALIGN_OFFSET = 0, 0x98, 0x9C

_libc = ctypes.CDLL(None, use_errno=True)


class ODirectReader:
    """Reads past the page cache."""

    name = "odirect"
    fills_page_cache = False

    def open(self, shard: Shard, block_bytes: int) -> contextlib.closing[_ODirectHandle]:
        """The shard, opened; a read of more than `block_bytes` goes in several spans."""
        return contextlib.closing(_ODirectHandle(shard, block_bytes))

    def why_not(self, shard: Shard) -> str | None:
        """Whether a read at the start of the file works: file systems refuse O_DIRECT at open or only then."""
        if not _FLAG:
            return "the system has no O_DIRECT"
        try:
            with self.open(shard, _USUAL_ALIGNMENT) as handle:
                handle.borrow(0, min(1, shard.size_bytes))
        except CheckpointError as error:
            cause = error.__cause__
            return f"the file system refuses O_DIRECT ({cause.strerror if isinstance(cause, OSError) else error})"
        return None


class _ODirectHandle:
    def __init__(self, shard: Shard, block_bytes: int) -> None:
        self._path = shard.path
        self._descriptor = open_shard(shard, _FLAG)
        self._alignment = _alignment(self._descriptor)
        self._span = -(-block_bytes // self._alignment) * self._alignment
        self._buffer = mmap.mmap(-1, self._span + self._alignment, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._buffer)

    def borrow(self, offset: int, count: int) -> memoryview | None:
        skipped = offset % self._alignment
        if skipped + count > len(self._view):
            return None
        start, filled, needed = offset - skipped, 0, skipped + count
        length = -(-needed // self._alignment) * self._alignment
        while filled < needed:
            done = filled // self._alignment * self._alignment
            got = self._read(start + done, self._view[done:length])
            if done + got <= filled:
                raise ended_early(self._path, start + filled)
            filled = done + got
        return self._view[skipped:needed]

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            for position in range(0, buffer.nbytes, self._span):
                part = buffer[position : position + self._span]
                borrowed = self.borrow(offset, part.nbytes)
                if borrowed is not None:
                    part[:] = borrowed
                offset += part.nbytes

    def _read(self, offset: int, buffer: memoryview) -> int:
        try:
            return os.preadv(self._descriptor, [buffer], offset)
        except OSError as error:
            raise read_failed(self._path, offset, error) from error

    def close(self) -> None:
        os.close(self._descriptor)
        self._view.release()
        with contextlib.suppress(BufferError):  # a caller still holds what it borrowed; it goes with that
            self._buffer.close()


def _alignment(descriptor: int) -> int:
    """What offsets, lengths and addresses of direct reads must be multiples of, for this file."""
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if not hasattr(_libc, "statx") or _libc.statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer):
        return _USUAL_ALIGNMENT
    mask, memory, offset = (
        int.from_bytes(buffer.raw[at : at + 4], "little")
        for at in (_STATX_MASK_OFFSET, _MEMORY_ALIGN_OFFSET, _OFFSET_ALIGN_OFFSET)
    )
    if not mask & _STATX_DIOALIGN or not memory or not offset:
        return _USUAL_ALIGNMENT
    return max(memory, offset)
