"""Where the weights of a model that are offloaded to disk lie: a folder of one load, and a file to write them into.

The folder is a fresh one inside the folder that the user names, and belongs to one load: it is removed when the load
fails, or when nobody needs its weights any more. The file is a safetensors file whose header is written first, mapped
so that writers fill views of it as they would fill memory; `settle` brings what they wrote to the drive and gives its
pages back. Nothing here reads a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable
from typing import NamedTuple

from umem._types import DType, format_bytes
from umem.checkpoint.mounts import file_system_of
from umem.checkpoint.pagecache import evict
from umem.errors import InsufficientSpaceError, SettingsError, UnsupportedError

__all__ = ["OffloadFile", "OffloadFolder", "Weight", "check_space", "settle_file"]

_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_IN_MEMORY = ("tmpfs", "ramfs")


class Weight(NamedTuple):
    """A tensor of an offload file: name, dtype, and shape in storage items."""

    name: str
    dtype: DType
    shape: tuple[int, ...]


def check_space(folder: str, needed_bytes: int) -> None:
    """Return if `folder`, which need not be there yet, has room on a drive; nothing is written.

    Raises
    ------
    InsufficientSpaceError
        The drive has too little free.
    UnsupportedError
        The folder lies in memory, not on a drive.
    SettingsError
        It is no folder.
    """
    place = _nearest_existing(folder)
    if not os.path.isdir(place):
        raise SettingsError(f"the offload folder {folder} is no folder: {place} is a file")
    kind = file_system_of(place)
    if kind in _IN_MEMORY:
        raise UnsupportedError(
            f"the offload folder {folder} lies in memory ({kind}), where weights take what they should spare;"
            " give a folder on a drive"
        )
    free_bytes = shutil.disk_usage(place).free
    if needed_bytes > free_bytes:
        raise InsufficientSpaceError(
            f"the offload folder {folder} needs {format_bytes(needed_bytes)}; {format_bytes(free_bytes)} are free."
            " Nothing was read. Free some space or give a folder on another drive",
            path=folder,
            needed_bytes=needed_bytes,
            available_bytes=free_bytes,
        )


def _nearest_existing(path: str) -> str:
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


class OffloadFolder:
    """A fresh folder of one load inside `parent`, which is made where it is not there.

    Raises
    ------
    SettingsError
        It cannot be made.
    """

    def __init__(self, parent: str) -> None:
        existing = _nearest_existing(parent)
        self._made: list[str] = []
        self._process = os.getpid()
        folder = os.path.abspath(parent)
        while folder != existing:
            self._made.append(folder)
            folder = os.path.dirname(folder)
        try:
            os.makedirs(parent, exist_ok=True)
            self.path = tempfile.mkdtemp(prefix="umem-", dir=os.path.abspath(parent))
        except OSError as error:
            raise SettingsError(f"the offload folder {parent} cannot be used: {error.strerror}") from error

    def remove(self) -> None:
        """Remove the folder with all that is in it, and the parents that were made for it if nothing else is there.

        Only the process that made it does; one that was forked from it leaves it alone.
        """
        if os.getpid() != self._process:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            for folder in self._made:
                os.rmdir(folder)


class OffloadFile:
    """A safetensors file for some weights, allocated whole on the drive and mapped to be written to.

    Attributes
    ----------
    path
        The file.
    memory
        Its bytes.

    Raises
    ------
    InsufficientSpaceError
        The drive has too little free.
    """

    def __init__(self, path: str, weights: Iterable[Weight]) -> None:
        self.path = path
        header, self._starts, size = _layout(weights)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _allocate(self._descriptor, path, size)
            os.pwrite(self._descriptor, header, 0)
            self.memory = mmap.mmap(self._descriptor, size)
            self.memory.madvise(mmap.MADV_RANDOM)  # or the first write to a page reads pages around it
        except BaseException:
            os.close(self._descriptor)
            raise

    def start_of(self, name: str) -> int:
        """Where a weight's first byte lies in `memory`."""
        return self._starts[name]

    def settle(self) -> None:
        """Write to the drive what was written to `memory`, and give its pages back."""
        os.fdatasync(self._descriptor)
        self.memory.madvise(mmap.MADV_DONTNEED)  # pages that are mapped cannot be evicted
        evict(self._descriptor)

    def close(self) -> None:
        """Let go of the file; the mapping lives as long as views of it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def settle_file(path: str) -> None:
    """Write a file's pages to the drive and give them back."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(descriptor)
        evict(descriptor)
    finally:
        os.close(descriptor)


def _layout(weights: Iterable[Weight]) -> tuple[bytes, dict[str, int], int]:
    """The header, where each weight starts, and the size of the file. The tensors begin on a page."""
    ordered = sorted(weights, key=lambda weight: -weight.dtype.itemsize)  # so that all lie aligned, without holes
    declared: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for weight in ordered:
        start = end
        dtype, shape = _declaration(weight)
        end = start + weight.dtype.itemsize * math.prod(weight.shape)
        declared[weight.name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        offsets[weight.name] = start
    text = json.dumps(declared, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE_BYTES)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in offsets.items()}, len(header) + end


def _declaration(weight: Weight) -> tuple[str, list[int]]:
    """Dtype and shape as the format declares them: F4 counts elements, what torch has no dtype for is bytes."""
    if weight.dtype is DType.F4:
        return weight.dtype.label, [*weight.shape[:-1], 2 * weight.shape[-1]]
    return (weight.dtype if weight.dtype.torch_name else DType.U8).label, list(weight.shape)


def _allocate(descriptor: int, path: str, size: int) -> None:
    """Take the space now: a page of a mapping that finds no space when it is written kills the process."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise InsufficientSpaceError(
            f"{path} needs {format_bytes(size)}, and the drive does not give them: {error.strerror}. Nothing was read."
            " Free some space or give a folder on another drive",
            path=path,
            needed_bytes=size,
            available_bytes=shutil.disk_usage(os.path.dirname(path)).free,
        ) from error
