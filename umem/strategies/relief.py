"""What a load can give back when memory is short, and go on: garbage, cached device memory, its files' pages."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable

import torch

from umem.checkpoint.pagecache import evict, opened
from umem.probes.monitor import LoadStoppedError, LoadWatch
from umem.probes.verdicts import Level

__all__ = ["Relief", "obey"]

_EVERY_S = 1.0
_PIECE_BYTES = 256 << 20  # some milliseconds' work


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

    def give(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Collect young garbage, empty torch's cache of device memory, and evict the files' pages.

        Parameters
        ----------
        is_over
            Asked between pieces of the files: whether to leave the rest.
        """
        if time.monotonic() - self._given_s < _EVERY_S:
            return
        gc.collect(1)  # a full one holds the interpreter for tenths of a second, in which the watch is blind
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        for path in self._paths:
            _evict(path, is_over)
        self._given_s = time.monotonic()


def obey(watch: LoadWatch, relief: Relief) -> None:
    """Give back what can be spared where memory is short; `LoadStoppedError` where the load is over."""
    if watch.level is Level.SOFT:
        relief.give(lambda: watch.level is Level.HARD)
    if watch.level is Level.HARD:
        raise LoadStoppedError


def _evict(path: str, is_over: Callable[[], bool]) -> None:
    with opened(path) as descriptor:
        size = 0 if descriptor is None else os.fstat(descriptor).st_size
        for start in range(0, size, _PIECE_BYTES):
            if descriptor is None or is_over():
                return
            evict(descriptor, start, start + _PIECE_BYTES)
