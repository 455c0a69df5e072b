"""What copiers are made of.

A *copier* brings blocks to final storage for one pass over the files. Each worker holds a *carrier* of it, which says
where the reader puts the bytes of a block, and delivers them when they are there. An *accelerator* gives a copier what
it needs of one kind of device: registered memory, and *streams*.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from umem.strategies.blocks import Block

__all__ = ["Accelerator", "Carrier", "Copier", "Fence", "Registered", "RegistrationError", "Stream"]


class RegistrationError(Exception):
    """Host memory cannot be registered with the device; the message says who refused and why."""


class Carrier(Protocol):
    """Carries one block at a time; used by one thread."""

    def place(self, block: Block) -> list[memoryview]:
        """Where each byte of the block goes, in file order. Waits until that memory is free."""

    def deliver(self, block: Block) -> None:
        """Take the block, which lies where `place` said, to final storage: now, or before the copier is closed."""


class Copier(Protocol):
    """Brings blocks to final storage.

    Attributes
    ----------
    name, reason
        What it is and why it was chosen, for people.
    carrier_bytes
        The most that a carrier stages in memory of its own.
    """

    name: str
    reason: str
    carrier_bytes: int

    def carrier(self) -> Carrier:
        """A carrier for one worker."""


class Fence(Protocol):
    """A mark in a stream."""

    def synchronize(self) -> None:
        """Wait until everything that was issued before the mark has happened."""


class Stream(Protocol):
    """A queue of work on a device, done in the order of issue, and behind the caller's back."""

    def issue(self, work: Callable[[], None]) -> None:
        """Put the torch operations of `work` into the queue."""

    def fence(self) -> Fence:
        """A mark after everything that was issued so far."""

    def synchronize(self) -> None:
        """Wait until everything that was issued has happened."""


class Registered(NamedTuple):
    """Host memory that a device reads by itself.

    Attributes
    ----------
    memory
        The bytes, writable.
    how
        By whom it was registered, for people.
    """

    memory: memoryview
    how: str


class Accelerator(Protocol):
    """A kind of device."""

    def registered(self, count: int, device: str) -> AbstractContextManager[Registered]:
        """Host memory of exactly `count` bytes, registered with `device` until the exit, which frees it.

        Raises
        ------
        RegistrationError
            The device refuses.
        """

    def staging(self, count: int, device: str) -> torch.Tensor:
        """`count` bytes on the device, flat, whose address is a multiple of 16."""

    def stream(self, device: str) -> Stream:
        """A new stream, behind everything that the calling thread has issued to `device`."""
