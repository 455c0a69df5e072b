"""The mapped route: a parameter is the file's own pages. Nothing is read, nothing is copied.

The mapping is private: a page that is written to becomes memory of the process's own, and the file stays as it is.
Pages that are only read belong to the page cache, which may drop them and read them again. A file that is cut short
while it is mapped kills the process that uses the lost part (SIGBUS); to replace it by another under its name is safe.
"""

from __future__ import annotations

import mmap
import os

import torch

from umem.checkpoint.entries import Entry, Shard
from umem.checkpoint.readers.base import open_shard, read_failed
from umem.planning.targets import Target
from umem.strategies.storage import torch_dtype

__all__ = ["MappedShards"]


class MappedShards:
    """Maps shards once each; a mapping lives as long as a tensor of it."""

    def __init__(self) -> None:
        self._mappings: dict[str, mmap.mmap] = {}

    def tensor(self, shard: Shard, entry: Entry, target: Target) -> torch.Tensor:
        """The target's tensor, which is the entry's bytes in the file.

        Raises
        ------
        ChangedFileError, TruncatedFileError, ReadError
            The file is not the one that was planned, or cannot be mapped.
        """
        dtype = torch_dtype(target.dtype)
        if not entry.nbytes:
            return torch.empty(target.shape, dtype=dtype)
        mapping = self._mappings.get(shard.path) or self._map(shard)
        return torch.frombuffer(mapping, dtype=dtype, count=target.items, offset=entry.start).view(target.shape)

    def _map(self, shard: Shard) -> mmap.mmap:
        descriptor = open_shard(shard)
        try:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            mapping = mmap.mmap(descriptor, shard.size_bytes, mmap.MAP_PRIVATE, protection)
        except OSError as error:
            raise read_failed(shard.path, 0, error) from error
        finally:
            os.close(descriptor)
        return self._mappings.setdefault(shard.path, mapping)
