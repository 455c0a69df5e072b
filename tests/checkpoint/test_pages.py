"""Pages for fresh memory come at once, and memory that has content keeps it."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource

import pytest

from umem.checkpoint.pages import fault_in

MIB = 1 << 20


def address_of(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_what_was_asked_for_is_there_and_nothing_beside() -> None:
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14):
        pytest.skip("the kernel finds pages one by one")
    pages = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    fault_in(address_of(pages) + 4 * MIB + 100, 8 * MIB)
    before = faults()
    ctypes.memset(address_of(pages) + 4 * MIB + 100, 1, 8 * MIB)
    inside = faults() - before
    ctypes.memset(address_of(pages) + 13 * MIB, 1, 3 * MIB)
    outside = faults() - before - inside
    assert inside < 100
    assert outside >= 3 * MIB // mmap.PAGESIZE


def test_content_stays() -> None:
    pages = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages[:] = bytes(range(256)) * (MIB // 256)
    fault_in(address_of(pages), MIB)
    assert pages[:] == bytes(range(256)) * (MIB // 256)


def test_memory_that_cannot_be_written_is_left_alone(tmp_path: os.PathLike[str]) -> None:
    path = os.path.join(tmp_path, "file")
    with open(path, "wb") as file:
        file.write(bytes(MIB))
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), MIB, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    address = address_of(pages)
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(MIB), 1)
    fault_in(address, MIB)
    assert not any(pages[:100])
