"""What an opened checkpoint is: shards, and entries with their byte ranges. Data only; nothing here reads a file."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from umem._types import DType
from umem.checkpoint.urls import is_url, shown
from umem.errors import ChangedFileError, TruncatedFileError

__all__ = ["Checkpoint", "Entry", "Shard"]


class Entry(NamedTuple):
    """One stored tensor.

    Attributes
    ----------
    name
        The stored name.
    shard
        Index into `Checkpoint.shards`.
    start, nbytes
        The byte range in the shard's file, from the file's first byte.
    dtype
        The stored dtype.
    shape
        Shape in storage items, as torch shows it: an F4 tensor of [2, 8] elements is [2, 4] items of one byte.
    strides
        Strides in items, or None for row-major order (always so in safetensors files).
    """

    name: str
    shard: int
    start: int
    nbytes: int
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a checkpoint, with the identity it had when its header was read.

    Attributes
    ----------
    path
        A local path, or a URL.
    size_bytes
        Its length.
    version
        What changes when the file does: time of modification and inode of a local file, what a store says of an
        object (ETag, generation, time). None where nothing is said; only the length is then held against.
    """

    path: str
    size_bytes: int
    version: Hashable

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> Shard:
        """The local file as `status` shows it."""
        return cls(path, status.st_size, (status.st_mtime_ns, status.st_ino))

    @property
    def is_remote(self) -> bool:
        """Whether it is no local file: it has no descriptor and no page cache here."""
        return is_url(self.path)

    def check_unchanged(self, status: os.stat_result) -> None:
        """Raise unless the open local file is still the one whose header was read; as `check_same`."""
        self.check_same(Shard.of(self.path, status))

    def check_same(self, now: Shard) -> None:
        """Raise unless `now`, the same file seen later, is unchanged.

        Raises
        ------
        TruncatedFileError
            The file has become shorter.
        ChangedFileError
            The file was replaced or written to.
        """
        if now.size_bytes < self.size_bytes:
            raise TruncatedFileError(
                f"the file shrank from {self.size_bytes} to {now.size_bytes} bytes after it was opened;"
                " is it still being written or synchronised? Open it again when it is whole",
                path=shown(self.path),
            )
        if now != self:
            raise ChangedFileError(
                "the file changed after it was opened; open the checkpoint again", path=shown(self.path)
            )


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The shards and entries of one checkpoint.

    Attributes
    ----------
    path
        The directory or file, as it is shown: URLs without their query.
    shards
        The files, in the order of their names.
    entries
        Stored name -> entry, in file order.
    metadata
        `__metadata__` of safetensors headers and the index's `metadata`, merged; for people only.
    identifier
        The hub id that `path` was resolved from, or None.
    """

    path: str
    shards: tuple[Shard, ...]
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    identifier: str | None = None

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.entries.values())
