"""What an opened checkpoint is: shards, and entries with their byte ranges. Data only; nothing here reads a file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from umem._types import DType
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
    """One file of a checkpoint, with the identity it had when its header was read."""

    path: str
    size_bytes: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> Shard:
        """The shard as `status` shows it."""
        return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)

    def check_unchanged(self, status: os.stat_result) -> None:
        """Raise unless the open file is still the one whose header was read.

        Raises
        ------
        TruncatedFileError
            The file has become shorter.
        ChangedFileError
            The file was replaced or written to.
        """
        if status.st_size < self.size_bytes:
            raise TruncatedFileError(
                f"the file shrank from {self.size_bytes} to {status.st_size} bytes after it was opened;"
                " is it still being written or synchronised? Open it again when it is whole",
                path=self.path,
            )
        if Shard.of(self.path, status) != self:
            raise ChangedFileError("the file changed after it was opened; open the checkpoint again", path=self.path)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The shards and entries of one checkpoint.

    Attributes
    ----------
    path
        The directory or file, on this machine.
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
