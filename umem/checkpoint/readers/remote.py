"""Ranged reads of files behind URLs. Web servers' replies are streamed into place; other stores' are held whole.

Both read with attempts, refuse a file that is not the one that was planned, and can be told to give up. The difference
is in what a block in flight holds: nothing more than its buffers, or another block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from umem.checkpoint.entries import Shard
from umem.checkpoint.readers.base import DISTANT
from umem.checkpoint.stores.requests import Requests
from umem.checkpoint.urls import is_http, shown
from umem.errors import ReadError

if TYPE_CHECKING:
    from umem.checkpoint.stores.remote import RemoteFile

__all__ = ["FsspecReader", "HttpReader"]


class HttpReader:
    """Reads from web servers."""

    name = "http"
    holds_copy = False
    pace = DISTANT

    @contextlib.contextmanager
    def open(self, shard: Shard, block_bytes: int) -> Iterator[_RemoteHandle]:
        """The file, looked up; every reply shows whether it is still the same."""
        del block_bytes
        yield _RemoteHandle(shard)

    def alignment(self, shard: Shard) -> int:
        """Any memory is filled alike."""
        del shard
        return 1

    def why_not(self, shard: Shard) -> str | None:
        """It reads http and https URLs."""
        return None if is_http(shard.path) else "they are not behind http URLs"


class FsspecReader:
    """Reads from whatever fsspec has a file system for."""

    name = "fsspec"
    holds_copy = True
    pace = DISTANT

    @contextlib.contextmanager
    def open(self, shard: Shard, block_bytes: int) -> Iterator[_RemoteHandle]:
        """The file, looked up, and once more in the end: replies do not show whether it is still the same."""
        handle = _RemoteHandle(shard, block_bytes // 2)
        yield handle
        handle.check_same()

    def alignment(self, shard: Shard) -> int:
        """Any memory is filled alike."""
        del shard
        return 1

    def why_not(self, shard: Shard) -> str | None:
        """It reads URLs, but not those for which there is something better."""
        if not shard.is_remote:
            return "they are local files"
        return "http URLs are streamed" if is_http(shard.path) else None


class _RemoteHandle:
    """Looks the file up at its first read, so that it can be told to give up from then on."""

    def __init__(self, shard: Shard, request_bytes: int = 0) -> None:
        self._shard, self._request_bytes = shard, request_bytes
        self._requests = Requests()
        self._file: RemoteFile | None = None

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if self._file is None:
            self._file = self._opened()
        self._file.fill(offset, buffers)

    def _opened(self) -> RemoteFile:
        from umem.checkpoint.stores.remote import RemoteFile

        try:
            return RemoteFile(self._shard.path, self._requests, self._shard, self._request_bytes)
        except FileNotFoundError as error:
            raise ReadError("the file is gone; open the checkpoint again", path=shown(self._shard.path)) from error

    def check_same(self) -> None:
        if self._file is not None:
            self._file.check_same()

    def cancel(self) -> None:
        self._requests.cancel()

    def close(self) -> None:
        """Between reads nothing is open."""
