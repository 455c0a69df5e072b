"""Places where a reader's file can be, and what can happen to it there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.servers import file_server
from umem.checkpoint.entries import Shard
from umem.checkpoint.stores import store_of

__all__ = ["Place", "place_of"]


class Place:
    """A local file, and its path or URL."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "shard"
        self.path = str(self.file)

    def write(self, data: bytes) -> None:
        other = self.file.with_suffix(".new")
        other.write_bytes(data)
        other.replace(self.file)

    def content(self) -> bytes:
        return self.file.read_bytes()

    def remove(self) -> None:
        self.file.unlink()

    def cut(self, size: int) -> None:
        os.truncate(self.file, size)

    def shard(self) -> Shard:
        with store_of(self.path).open(self.path) as file:
            return file.shard


class MemoryPlace(Place):
    """A file of fsspec's file system in memory."""

    def __init__(self) -> None:
        import fsspec

        self.filesystem = fsspec.filesystem("memory")
        self.path = "memory://places/shard"

    def write(self, data: bytes) -> None:
        self.filesystem.pipe_file(self.path, data)

    def content(self) -> bytes:
        return bytes(self.filesystem.cat_file(self.path))

    def remove(self) -> None:
        self.filesystem.rm_file(self.path)

    def cut(self, size: int) -> None:
        self.write(self.content()[:size])


@contextmanager
def place_of(reader: str, directory: Path) -> Iterator[Place]:
    """A place that a reader of that name reads from."""
    with ExitStack() as stack:
        if reader == "http":
            pytest.importorskip("aiohttp")
            place = Place(directory)
            place.path = f"{stack.enter_context(file_server(directory)).url}/shard?token=secret"
        else:
            place = MemoryPlace() if reader == "fsspec" else Place(directory)
        yield place
