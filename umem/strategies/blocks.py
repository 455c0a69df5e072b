"""The schedule of reads: which ranges of which files, in file order, and which writes each range feeds. Pure.

Tensors that follow each other are read together and large ones in several pieces, so that the drive sees long
sequential reads whatever the sizes of the tensors. A small gap between tensors is read over rather than skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from umem.planning.writes import Group, Write

__all__ = ["Block", "Part", "blocks_of"]

#: Shorter than what a second request costs; zip archives put headers of about 100 bytes between tensors.
GAP_BYTES = 64 * 1024


class Part(NamedTuple):
    """A piece of a group's first entry: file range [start, end)."""

    start: int
    end: int
    group: Group

    @property
    def writes(self) -> tuple[Write, ...]:
        """The writes that the entry feeds."""
        return self.group.writes


class Block(NamedTuple):
    """One read: a range of a shard and the parts in it, ascending; gaps between parts belong to nobody."""

    shard: int
    number: int
    parts: tuple[Part, ...]

    @property
    def start(self) -> int:
        """The first byte."""
        return self.parts[0].start

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.parts[-1].end


def blocks_of(groups: Iterable[Group], block_bytes: int) -> list[Block]:
    """The reads for all writes of `groups`; blocks are numbered within their shard, from 0."""
    by_place = sorted(
        (group for group in groups if group.writes), key=lambda group: (group.entries[0].shard, group.entries[0].start)
    )
    blocks: list[Block] = []
    numbers: dict[int, int] = {}
    for shard, parts in _cut(by_place, block_bytes):
        number = numbers.get(shard, 0)
        numbers[shard] = number + 1
        blocks.append(Block(shard, number, tuple(parts)))
    return blocks


def _cut(groups: Sequence[Group], block_bytes: int) -> Iterator[tuple[int, list[Part]]]:
    shard, parts = -1, list[Part]()
    for group in groups:
        entry = group.entries[0]
        if entry.nbytes == 0:
            continue
        position, end = entry.start, entry.start + entry.nbytes
        while position < end:
            if parts and (shard != entry.shard or not 0 <= position - parts[-1].end <= GAP_BYTES):
                yield shard, parts
                parts = []
            shard = entry.shard
            room = block_bytes - (position - parts[0].start if parts else 0)
            take = min(room // entry.dtype.itemsize * entry.dtype.itemsize, end - position)
            if take <= 0:
                yield shard, parts
                parts = []
                continue
            parts.append(Part(position, position + take, group))
            position += take
    if parts:
        yield shard, parts
