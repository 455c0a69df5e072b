"""What a load can give back when memory is short, and go on: garbage, cached device memory, its files' pages."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable

import torch

from umem.checkpoint.pagecache import evict

__all__ = ["Relief"]

_EVERY_S = 1.0


class Relief:
    """Gives back what can be spared, once a second at most.

    Parameters
    ----------
    paths
        Files none of whose pages need to stay in the page cache.
    """

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = tuple(paths)
        self._given_s = -_EVERY_S

    def give(self) -> None:
        """Collect young garbage, empty torch's cache of device memory, and evict the files' pages."""
        if time.monotonic() - self._given_s < _EVERY_S:
            return
        gc.collect(1)  # a full one holds the interpreter for tenths of a second, in which the watch is blind
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        for path in self._paths:
            self._evict(path)
        self._given_s = time.monotonic()

    @staticmethod
    def _evict(path: str) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return
        try:
            evict(descriptor)
        finally:
            os.close(descriptor)
