"""The window: a cap in bytes on everything live that is not final storage. A semaphore that counts bytes.

Who needs staging, scratch or bytes in flight acquires them first. A request larger than the whole window is let through
only when nothing else is live; what it takes beyond the cap shows in `peak_bytes`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["Window", "WindowClosedError"]


class WindowClosedError(Exception):
    """The load is ending; whoever waits for bytes gives up."""


class Window:
    """A byte semaphore, served in the order of asking.

    Parameters
    ----------
    cap_bytes
        The most that may be live at once.
    """

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self._closed = False
        self._next_ticket = 0
        self._serving = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Hold `count` bytes; waits for them. `WindowClosedError` if the load ends meanwhile."""
        self._acquire(count)
        try:
            yield
        finally:
            with self._changed:
                self.live_bytes -= count
                self._changed.notify_all()

    def close(self) -> None:
        """Turn away everyone who waits, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _acquire(self, count: int) -> None:
        with self._changed:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._changed.wait_for(lambda: self._closed or (ticket == self._serving and self._fits(count)))
            if self._closed:
                raise WindowClosedError
            self._serving += 1
            self.live_bytes += count
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            self._changed.notify_all()

    def _fits(self, count: int) -> bool:
        return self.live_bytes == 0 or self.live_bytes + count <= self.cap_bytes
