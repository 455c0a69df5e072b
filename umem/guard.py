"""The guard: a small process beside a load, for machines that nobody watches.

It ends the loading process when memory is below the hard floor and the loader does not answer (it was stopped, or its
interpreter is held by a call that does not return), or has not freed its memory in time: SIGTERM, and SIGKILL after a
grace. It ends with the load, and by itself when the loader ends. It says what it did on standard error. A loader that
answers stops by itself long before; what it judges by, besides the floors, is `probes.policy`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from umem._types import format_bytes
from umem.errors import UnsupportedError
from umem.probes.memory import MemoryProbe, MemorySnapshot

__all__ = ["Guard", "Short", "Warden", "main", "shortage"]

_TICK_S = 0.05
_BEAT = b"\n"
_LOCK_ALL = 1 | 2 | 4  # MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT
_OOM_SCORE = "/proc/self/oom_score_adj"
_DIE_FIRST = "1000"


class Guard:
    """The loader's side: starts the guard, tells it that the loader lives, and ends it. A context manager.

    While it is on, the kernel's own choice when memory is out is this process (`oom_score_adj`).

    Raises
    ------
    UnsupportedError
        The system is not Linux.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._score: str | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if not hasattr(os, "pidfd_open"):
            raise UnsupportedError("the guard needs Linux 5.3 and later; load without it")
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(  # noqa: S603 - umem itself
            [sys.executable, "-P", "-m", "umem.guard", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # what is typed at the terminal is for the loader
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        self._score = _changed_score(_DIE_FIRST)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # there is nothing that it would have to finish
        process.communicate()
        if self._score is not None:
            _changed_score(self._score)

    def arm(self, floors: Mapping[str, int]) -> None:
        """From now on memory is short below these floors, in bytes: of `system` and of `group`."""
        self._tell(json.dumps(floors).encode() + b"\n")

    def beat(self) -> None:
        """The loader lives."""
        self._tell(_BEAT)

    @property
    def pid(self) -> int | None:
        """The guard's process number while it runs."""
        return self._process.pid if self._process is not None else None

    def _tell(self, line: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # it has ended, or has yet to read what it was told
            if self._process is not None and self._process.stdin is not None:
                os.write(self._process.stdin.fileno(), line)


def _changed_score(score: str) -> str | None:
    """Set the kernel's preference for killing this process; the one before, or None where it cannot be set."""
    try:
        before = Path(_OOM_SCORE).read_text().strip()
        Path(_OOM_SCORE).write_text(score)
    except OSError:
        return None
    return before


class Short(NamedTuple):
    """Memory below a floor: what is left of which memory, in bytes."""

    left_bytes: int
    floor_bytes: int
    where: str


def shortage(memory: MemorySnapshot, floors: Mapping[str, int]) -> Short | None:
    """Where memory is below its floor."""
    group = memory.cgroup
    rooms = (
        ("system", memory.available_bytes, "available"),
        ("group", group.headroom_bytes if group else None, "left in the control group"),
    )
    for name, left, where in rooms:
        if left is not None and left < floors.get(name, 0):
            return Short(left, floors[name], where)
    return None


@dataclass(slots=True)
class Warden:
    """Decides when a loader is to be ended. Pure: it is told what happens and when, in seconds.

    Attributes
    ----------
    silence_s
        A loader that has not been heard of for so long does not answer.
    patience_s
        How long memory may be short while the loader answers.
    """

    silence_s: float = 0.5
    patience_s: float = 2.0
    heard_s: float = 0.0
    short_since_s: float | None = None

    def heard(self, now_s: float) -> None:
        """The loader gave a sign of life."""
        self.heard_s = now_s

    def verdict(self, now_s: float, short: Short | None) -> str | None:
        """Why the loader is to be ended; None: it is not."""
        if short is None:
            self.short_since_s = None
            return None
        self.short_since_s = now_s if self.short_since_s is None else self.short_since_s
        since_s, silent_s = now_s - self.short_since_s, now_s - self.heard_s
        seen = f"{format_bytes(short.left_bytes)} {short.where}, the floor is {format_bytes(short.floor_bytes)}"
        if silent_s > self.silence_s:
            return f"{seen}, and it has not answered for {silent_s:.1f} s"
        if since_s > self.patience_s:
            return f"{seen}, and it has freed nothing for {since_s:.1f} s"
        return None


def main() -> int:
    """Guard the process whose number is the argument, which is the parent."""
    loader = int(sys.argv[1])
    _lock_memory()
    try:
        handle = os.pidfd_open(loader)
    except OSError:
        return 0
    warden, floors = Warden(), dict[str, int]()
    with MemoryProbe() as probe:
        for said in _heard(handle, loader):
            now_s = time.monotonic()
            for line in said:
                warden.heard(now_s)
                if line:
                    floors = json.loads(line)
            reason = warden.verdict(now_s, shortage(probe.sample(), floors)) if floors else None
            if reason is not None:
                return _end(handle, loader, reason)
    return 0


def _heard(handle: int, loader: int) -> Iterator[list[bytes]]:
    """The lines that the loader sent since the last tick; ends when the loader does."""
    pending = b""
    while os.getppid() == loader:
        ready, _, _ = select.select([sys.stdin, handle], [], [], _TICK_S)
        if handle in ready:
            return
        if sys.stdin in ready:
            data = os.read(sys.stdin.fileno(), 1 << 16)
            *lines, pending = (pending + data).split(b"\n")
            if not data:
                return
            yield lines
            time.sleep(_TICK_S)
        else:
            yield []


def _end(handle: int, loader: int, reason: str, grace_s: float = 1.0) -> int:
    print(f"umem guard: ending process {loader} (SIGTERM): {reason}", file=sys.stderr, flush=True)  # noqa: T201
    for number in (signal.SIGTERM, signal.SIGCONT):  # a stopped process takes the one when it gets the other
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, number)
    if not select.select([handle], [], [], grace_s)[0]:
        print(f"umem guard: it did not end within {grace_s:.0f} s: SIGKILL", file=sys.stderr, flush=True)  # noqa: T201
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    return 1


def _lock_memory() -> None:
    """Keep the guard's pages in memory, where that is permitted: it must run when nothing else does."""
    ctypes.CDLL(None).mlockall(_LOCK_ALL)


if __name__ == "__main__":
    sys.exit(main())
