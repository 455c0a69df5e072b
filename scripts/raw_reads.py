"""The plain read that loads are held against: the files' bytes into anonymous memory in 4 KiB pages, by some threads.

It is no loader: nothing is parsed. Memory is fresh, so that its first touch counts, or touched before. O_DIRECT reads
go straight into it, since it is congruent to the files modulo the page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20


class RawRead(NamedTuple):
    """How to read.

    Attributes
    ----------
    direct
        Past the page cache (O_DIRECT).
    threads
        How many read, each the next block that no other has.
    block_bytes
        The size of one read; a multiple of a page.
    touched
        The memory has been written to before.
    """

    direct: bool
    threads: int
    block_bytes: int
    touched: bool = False

    @property
    def label(self) -> str:
        """As `direct 2x8M`."""
        return f"{'direct' if self.direct else 'buffered'} {self.threads}x{self.block_bytes // MIB}M"


CONFIGURATIONS = tuple(
    RawRead(direct, threads, block * MIB)
    for direct in (False, True)
    for threads in ((1, 2, 4, 8, 16) if direct else (1, 2, 4))
    for block in ((2, 4) if threads > 4 else (1, 4, 8, 16))
)


class _Piece(NamedTuple):
    path: Path
    offset: int
    memory: memoryview
    expected_bytes: int


def prepared_raw(read: RawRead, files: Sequence[Path], most_bytes: int | None = None) -> Callable[[], list[mmap.mmap]]:
    """A function that reads the files, or the first `most_bytes` of them, and gives the memory.

    Raises
    ------
    OSError
        When called: the file system refuses, or a file ends early.
    """
    sizes = _sizes(files, most_bytes)

    def load(memory: list[mmap.mmap] | None = None) -> list[mmap.mmap]:
        memory = memory or [_pages(size) for size in sizes.values()]
        _read_all(read, _pieces(sizes, memory, read.block_bytes))
        return memory

    if not read.touched:
        return load
    memory = [_pages(size) for size in sizes.values()]
    for pages in memory:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(pages)), 1, len(pages))
    return lambda: load(memory)


def _sizes(files: Sequence[Path], most_bytes: int | None) -> dict[Path, int]:
    sizes, left = {}, most_bytes
    for path in files:
        size = path.stat().st_size
        sizes[path] = size if left is None else min(size, left // mmap.PAGESIZE * mmap.PAGESIZE)
        left = None if left is None else left - sizes[path]
    return {path: size for path, size in sizes.items() if size}


def _pages(size: int) -> mmap.mmap:
    whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return pages


def _pieces(sizes: dict[Path, int], memory: Sequence[mmap.mmap], block_bytes: int) -> list[_Piece]:
    pieces = []
    for (path, size), pages in zip(sizes.items(), memory, strict=True):
        whole = memoryview(pages)
        for offset in range(0, size, block_bytes):
            expected = min(block_bytes, size - offset)
            pieces.append(_Piece(path, offset, whole[offset : offset + block_bytes], expected))
    return pieces


def _read_all(read: RawRead, pieces: Iterable[_Piece]) -> None:
    waiting, lock = iter(pieces), threading.Lock()
    flags = os.O_RDONLY | (os.O_DIRECT if read.direct else 0)
    errors: list[OSError] = []

    def work() -> None:
        with contextlib.ExitStack() as stack:
            opened: dict[Path, int] = {}
            while not errors:
                with lock:
                    piece = next(waiting, None)
                if piece is None:
                    return
                try:
                    if piece.path not in opened:
                        opened[piece.path] = os.open(piece.path, flags)
                        stack.callback(os.close, opened[piece.path])
                    got = os.preadv(opened[piece.path], [piece.memory], piece.offset)
                except OSError as error:
                    errors.append(error)
                    return
                if got < piece.expected_bytes:
                    errors.append(OSError(f"{piece.path}: {got} of {piece.expected_bytes} bytes at {piece.offset}"))

    threads = [threading.Thread(target=work) for _ in range(read.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
