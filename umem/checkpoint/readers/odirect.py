"""O_DIRECT: past the page cache, straight into memory that lies congruent to the file, else through a small buffer.

Filling the page cache costs more processor time than anything else in a cold load (2.3 s a GiB on the two-core test
machine), and leaves the checkpoint in memory twice. One call reads a whole span: aligned insides of congruent buffers
directly, and what lies between them, heads, tails and small or incongruent tensors, by way of the buffer. Addresses are
aligned as the file system wants (`statx`, Linux 6.1), most often to 4 bytes, else to 4096. Offsets and lengths are of
whole pages, also where less would do: drives of 4 KiB sectors, and hosts below a virtual drive, would copy what is cut
otherwise. The last span of a file may be short.

io_uring and Linux AIO were tried in C on the same machine. One thread that submits reads of 3 to 8 MiB took 2.1 s for
4 GiB, 16 threads with `preadv` 2.2 s (medians of 5 or 6 runs in turn). In memory that the machine's host has to find
again it took 7.1 to 7.4 s, the threads 3.7 s: first touch then binds a processor, and threads share it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from umem.checkpoint.entries import Shard
from umem.checkpoint.readers.base import (
    WAITING,
    address_of,
    ended_early,
    move_bytes,
    open_shard,
    read_failed,
    why_not_at_first_read,
)

__all__ = ["ODirectReader"]

_FLAG = getattr(os, "O_DIRECT", 0)
_USUAL_ALIGNMENT = 4096
_STATX_DIOALIGN = 0x2000
_AT_EMPTY_PATH = 0x1000
_STATX_BYTES = 256
_STATX_MASK_OFFSET, _MEMORY_ALIGN_OFFSET, _OFFSET_ALIGN_OFFSET = 0, 0x98, 0x9C
_MOST_VECTORS = os.sysconf("SC_IOV_MAX") if hasattr(os, "preadv") else 1

#: A piece that is read directly; for smaller ones a further vector costs more than a copy.
_LEAST_DIRECT_BYTES = 16 * 1024

_libc = ctypes.CDLL(None, use_errno=True)


class ODirectReader:
    """Reads past the page cache."""

    name = "odirect"
    holds_copy = False
    pace = WAITING

    def open(self, shard: Shard, block_bytes: int) -> contextlib.closing[_ODirectHandle]:
        """The shard, opened; a read of more than `block_bytes` goes in several spans."""
        return contextlib.closing(_ODirectHandle(shard, block_bytes))

    def alignment(self, shard: Shard) -> int:
        """That of offsets: the file system may do with less."""
        with self.open(shard, _USUAL_ALIGNMENT) as handle:
            return handle.alignments.offset

    def why_not(self, shard: Shard) -> str | None:
        """Whether a read at the start of the file works: file systems refuse O_DIRECT at open or only then."""
        if not _FLAG and not shard.is_remote:
            return "the system has no O_DIRECT"
        return why_not_at_first_read(self, shard, _USUAL_ALIGNMENT, "the file system refuses O_DIRECT")


class _Alignments(NamedTuple):
    """What addresses of direct reads are multiples of, and offsets and lengths, which will do for addresses too."""

    address: int
    offset: int


class _Bounced(NamedTuple):
    """File range [start, end), read into the handle's buffer at `place`."""

    start: int
    end: int
    place: int


class _ODirectHandle:
    def __init__(self, shard: Shard, block_bytes: int) -> None:
        self._path = shard.path
        self._descriptor = open_shard(shard, _FLAG)
        self.alignments = _alignments(self._descriptor)
        self._span = self._up(block_bytes)
        room = self._span + 2 * self.alignments.offset
        self._buffer = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._buffer)

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        for start, parts in _spans(offset, buffers, self._span):
            vectors, bounced = self._vectors(start, parts)
            self._read(self._down(start), vectors, start + sum(part.nbytes for part in parts))
            self._scatter(start, parts, bounced)

    def _up(self, position: int) -> int:
        return -(-position // self.alignments.offset) * self.alignments.offset

    def _down(self, position: int) -> int:
        return position // self.alignments.offset * self.alignments.offset

    def _vectors(self, offset: int, buffers: Sequence[memoryview]) -> tuple[list[memoryview], list[_Bounced]]:
        """Aligned memory for the aligned range around the buffers, in file order, and what of it is bounced."""
        vectors: list[memoryview] = []
        bounced: list[_Bounced] = []
        used, covered, start = 0, self._down(offset), offset

        def bounce(up_to: int) -> None:
            nonlocal used
            if up_to > covered:
                vectors.append(self._view[used : used + up_to - covered])
                bounced.append(_Bounced(covered, up_to, used))
                used += up_to - covered

        for buffer in buffers:
            end = start + buffer.nbytes
            first, last = self._up(start), self._down(end)
            is_congruent = (address_of(buffer) + first - start) % self.alignments.address == 0
            if is_congruent and last - first >= _LEAST_DIRECT_BYTES:
                bounce(first)
                vectors.append(buffer[first - start : last - start])
                covered = last
            start = end
        bounce(self._up(start))
        return vectors, bounced

    def _read(self, offset: int, vectors: list[memoryview], needed: int) -> None:
        """Fill aligned vectors from the aligned `offset`; the file may end within the last, but not before `needed`."""
        while vectors and offset < needed:
            try:
                count = os.preadv(self._descriptor, vectors[:_MOST_VECTORS], offset)
            except OSError as error:
                raise read_failed(self._path, offset, error) from error
            if offset + count >= needed:
                return
            count = self._down(count)
            if count == 0:
                raise ended_early(self._path, offset)
            offset += count
            vectors = _after(vectors, count)

    def _scatter(self, offset: int, buffers: Sequence[memoryview], bounced: Sequence[_Bounced]) -> None:
        """Copy what was bounced to the buffers that it belongs to; both are in file order."""
        waiting = iter(bounced)
        chunk = next(waiting, None)
        start = offset
        for buffer in buffers:
            end = start + buffer.nbytes
            while chunk is not None and chunk.start < end:
                low, high = max(start, chunk.start), min(end, chunk.end)
                if low < high:
                    place = chunk.place + low - chunk.start
                    move_bytes(buffer[low - start : high - start], self._view[place : place + high - low])
                if chunk.end > end:
                    break
                chunk = next(waiting, None)
            start = end

    def close(self) -> None:
        os.close(self._descriptor)
        self._view.release()
        with contextlib.suppress(BufferError):  # a traceback may still hold a slice; it goes with that
            self._buffer.close()


def _spans(offset: int, buffers: Sequence[memoryview], span: int) -> Iterator[tuple[int, list[memoryview]]]:
    """The buffers, cut so that each group has at most `span` bytes; with each group's place in the file."""
    group: list[memoryview] = []
    start, room = offset, span
    for buffer in buffers:
        position = 0
        while position < buffer.nbytes:
            part = buffer[position : position + room]
            group.append(part)
            position += part.nbytes
            room -= part.nbytes
            if room == 0:
                yield start, group
                start, room, group = start + span, span, []
    if group:
        yield start, group


def _after(vectors: list[memoryview], count: int) -> list[memoryview]:
    """What of `vectors` lies after the first `count` bytes."""
    for position, vector in enumerate(vectors):
        if count < vector.nbytes:
            return [vector[count:], *vectors[position + 1 :]]
        count -= vector.nbytes
    return []


def _alignments(descriptor: int) -> _Alignments:
    """What the file system says."""
    usual = _Alignments(_USUAL_ALIGNMENT, _USUAL_ALIGNMENT)
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if not hasattr(_libc, "statx") or _libc.statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer):
        return usual
    mask, memory, offset = (
        int.from_bytes(buffer.raw[at : at + 4], "little")
        for at in (_STATX_MASK_OFFSET, _MEMORY_ALIGN_OFFSET, _OFFSET_ALIGN_OFFSET)
    )
    if not mask & _STATX_DIOALIGN or not memory or not offset:
        return usual
    return _Alignments(memory, max(memory, offset, _USUAL_ALIGNMENT))
