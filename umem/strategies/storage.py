"""Final storage: where a target's elements will live, allocated without being written and freed when its tensor dies.

On the processor large targets get pages of their own (anonymous memory), so that each is returned to the system by
itself; small ones come from torch's allocator. Whether huge pages pay is decided by a short trial on the machine:
they made first touch 2.5 times slower on one virtual machine and usually help on bare metal. Devices get torch's
memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import time
from typing import NamedTuple

import torch

from umem._types import DType
from umem.planning.targets import Target
from umem.planning.views import View, carried
from umem.probes.memory import free_in_blocks_of

__all__ = ["Destination", "allocate", "destination_of", "huge_pages_pay", "raw_dtype", "torch_dtype"]

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


class Destination(NamedTuple):
    """A target's storage during a load.

    Attributes
    ----------
    target
        What it is for.
    tensor
        The storage, without gradient history.
    memory
        Its bytes, where the processor can write them and they lie in row-major order; else None.
    """

    target: Target
    tensor: torch.Tensor
    memory: memoryview | None

    def pair(self, source: View, view: View, *, raw: bool) -> tuple[View, torch.Tensor]:
        """The part of the storage that `view` describes, and `source` in the same shape.

        `raw` gives items without meaning, to move bytes.
        """
        base = self.tensor.view(raw_dtype(self.tensor.element_size())) if raw else self.tensor
        source, placed = carried(source, view, View.whole(base.shape, base.stride()))
        return source, base.as_strided(placed.shape, placed.strides, base.storage_offset() + placed.offset)


def allocate(target: Target, *, huge_pages: bool | None) -> torch.Tensor:
    """Uninitialised storage for `target` on its device.

    `huge_pages` asks for them, or against them; None leaves it to the system.
    """
    dtype = torch_dtype(target.dtype)
    if target.device != "cpu" or target.nbytes < _OWN_PAGES_BYTES:
        return torch.empty(target.shape, dtype=dtype, device=target.device)
    return torch.frombuffer(_pages(target.nbytes, huge=huge_pages), dtype=dtype).view(target.shape)


def destination_of(target: Target, tensor: torch.Tensor) -> Destination:
    """The destination that writes into `tensor`."""
    tensor = tensor.detach()
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() == 0:
        return Destination(target, tensor, None)
    count = tensor.numel() * tensor.element_size()
    return Destination(target, tensor, memoryview((ctypes.c_char * count).from_address(tensor.data_ptr())).cast("B"))


def huge_pages_pay(total_bytes: int) -> bool | None:
    """Whether to ask for huge pages for `total_bytes` of final storage; None for a load too small to matter.

    They must be free in one piece each, since compacting memory costs more than they gain, and win a trial.
    """
    if total_bytes < _TRIAL_FROM_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    return (free_in_blocks_of(_HUGE_PAGE_BYTES) or 0) > total_bytes and _trial()


@functools.cache
def _trial() -> bool:
    """First touch of fresh memory with and without huge pages, in turn; the best of each is compared."""
    seconds: dict[bool, float] = {}
    for huge in (False, True) * _TRIALS:
        pages = _pages(_TRIAL_BYTES, huge=huge)
        started = time.perf_counter()
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(pages)), 0, _TRIAL_BYTES)
        spent = time.perf_counter() - started
        seconds[huge] = min(spent, seconds.get(huge, spent))
    return seconds[True] < _MUST_GAIN * seconds[False]


def _pages(count: int, *, huge: bool | None) -> mmap.mmap:
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge is not None:
        pages.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return pages
