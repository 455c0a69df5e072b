"""Files behind URLs: looked up, listed and read, with attempts and checks, over one of two transports.

The rules of directories are those of local ones, as far as a store can list. Web servers often cannot; there the usual
names of checkpoints are tried.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

from umem.checkpoint.entries import Shard
from umem.checkpoint.stores.filesystems import filesystem_of
from umem.checkpoint.stores.objects import ObjectTransport
from umem.checkpoint.stores.requests import Patience, Requests
from umem.checkpoint.stores.sink import Sink
from umem.checkpoint.urls import is_http, joined, parent, shown
from umem.errors import CheckpointNotFoundError, ReadError, RemoteReadError, TruncatedFileError, UmemError

__all__ = ["RemoteFile", "RemoteStore", "local_copies"]

_REQUEST_BYTES = 2 << 20
_SMALL_FILE_BYTES = 64 << 20

#: Reads at several places of one file, at once.
_THREADS = 8

#: A file's first bytes, where headers are, come with one request.
_HEAD_BYTES = 64 * 1024

_USUAL_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


class Transport(Protocol):
    """One file or directory of one kind of store. Errors are the driver's own; nothing is tried twice."""

    def kind(self) -> Literal["file", "directory"]:
        """What it is."""

    def names(self) -> list[str]:
        """What is in it."""

    def inspect(self) -> Shard:
        """The file as it is now."""

    def fetch(self, shard: Shard, start: int, sink: Sink) -> None:
        """Give `sink` some of the bytes that it misses, which begin at `start` of the file."""


def _transport(url: str, requests: Requests, request_bytes: int) -> Transport:
    if not is_http(url):
        return ObjectTransport(url, requests, request_bytes)
    filesystem_of(url)  # says what is missing where aiohttp is
    from umem.checkpoint.stores.http import HttpTransport

    return HttpTransport(url, requests)


class RemoteFile:
    """One file behind a URL, read in ranges.

    Parameters
    ----------
    url
        Where it is.
    requests
        By whom its reads are cancelled.
    shard
        The identity that it must still have; None takes what it has now.
    request_bytes
        The most that is asked for at once, where replies are held whole.

    Raises
    ------
    FileNotFoundError
        It is not there.
    ReadError
        It could not be looked up.
    ChangedFileError, TruncatedFileError
        It is not `shard` any more.
    """

    def __init__(
        self, url: str, requests: Requests, shard: Shard | None = None, request_bytes: int = _REQUEST_BYTES
    ) -> None:
        self.path = shown(url)
        self._url, self._requests = url, requests
        self._transport = _transport(url, requests, request_bytes)
        self._head = b""
        self.shard = self._now()
        if shard is not None:
            shard.check_same(self.shard)

    def check_same(self) -> None:
        """Raise, as readers do, unless the file is what it was when it was opened."""
        self.shard.check_same(self._now())

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` with the bytes from `offset` on.

        A reply that is short is continued where it ended; one that brings nothing is asked for again, after a pause,
        `ATTEMPTS` times in a row at most.

        Raises
        ------
        TruncatedFileError
            The file ends first.
        ChangedFileError
            It is not the file that was opened.
        RemoteReadError
            The bytes did not come.
        """
        sink = Sink(buffers)
        patience = Patience(self._requests, self._url, offset + sink.missing)
        with contextlib.closing(sink):
            while sink.missing:
                start = offset + sink.filled
                try:
                    self._transport.fetch(self.shard, start, sink)
                    if offset + sink.filled == start:
                        self._explain_nothing(start)
                except UmemError:
                    raise
                except Exception as error:
                    if offset + sink.filled > start:
                        patience.progress()
                    if (final := patience.verdict(error, offset + sink.filled)) is not None:
                        raise final from error
                else:
                    patience.progress()

    def read(self, start: int, length: int) -> bytes:
        """The bytes from `start` on: `length` of them, fewer only where the file ends."""
        length = max(0, min(length, self.shard.size_bytes - start))
        if start + length <= _HEAD_BYTES and not self._head:
            self._head = self._read(0, min(_HEAD_BYTES, self.shard.size_bytes))
        if start + length <= len(self._head):
            return self._head[start : start + length]
        return self._read(start, length)

    def read_each(self, starts: Sequence[int], length: int) -> list[bytes]:
        """`read` at several places at once."""
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(lambda start: self.read(start, length), starts))

    def _read(self, start: int, length: int) -> bytes:
        content = bytearray(length)
        self.fill(start, [memoryview(content)])
        return bytes(content)

    def _now(self) -> Shard:
        return self._requests.persist(self._url, self._transport.inspect)

    def _explain_nothing(self, start: int) -> None:
        """A reply was empty: the file has changed, or ends there, or the store gave less than it has."""
        self.check_same()
        if start >= self.shard.size_bytes:
            raise TruncatedFileError(f"the file ends at byte {self.shard.size_bytes}", path=self.path)
        raise ConnectionError("the reply was empty")


class RemoteStore:
    """The files behind URLs."""

    def __init__(self) -> None:
        self._requests = Requests()

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        """What is there."""
        try:
            return self._requests.persist(path, _transport(path, self._requests, _REQUEST_BYTES).kind)
        except CheckpointNotFoundError:
            raise
        except FileNotFoundError:
            return None

    def names(self, directory: str) -> list[str]:
        """The names in a directory; where a server does not list them, the usual ones that are there."""
        listed = self._requests.persist(directory, _transport(directory, self._requests, _REQUEST_BYTES).names)
        if listed or not is_http(directory):
            return listed
        return [name for name in _USUAL_NAMES if self._has(joined(directory, name))]

    def joined(self, directory: str, name: str) -> str:
        """The URL of a name in a directory."""
        return joined(directory, name)

    def parent(self, path: str) -> str:
        """The URL of the directory that a file is in."""
        return parent(path)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[RemoteFile]:
        """The file, opened."""
        try:
            file = RemoteFile(path, self._requests)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError("there is no such file", path=shown(path)) from error
        yield file

    def cancel(self) -> None:
        """Give up every request."""
        self._requests.cancel()

    def _has(self, url: str) -> bool:
        """Whether the file is there; stores that hide what is not there refuse to look it up."""
        try:
            RemoteFile(url, self._requests)
        except FileNotFoundError:
            return False
        except RemoteReadError as error:
            if getattr(error.__cause__, "status", None) == 403:
                return False
            raise
        return True


@contextlib.contextmanager
def local_copies(directory: str, names: Sequence[str]) -> Iterator[str]:
    """A temporary local directory with the small files of these names, as far as they are there.

    Raises
    ------
    ReadError
        One of them did not come, or is not small.
    """
    requests = Requests()
    with tempfile.TemporaryDirectory(prefix="umem-") as copies:
        for name in names:
            try:
                file = RemoteFile(joined(directory, name), requests)
            except FileNotFoundError:
                continue
            if file.shard.size_bytes > _SMALL_FILE_BYTES:
                raise ReadError(f"{file.shard.size_bytes} bytes are too many for a config", path=file.path)
            with open(os.path.join(copies, name), "wb") as copy:
                copy.write(file.read(0, file.shard.size_bytes))
        yield copies
