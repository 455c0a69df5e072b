"""What loads that run at the same time will still take, so that two of them do not count the same free memory.

One file a load, in a directory of the user's own, held under an exclusive lock (flock) for as long as the load runs.
The lock ends with its process, so a crash leaves no claim behind; forked children inherit it, so the process and its
start time are checked too. Claims are advisory: where the directory cannot be made or written, or another user's loads
run beside, nothing is known of them and no load fails for it. Other programs' needs are not covered.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

__all__ = ["Claim", "Reservation", "Reservations", "runtime_directory"]

_RECORD_BYTES = 1024
_PATIENCE_S = 5.0
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one or several loads will still take.

    Attributes
    ----------
    memory_bytes
        Of the system's memory.
    group
        The control group that limits the load, by its directory; None without a limit.
    device_bytes
        Of devices with memory of their own, by the device's number.
    loads
        The number of loads.
    """

    memory_bytes: int = 0
    group: str | None = None
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    loads: int = 1


class Reservation:
    """One load's claim, while it runs. It shrinks as the load takes what it claimed, and ends with `release`."""

    def __init__(self, descriptor: int, path: str, claim: Claim) -> None:
        self._descriptor: int | None = descriptor
        self._path = path
        self._write(claim)

    def shrink(self, claim: Claim) -> None:
        """Claim `claim` from now on."""
        with contextlib.suppress(OSError):
            self._write(claim)

    def release(self) -> None:
        """Claim nothing any more."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(self._descriptor)
        self._descriptor = None

    def _write(self, claim: Claim) -> None:
        if self._descriptor is None:
            return
        pid = os.getpid()
        record = {
            "pid": pid,
            "started": _start_time(pid),
            "pid_namespace": _pid_namespace(),
            "memory_bytes": claim.memory_bytes,
            "group": claim.group,
            "device_bytes": dict(claim.device_bytes),
        }
        # One write of a fixed length, so that a reader never sees half of a new record and half of an old one.
        os.pwrite(self._descriptor, json.dumps(record).encode().ljust(_RECORD_BYTES), 0)


class Reservations:
    """The claims of this user's loads.

    Parameters
    ----------
    directory
        Where they are kept; None: nowhere, and nothing is known of others.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @classmethod
    def of_this_user(cls) -> Self:
        """Those in the user's runtime directory."""
        return cls(runtime_directory())

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Between reading the others' claims and making one's own, no other load does either."""
        descriptor = self._open("lock", os.O_RDWR | os.O_CREAT)
        try:
            if descriptor is not None:
                _lock_patiently(descriptor)
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def others(self) -> list[Claim]:
        """The claims of loads that run now; what dead ones left is removed."""
        if self._directory is None:
            return []
        try:
            names = sorted(name for name in os.listdir(self._directory) if name.endswith(".json"))
        except OSError:
            return []
        claims = [self._read(str(self._directory / name)) for name in names]
        return [claim for claim in claims if claim is not None]

    def reserve(self, claim: Claim) -> Reservation | None:
        """Make a claim; None where there is no place for it."""
        name = f"{os.getpid()}-{next(_numbers)}"
        descriptor = self._open(f"{name}.new", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if descriptor is None or self._directory is None:
            return None
        path = str(self._directory / f"{name}.json")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            reservation = Reservation(descriptor, path, claim)
            os.rename(self._directory / f"{name}.new", path)  # seen only when it is whole and locked
        except OSError:
            os.close(descriptor)
            return None
        return reservation

    def _open(self, name: str, flags: int) -> int | None:
        if self._directory is None:
            return None
        try:
            return os.open(self._directory / name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None

    def _read(self, path: str) -> Claim | None:
        """The claim in a file whose load runs; None, and the file removed, where it does not."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if _is_locked(descriptor):
                record = json.loads(os.pread(descriptor, _RECORD_BYTES, 0))
                if _is_alive(record):
                    return Claim(
                        memory_bytes=int(record["memory_bytes"]),
                        group=record["group"],
                        device_bytes={str(name): int(count) for name, count in record["device_bytes"].items()},
                    )
            os.unlink(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        finally:
            os.close(descriptor)
        return None


def _lock_patiently(descriptor: int) -> None:
    """Take the lock, or go on without it when its holder seems to have been stopped."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            return
        else:
            return


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_alive(record: Mapping[str, Any]) -> bool:
    """Whether the process that wrote it still runs; of one in another namespace only the lock can tell."""
    if record["pid_namespace"] != _pid_namespace():
        return True
    started = record["started"]
    return started is None or _start_time(int(record["pid"])) == started


def _start_time(pid: int) -> int | None:
    """When a process started, in ticks since boot: with it a process number means one process only."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def runtime_directory() -> Path | None:
    """`umem` in the user's runtime directory, else in the directory for temporary files; made where it is not there.

    None where neither can be, or where the place belongs to somebody else.
    """
    user = os.getuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}"
    for place in (Path(runtime) / "umem", Path(tempfile.gettempdir()) / f"umem-{user}"):
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            status = place.lstat()
        except OSError:
            continue
        if stat.S_ISDIR(status.st_mode) and status.st_uid == user and not status.st_mode & 0o022:
            return place
    return None
