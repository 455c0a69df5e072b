"""Local files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Literal

from umem.checkpoint.entries import Shard
from umem.errors import CheckpointNotFoundError

__all__ = ["LocalStore"]


class LocalStore:
    """The files of this machine."""

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        """What is there; links count as what they lead to."""
        if os.path.isdir(path):
            return "directory"
        return "file" if os.path.exists(path) else None

    def names(self, directory: str) -> list[str]:
        """Everything in the directory."""
        return os.listdir(directory)

    def joined(self, directory: str, name: str) -> str:
        """The path of a name in a directory."""
        return os.path.join(directory, name)

    def parent(self, path: str) -> str:
        """The directory that a file is in."""
        return os.path.dirname(path)

    @contextlib.contextmanager
    def open(self, path: str) -> Iterator[_LocalFile]:
        """The file, opened."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise CheckpointNotFoundError("there is no such file", path=path) from None
        try:
            yield _LocalFile(path, descriptor)
        finally:
            os.close(descriptor)

    def cancel(self) -> None:
        """Local reads do not wait."""


class _LocalFile:
    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self.shard = Shard.of(path, os.fstat(descriptor))
        self._descriptor = descriptor

    def read(self, start: int, length: int) -> bytes:
        parts = []
        while length > 0 and (part := os.pread(self._descriptor, length, start)):
            parts.append(part)
            start += len(part)
            length -= len(part)
        return b"".join(parts)

    def read_each(self, starts: Sequence[int], length: int) -> list[bytes]:
        return [self.read(start, length) for start in starts]
