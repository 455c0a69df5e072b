"""The contract of stores: where a checkpoint's files live, and how they are looked into before a load."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal, Protocol

from umem.checkpoint.entries import Shard

__all__ = ["Store", "StoredFile"]


class StoredFile(Protocol):
    """A file, opened to read its header.

    Attributes
    ----------
    path
        What it is called, in errors too.
    shard
        The identity that it had when it was opened.
    """

    path: str
    shard: Shard

    def read(self, start: int, length: int) -> bytes:
        """The bytes from `start` on: `length` of them, fewer only where the file ends.

        Raises
        ------
        ReadError
            The bytes could not be read.
        ChangedFileError, TruncatedFileError
            The file is no longer the one that was opened.
        """

    def read_each(self, starts: Sequence[int], length: int) -> list[bytes]:
        """`read` at several places."""


class Store(Protocol):
    """The files under one path or URL."""

    def kind(self, path: str) -> Literal["file", "directory"] | None:
        """What is there; None: nothing."""

    def names(self, directory: str) -> list[str]:
        """The names of the files in a directory."""

    def joined(self, directory: str, name: str) -> str:
        """The path of a name in a directory."""

    def parent(self, path: str) -> str:
        """The directory that a file is in."""

    def open(self, path: str) -> contextlib.AbstractContextManager[StoredFile]:
        """The file, opened.

        Raises
        ------
        CheckpointNotFoundError
            It is not there.
        ReadError
            It cannot be opened.
        """

    def cancel(self) -> None:
        """Give up whatever other threads wait for; they get an error."""
