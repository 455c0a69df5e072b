"""Final storage: where a target's elements will live, allocated without being written and freed when its tensor dies.

On the processor large targets get pages of their own (anonymous memory), so that each is returned to the system by
itself, and small ones share pages (`arenas`). Devices get torch's memory; on disk it is a part of a mapped file.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from umem._types import DType
from umem.checkpoint.pages import give_back
from umem.checkpoint.readers.base import address_of
from umem.planning.targets import Target
from umem.planning.views import Pairing, View, carried, contiguous_strides
from umem.probes.memory import free_in_blocks_of, is_virtual_machine
from umem.strategies.arenas import Arena

__all__ = [
    "Destination",
    "Span",
    "allocate",
    "allocate_arena",
    "destination_of",
    "discard",
    "has_own_pages",
    "huge_pages_pay",
    "in_file",
    "raw_dtype",
    "shares_pages",
    "torch_dtype",
]

_OWN_PAGES_BYTES = 1 << 20
_HUGE_PAGE_BYTES = 2 << 20
_TRIAL_BYTES = 8 << 20
_TRIAL_FROM_BYTES = 256 << 20
_TRIALS = 3
_MUST_GAIN = 0.9

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def torch_dtype(dtype: DType) -> torch.dtype:
    """Torch's dtype for a stored one; dtypes that torch lacks are bytes."""
    named: torch.dtype = torch.uint8 if dtype.torch_name is None else getattr(torch, dtype.torch_name)
    return named


def raw_dtype(itemsize: int) -> torch.dtype:
    """A dtype of that item size for moving bytes unchanged."""
    return _RAW[itemsize]


class Span(NamedTuple):
    """Bytes [start, end) of memory that the processor can write."""

    memory: memoryview
    start: int
    end: int

    @property
    def bytes(self) -> memoryview:
        """The bytes themselves."""
        return self.memory[self.start : self.end]

    def part(self, start: int, end: int) -> Span:
        """Bytes [start, end) of it."""
        return Span(self.memory, self.start + start, self.start + end)

    def meets(self, following: Span) -> bool:
        """Whether `following` begins where it ends."""
        return self.end == following.start and self.memory is following.memory


class Destination(NamedTuple):
    """A target's storage during a load.

    Attributes
    ----------
    target
        What it is for.
    tensor
        The storage, without gradient history.
    span
        Its bytes, where the processor can write them and they lie in row-major order; else None.
    """

    target: Target
    tensor: torch.Tensor
    span: Span | None

    @property
    def storage_view(self) -> View:
        """Where the target's elements lie, in its shape."""
        shape = tuple(self.tensor.shape)
        strides = contiguous_strides(shape) if self.tensor.is_contiguous() else self.tensor.stride()
        return View(int(self.tensor.storage_offset()), shape, strides)

    def placed(self, pairing: Pairing) -> Pairing:
        """A pairing with a view of the target in row-major order, carried over to how the storage lies in memory."""
        return carried(pairing, self.storage_view)

    def region(self, view: View, *, raw: bool) -> torch.Tensor:
        """The items of the storage that a placed view describes; `raw` gives them without meaning, to move bytes."""
        base = self.tensor.view(raw_dtype(self.tensor.element_size())) if raw else self.tensor
        return base.as_strided(view.shape, view.strides, view.offset)


def allocate(target: Target, *, huge_pages: bool | None, residue: int = 0) -> torch.Tensor:
    """Uninitialised storage for `target` on its device.

    Parameters
    ----------
    huge_pages
        Asks for them, or against them; None leaves it to the system.
    residue
        Bytes by which the first element lies off the start of a page, where the storage has pages of its own: memory
        that is congruent to its place in the file can be read into without a copy.
    """
    if not has_own_pages(target):
        return torch.empty(target.shape, dtype=torch_dtype(target.dtype), device=target.device)
    return _tensor(_pages(target.nbytes + residue, huge=huge_pages), target, residue)


def allocate_arena(arena: Arena, *, huge_pages: bool | None) -> Iterator[Destination]:
    """Uninitialised storage for the targets of an arena; none is empty. Arguments as for `allocate`."""
    pages = _pages(arena.nbytes, huge=huge_pages)
    memory = memoryview(pages)
    for target, start, end in arena.places:
        yield Destination(target, _tensor(pages, target, start), Span(memory, start, end))


def _tensor(pages: mmap.mmap, target: Target, start: int) -> torch.Tensor:
    """The target's tensor from byte `start` of pages, which live as long as it does."""
    dtype = torch_dtype(target.dtype)
    return torch.frombuffer(pages, dtype=dtype, count=target.items, offset=start).view(target.shape)


def has_own_pages(target: Target) -> bool:
    """Whether `allocate` gives the target pages of its own."""
    return target.device == "cpu" and target.nbytes >= _OWN_PAGES_BYTES


def shares_pages(target: Target) -> bool:
    """Whether the target belongs into an arena."""
    return target.device == "cpu" and 0 < target.nbytes < _OWN_PAGES_BYTES


def discard(memory: memoryview) -> None:
    """Give back the pages of a destination's memory that was allocated here, also while others still write to it.

    What was in it is lost; writing goes on into fresh pages. Nothing where the system has no such call.
    """
    give_back(address_of(memory), memory.nbytes)


def destination_of(target: Target, tensor: torch.Tensor) -> Destination:
    """The destination that writes into `tensor`."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        return Destination(target, tensor, None)
    count = tensor.numel() * tensor.element_size()
    memory = memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B")
    return Destination(target, tensor, Span(memory, 0, count))


def in_file(target: Target, memory: mmap.mmap, start: int) -> Destination:
    """The destination for `target` in a mapped file, from byte `start`: the processor writes it.

    Readers do not read into it, since a file that is read past the page cache cannot be read into another's pages
    everywhere: what goes there is staged.
    """
    target = target._replace(device="cpu")
    if not target.nbytes:
        return Destination(target, torch.empty(target.shape, dtype=torch_dtype(target.dtype)), None)
    return Destination(target, _tensor(memory, target, start), None)


def huge_pages_pay(total_bytes: int) -> bool | None:
    """Whether to ask for huge pages for `total_bytes` of final storage; None for a load too small to matter.

    They must be free in one piece each, since compacting memory costs more than they gain, and win a trial. In a
    virtual machine they are not asked for: the host backs them page by page when they are first touched, and after
    some that go well the rest is several times slower than small pages, which no short trial shows.
    """
    if total_bytes < _TRIAL_FROM_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    if is_virtual_machine() or (free_in_blocks_of(_HUGE_PAGE_BYTES) or 0) < total_bytes:
        return False
    return _trial()


@functools.cache
def _trial() -> bool:
    """First touch of fresh memory with and without huge pages, in turn; the worst of each is compared."""
    seconds: dict[bool, float] = {False: 0.0, True: 0.0}
    touched = []
    for huge in (False, True) * _TRIALS:
        touched.append(_pages(_TRIAL_BYTES, huge=huge))  # kept, or the next trial would find its pages warm
        started = time.perf_counter()
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(touched[-1])), 0, _TRIAL_BYTES)
        seconds[huge] = max(seconds[huge], time.perf_counter() - started)
    return seconds[True] < _MUST_GAIN * seconds[False]


def _pages(count: int, *, huge: bool | None) -> mmap.mmap:
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge is not None:
        pages.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return pages
