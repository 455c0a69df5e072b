"""Readers: how the bytes of a shard come into memory. The registry, and the choice for each shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from umem.checkpoint.entries import Shard
from umem.checkpoint.pagecache import cached_bytes_of_files
from umem.checkpoint.readers.base import CancellableHandle, Pace, Reader, ReadHandle
from umem.checkpoint.readers.buffered import BufferedReader, DontCacheReader
from umem.checkpoint.readers.mapped import MappedReader
from umem.checkpoint.readers.odirect import ODirectReader
from umem.checkpoint.readers.remote import FsspecReader, HttpReader
from umem.checkpoint.urls import is_http, protocol_of
from umem.errors import SettingsError

__all__ = ["READERS", "CancellableHandle", "Pace", "ReadHandle", "Reader", "ReaderChoice", "choose_readers"]

_LOCAL = (BufferedReader(), DontCacheReader(), MappedReader(), ODirectReader())
_REMOTE = (HttpReader(), FsspecReader())

READERS: dict[str, Reader] = {reader.name: reader for reader in (*_LOCAL, *_REMOTE)}

#: For files that are not in the page cache, the best first: filling the page cache costs more than the reading.
_PAST_THE_PAGE_CACHE = (ODirectReader.name, DontCacheReader.name)


class ReaderChoice(NamedTuple):
    """A reader for each shard, and the reasons, for people."""

    readers: tuple[Reader, ...]
    reason: str

    @property
    def name(self) -> str:
        """The readers' names, the most frequent first."""
        counts = Counter(reader.name for reader in self.readers)
        return " + ".join(name for name, _ in counts.most_common()) or "none"


def choose_readers(name: str, shards: Sequence[Shard]) -> ReaderChoice:
    """The reader of that name for every shard; `auto` reads what is in the page cache from there, the rest past it.

    What is behind URLs has readers of its own.

    Raises
    ------
    SettingsError
        There is no such reader, or it cannot read these files; the message lists the choices or says why.
    """
    if name == "auto":
        picks = [_pick(shard) for shard in shards]
        reasons = Counter(reason for _, reason in picks)
        return ReaderChoice(tuple(reader for reader, _ in picks), "; ".join(why for why, _ in reasons.most_common()))
    if name not in READERS:
        raise SettingsError(f"no reader is called {name!r}; there are: auto, {', '.join(sorted(READERS))}")
    reader = READERS[name]
    obstacle = next((why for shard in shards if (why := reader.why_not(shard))), None)
    if obstacle:
        raise SettingsError(f"the reader {name} cannot read these files: {obstacle}; use reader='auto'")
    return ReaderChoice((reader,) * len(shards), "as set")


def _pick(shard: Shard) -> tuple[Reader, str]:
    if shard.is_remote:
        remote = HttpReader if is_http(shard.path) else FsspecReader
        return READERS[remote.name], f"{protocol_of(shard.path)} URLs"
    cached = cached_bytes_of_files([shard.path])
    if cached is not None and 2 * cached > shard.size_bytes:
        return READERS[BufferedReader.name], "in the page cache already"
    reasons = ["not in the page cache"]
    for name in _PAST_THE_PAGE_CACHE:
        obstacle = READERS[name].why_not(shard)
        if obstacle is None:
            return READERS[name], ", ".join(reasons)
        reasons.append(obstacle)
    return READERS[BufferedReader.name], ", ".join(reasons)
