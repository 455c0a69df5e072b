"""A device without hardware, whose work lands late: an accelerator for rings in ordinary memory.

What is issued to a stream is kept and happens when a fence asks for it, at moments drawn from a seed, or behind a
thread's back; always in the order of issue. All memory is poisoned before and after use, so whatever is read too early
or too late gives wrong numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch

from umem.strategies.copiers import ring
from umem.strategies.copiers.base import Registered, RegistrationError

LANDINGS = ("latest", "seeded", "thread")

Landing = Callable[["LateStream"], None]


class LateStream:
    """Work in the order of issue; `land` is told of each, and may let some of it happen.

    Attributes
    ----------
    issued, landed, copies
        How much work, how much of it has happened, and how much of it copies from the host.
    """

    def __init__(self, land: Landing) -> None:
        self._land = land
        self._lock = threading.RLock()
        self._work: deque[Callable[[], None]] = deque()
        self.issued = self.landed = self.copies = 0

    def issue(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._work.append(work)
            self.issued += 1
            self.copies += isinstance(work, partial) and work.func is ring._copy
        self._land(self)

    def fence(self) -> LateFence:
        return LateFence(self, self.issued)

    def synchronize(self) -> None:
        self.land_until(self.issued)

    def land_until(self, count: int) -> None:
        """Let the first `count` pieces of work happen."""
        with self._lock, torch.no_grad():
            while self.landed < count:
                self._work.popleft()()
                self.landed += 1


class LateFence:
    def __init__(self, stream: LateStream, count: int) -> None:
        self._stream, self._count = stream, count

    def synchronize(self) -> None:
        self._stream.land_until(self._count)


class LateDevice:
    """The accelerator.

    Attributes
    ----------
    live_bytes, peak_bytes
        Registered memory and staging.
    faults
        What a real device would have crashed on.
    refuses_from
        The registration, by number, from which on it refuses.
    """

    def __init__(self, landing: str, seed: int = 0) -> None:
        self.streams: list[LateStream] = []
        self.live_bytes = self.peak_bytes = self.registrations = 0
        self.faults: list[str] = []
        self.refuses_from: int | None = None
        self._landing, self._random = landing, random.Random(seed)
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    @contextlib.contextmanager
    def registered(self, count: int, device: str) -> Iterator[Registered]:
        if self.refuses_from is not None and self.registrations >= self.refuses_from:
            raise RegistrationError("late devices refuse: operation not supported")
        self.registrations += 1
        pages = self.pages(count)
        self._take(count)
        try:
            yield Registered(memoryview(pages), "registered by a fake")
        finally:
            self._take(-count)
            if any(stream.landed < stream.issued for stream in self.streams):
                self.faults.append("memory was unregistered under a copy")
            _poison(pages, count)

    def pages(self, count: int) -> mmap.mmap:
        pages = mmap.mmap(-1, count)
        _poison(pages, count)
        return pages

    def staging(self, count: int, device: str) -> torch.Tensor:
        self._take(count)
        tensor = torch.full((count,), 0xEE, dtype=torch.uint8)
        weakref.finalize(tensor, self._take, -count)
        return tensor

    def stream(self, device: str) -> LateStream:
        stream = LateStream(self._land_some if self._landing == "seeded" else lambda _: None)
        self.streams.append(stream)
        if self._landing == "thread":
            self._threads.append(threading.Thread(target=self._land_behind, args=(stream,)))
            self._threads[-1].start()
        return stream

    def close(self) -> None:
        """End the threads."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _take(self, count: int) -> None:
        self.live_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _land_some(self, stream: LateStream) -> None:
        stream.land_until(self._random.randint(0, stream.issued))

    def _land_behind(self, stream: LateStream) -> None:
        while not self._over.is_set():
            time.sleep(0.001)
            stream.land_until(min(stream.landed + 1, stream.issued))


def _poison(pages: mmap.mmap, count: int) -> None:
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(pages)), 0xEE, count)
