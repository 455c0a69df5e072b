"""Buffers that are filled in order, from another thread, until they are closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

__all__ = ["Sink"]


class Sink:
    """Takes bytes as they come and lays them into buffers, one after the other.

    After `close` nothing is written any more, so that the buffers' memory may go: who writes may be late.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._waiting = [buffer for buffer in reversed(buffers) if buffer.nbytes]
        self.missing = sum(buffer.nbytes for buffer in self._waiting)
        self.filled = 0
        self._lock = threading.Lock()

    def write(self, data: bytes | memoryview) -> None:
        """Lay down the next bytes; those beyond the last buffer are dropped."""
        view = memoryview(data)
        with self._lock:
            while view.nbytes and self._waiting:
                buffer = self._waiting.pop()
                count = min(buffer.nbytes, view.nbytes)
                buffer[:count] = view[:count]
                view = view[count:]
                if count < buffer.nbytes:
                    self._waiting.append(buffer[count:])
                self.filled += count
                self.missing -= count

    def close(self) -> None:
        """Take no more."""
        with self._lock:
            self._waiting.clear()
