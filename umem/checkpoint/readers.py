"""Readers: how the bytes of a shard come into memory. A contract, a registry, and the plain reader.

A reader opens a shard for one thread; the handle fills the given buffers with consecutive bytes of the file, whole
or not at all. What it does about short reads, interrupts and the end of the file is its own business; what its
caller sees is either full buffers or a typed error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Protocol

from umem.checkpoint.entries import Shard
from umem.errors import ConfigError, ReadError, TruncatedFileError

__all__ = ["READERS", "BufferedReader", "ReadHandle", "Reader", "chosen_reader"]

_MOST_BUFFERS = os.sysconf("SC_IOV_MAX") if hasattr(os, "preadv") else 1


class ReadHandle(Protocol):
    """A shard, opened for one thread; close it, or use it as a context manager."""

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` with the bytes of the file from `offset` on.

        Raises
        ------
        TruncatedFileError
            The file ends first.
        ReadError
            The system could not read.
        """

    def close(self) -> None:
        """Close the file."""


class Reader(Protocol):
    """Opens shards. `name` is how a user asks for it; `fills_page_cache` whether what it reads stays in the cache."""

    name: str
    fills_page_cache: bool

    def open(self, shard: Shard) -> contextlib.AbstractContextManager[ReadHandle]:
        """The shard, opened; `ChangedFileError` or `TruncatedFileError` if it is no longer the planned file."""


class BufferedReader:
    """`preadv` through the page cache, straight into the given buffers."""

    name = "buffered"
    fills_page_cache = True

    def open(self, shard: Shard) -> contextlib.closing[_BufferedHandle]:
        """The shard, opened."""
        return contextlib.closing(_BufferedHandle(shard))


class _BufferedHandle:
    def __init__(self, shard: Shard) -> None:
        self._path = shard.path
        try:
            self._descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(f"cannot be opened: {error.strerror}", path=shard.path) from error
        try:
            shard.check_unchanged(os.fstat(self._descriptor))
        except BaseException:
            os.close(self._descriptor)
            raise

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
            raise ReadError(f"reading at byte {offset} failed: {error.strerror}", path=self._path) from error
        if count == 0:
            raise TruncatedFileError(
                f"the file ended at byte {offset} while it was read; it was cut short", path=self._path
            )
        return count

    def close(self) -> None:
        os.close(self._descriptor)


READERS: dict[str, Reader] = {BufferedReader.name: BufferedReader()}


def chosen_reader(name: str) -> tuple[Reader, str]:
    """The reader of that name, or the one that suits for `auto`, and why. `ConfigError` lists the choices."""
    if name == "auto":
        return READERS[BufferedReader.name], "works everywhere"
    try:
        return READERS[name], "as set"
    except KeyError:
        raise ConfigError(f"no reader is called {name!r}; there are: auto, {', '.join(sorted(READERS))}") from None
