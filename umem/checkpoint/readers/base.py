"""The contract of readers.

A reader opens a shard for one thread; its handle fills given buffers with consecutive bytes of the file, whole or not
at all. What it does about short reads, interrupts, alignment and the end of the file is its own business; what its
caller sees is full buffers or a typed error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from umem.checkpoint.entries import Shard
from umem.checkpoint.pages import fault_in
from umem.errors import CheckpointError, ReadError, TruncatedFileError

__all__ = [
    "BEHIND_URLS",
    "COPYING",
    "DISTANT",
    "WAITING",
    "CancellableHandle",
    "Pace",
    "ReadHandle",
    "Reader",
    "address_of",
    "ended_early",
    "move_bytes",
    "open_shard",
    "read_failed",
    "why_not_at_first_read",
]

#: Why a reader of local files cannot read others.
BEHIND_URLS = "they are behind URLs"


class Pace(NamedTuple):
    """How many threads read well, and how many bytes each at a time; fewer of both where the window is small."""

    threads: int
    block_bytes: int


#: Of a reader that spends its time copying out of the page cache: a thread a core, and few of them use up the memory's
#: bandwidth.
COPYING = Pace(min(4, max(2, os.cpu_count() or 2)), 8 << 20)

#: Of one that waits for a drive: much in flight, in pieces so small that none waits while another thread copies or has
#: the interpreter; with what staging them may take they fill the default window. Measured on two cores, cold, 4 GiB,
#: medians of 7 to 9 interleaved runs: 2.41 and 2.56 s, against 2.71 and 2.71 with 16 threads of 2 MiB, 2.62 with 8 of
#: 4 MiB, 2.70 with 12 of 4 MiB, 2.89 with 4 of 8 MiB; 16 of 8 MiB, for which the window is too small, 2.52.
WAITING = Pace(16, 3 << 20)

#: Of one that waits for replies from afar.
DISTANT = Pace(16, 8 << 20)

#: Below this, giving the lock back costs more than the copy.
_LOCKED_BYTES = 16 * 1024


class ReadHandle(Protocol):
    """A shard, opened for one thread."""

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill `buffers` with the bytes of the file from `offset` on.

        Raises
        ------
        TruncatedFileError
            The file ends first.
        ReadError
            The system could not read.
        """

    def close(self) -> None:
        """Close the file."""


@runtime_checkable
class CancellableHandle(ReadHandle, Protocol):
    """A handle whose reads may wait for long."""

    def cancel(self) -> None:
        """From any thread: the read that waits, and all later ones, end soon, with an error."""


class Reader(Protocol):
    """Opens shards.

    Attributes
    ----------
    name
        How a user asks for it.
    holds_copy
        Whether a read takes as much room again elsewhere until it ends: in the page cache, or for a reply held whole.
    pace
        How it reads well, unless the settings say otherwise.
    """

    name: str
    holds_copy: bool
    pace: Pace

    def open(self, shard: Shard, block_bytes: int) -> contextlib.AbstractContextManager[ReadHandle]:
        """The shard, opened for reads of at most `block_bytes`.

        Raises
        ------
        ChangedFileError, TruncatedFileError
            It is no longer the file that was planned. Behind URLs, this and the next come with the first read.
        ReadError
            It cannot be opened.
        """

    def alignment(self, shard: Shard) -> int:
        """Memory whose address is congruent to the file offset, modulo this many bytes, is filled without a copy."""

    def why_not(self, shard: Shard) -> str | None:
        """Why it cannot read this shard, for people; None if it can."""


def open_shard(shard: Shard, flags: int = 0) -> int:
    """A descriptor of the shard, which is still the file whose header was read; raises as `Reader.open`."""
    try:
        descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError as error:
        raise ReadError(f"cannot be opened: {error.strerror}", path=shard.path) from error
    try:
        shard.check_unchanged(os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def address_of(buffer: memoryview) -> int:
    """The address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def move_bytes(destination: memoryview, source: memoryview) -> None:
    """Copy bytes between buffers of one length; large ones without holding the interpreter's lock."""
    if destination.nbytes < _LOCKED_BYTES:
        destination[:] = source
    else:
        fault_in(address_of(destination), destination.nbytes)
        ctypes.memmove(address_of(destination), address_of(source), destination.nbytes)


def read_failed(path: str, offset: int, error: OSError) -> ReadError:
    """The error for a system call that failed."""
    return ReadError(f"reading at byte {offset} failed: {error.strerror}", path=path)


def why_not_at_first_read(reader: Reader, shard: Shard, block_bytes: int, refusal: str) -> str | None:
    """Why the reader cannot read this shard, which the system says at open or only at the first read; None if it can.

    `refusal` says what is refused; what the system said follows it in brackets.
    """
    if shard.is_remote:
        return BEHIND_URLS
    try:
        with reader.open(shard, block_bytes) as handle:
            handle.fill(0, [memoryview(bytearray(min(1, shard.size_bytes)))])
    except CheckpointError as error:
        cause = error.__cause__
        return f"{refusal} ({cause.strerror if isinstance(cause, OSError) else error})"
    return None


def ended_early(path: str, offset: int) -> TruncatedFileError:
    """The error for a file that gave no more bytes."""
    return TruncatedFileError(f"the file ended at byte {offset} while it was read; it was cut short", path=path)
