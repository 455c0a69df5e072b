"""torch's zip files (`.bin`, `.pt`, `.pth`), read as entries without executing anything and without torch.

`torch.save` writes a zip archive whose members are stored uncompressed: `data.pkl` describes the tensors,
`data/<key>` holds each storage. The pickle is run by an unpickler that knows the few names a state dict needs and
refuses all others, so a file cannot run code. Nested dictionaries give dotted names; values that are no tensors are
left out.

Not here: the format before zip archives, TorchScript archives with compressed members, sparse and quantized tensors.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any, NamedTuple

from umem._types import DType
from umem.checkpoint.entries import Entry
from umem.checkpoint.safetensors import ShardContents
from umem.checkpoint.stores import StoredFile
from umem.errors import (
    CheckpointFormatError,
    CompressedTensorError,
    HeaderSyntaxError,
    LegacyPickleError,
    LfsPointerError,
    TensorExtentError,
    TruncatedFileError,
    UnknownDTypeError,
    UnsafePickleError,
)

__all__ = ["read_torch_zip"]

_ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_MAX_PICKLE_BYTES = 1 << 30
_ARCHIVE_READ_BYTES = 128 * 1024

_STORAGE_DTYPES = {
    "DoubleStorage": DType.F64,
    "FloatStorage": DType.F32,
    "HalfStorage": DType.F16,
    "BFloat16Storage": DType.BF16,
    "LongStorage": DType.I64,
    "IntStorage": DType.I32,
    "ShortStorage": DType.I16,
    "CharStorage": DType.I8,
    "ByteStorage": DType.U8,
    "BoolStorage": DType.BOOL,
    "ComplexFloatStorage": DType.C64,
    "ComplexDoubleStorage": DType.C128,
    "UntypedStorage": DType.U8,
}


class _Storage(NamedTuple):
    key: str
    dtype: DType


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def read_torch_zip(file: StoredFile, shard_index: int) -> ShardContents:
    """The entries of a torch zip file; they refer to it as shard `shard_index`.

    Raises
    ------
    LegacyPickleError
        The file is of the older format.
    UnsafePickleError
        The pickle names something that a state dict does not need.
    CheckpointFormatError
        Another leaf of it, for archives that are damaged or hold compressed tensors.
    """
    path = file.path
    _check_magic(file.read(0, 24), path)
    try:
        with zipfile.ZipFile(io.BufferedReader(_Seekable(file), _ARCHIVE_READ_BYTES)) as archive:
            tensors = _unpickled(archive, path)
            entries = list(_entries(tensors, archive, file, shard_index))
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise TruncatedFileError(f"no whole zip archive ({error}); download the file again", path=path) from None
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    return ShardContents(file.shard, entries, {"format": "pt"})


class _Seekable(io.RawIOBase):
    """A stored file as Python's archive reader wants it."""

    def __init__(self, file: StoredFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.shard.size_bytes}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        part = self._file.read(self._position, len(buffer))
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)


def _check_magic(head: bytes, path: str) -> None:
    if head.startswith(_ZIP_MAGIC):
        return
    if head.startswith(b"version https://git-lfs"):
        raise LfsPointerError(
            "this is a Git LFS pointer, not the weights; run `git lfs pull`, or download the file itself", path=path
        )
    if head[:1] == b"\x80":
        name = os.path.basename(path)
        raise LegacyPickleError(
            "a torch file of the format before zip archives cannot be read in place; rewrite it once with"
            f" `import torch; torch.save(torch.load({name!r}, weights_only=True), {name!r})`",
            path=path,
        )
    raise HeaderSyntaxError("neither a zip archive of torch nor a safetensors file; download it again", path=path)


class _StateDictUnpickler(pickle.Unpickler):
    """Runs a pickle in which the only things that can be named are the parts of a state dict."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], object] = {
            ("collections", "OrderedDict"): OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
            ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor_of_dtype,
            ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
            ("torch", "Size"): tuple,
        }
        if (module, name) in known:
            return known[module, name]
        if module in ("torch", "torch.storage") and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if module == "torch":
            try:
                return DType.from_torch(name)
            except ValueError:
                pass
        raise UnsafePickleError(
            f"the file asks for {module}.{name}, which a state dict does not need; umem runs no code of a checkpoint."
            " Save the state dict alone, best as safetensors",
            path=self._path,
        )

    def persistent_load(self, pid: Any) -> _Storage:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage" and isinstance(pid[1], DType)):
            raise HeaderSyntaxError("its pickle refers to something other than a storage", path=self._path)
        return _Storage(str(pid[2]), pid[1])


def _rebuild_tensor(storage: object, offset: object, shape: object, strides: object, *_ignored: object) -> _Tensor:
    if not isinstance(storage, _Storage) or not isinstance(offset, int):
        raise pickle.UnpicklingError("a tensor without a storage")
    sizes, steps = _sizes(shape), _sizes(strides)
    if len(sizes) != len(steps) or offset < 0:
        raise pickle.UnpicklingError("a tensor with impossible shape, strides or offset")
    return _Tensor(storage, offset, sizes, steps)


def _rebuild_tensor_of_dtype(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    _gradient: object,
    _hooks: object,
    dtype: object,
    *_ignored: object,
) -> _Tensor:
    if not isinstance(storage, _Storage) or not isinstance(dtype, DType):
        raise pickle.UnpicklingError("a tensor without a storage or a dtype")
    return _rebuild_tensor(_Storage(storage.key, dtype), offset, shape, strides)


def _rebuild_parameter(data: object, *_ignored: object) -> object:
    return data


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, tuple) or not all(type(size) is int and size >= 0 for size in value):
        raise pickle.UnpicklingError(f"{value!r} is no tuple of sizes")
    return value


def _unpickled(archive: zipfile.ZipFile, path: str) -> object:
    names = [name for name in archive.namelist() if name.endswith("/data.pkl") or name == "data.pkl"]
    if len(names) != 1:
        raise HeaderSyntaxError("the zip archive has no data.pkl; it was not written by torch.save", path=path)
    prefix = names[0].removesuffix("data.pkl")
    if f"{prefix}byteorder" in archive.namelist() and archive.read(f"{prefix}byteorder") != b"little":
        raise CompressedTensorError(
            "the tensors are in big-endian order; save them on a little-endian machine", path=path
        )
    if archive.getinfo(names[0]).file_size > _MAX_PICKLE_BYTES:
        raise HeaderSyntaxError("data.pkl is larger than any state dict's", path=path)
    try:
        return _StateDictUnpickler(io.BytesIO(archive.read(names[0])), path).load()
    except CheckpointFormatError:
        raise
    except Exception as error:
        raise HeaderSyntaxError(f"data.pkl is damaged ({error}); download the file again", path=path) from error


def _named(value: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, _Tensor]]:
    if isinstance(value, _Tensor):
        yield prefix, value
    elif isinstance(value, dict) and depth < 16:
        for key, item in value.items():
            if isinstance(key, str | int):
                yield from _named(item, f"{prefix}.{key}" if prefix else str(key), depth + 1)


def _entries(root: object, archive: zipfile.ZipFile, file: StoredFile, shard_index: int) -> Iterator[Entry]:
    path = file.path
    if not isinstance(root, dict):
        raise HeaderSyntaxError("the file holds no dictionary of tensors; save model.state_dict()", path=path)
    tensors = list(_named(root))
    ranges = _member_ranges(archive, file, {tensor.storage.key for _, tensor in tensors})
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise HeaderSyntaxError(
                "two tensors flatten to this name; save the inner state dict alone", path=path, tensor=name
            )
        seen.add(name)
        start, length = ranges(tensor.storage.key, name)
        itemsize = tensor.storage.dtype.itemsize
        if tensor.storage.dtype.torch_name is None:
            raise UnknownDTypeError("its dtype cannot be mapped", path=path, tensor=name)
        contiguous = _contiguous_strides(tensor.shape)
        items = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))
        if 0 in tensor.shape:
            items = 0
        if (tensor.offset + items) * itemsize > length:
            raise TensorExtentError("it reaches beyond its storage; download the file again", path=path, tensor=name)
        is_contiguous = all(
            size == 1 or step == plain
            for size, step, plain in zip(tensor.shape, tensor.strides, contiguous, strict=True)
        )
        yield Entry(
            name,
            shard_index,
            start + tensor.offset * itemsize,
            items * itemsize,
            tensor.storage.dtype,
            tensor.shape,
            None if is_contiguous or items == 0 else tensor.strides,
        )


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, shape[dim + 1])
    return tuple(strides)


def _member_ranges(
    archive: zipfile.ZipFile, file: StoredFile, keys: Collection[str]
) -> Callable[[str, str], tuple[int, int]]:
    """A look-up of a storage key's byte range, after the member's local header."""
    members = {info.filename.split("/")[-1]: info for info in archive.infolist() if "/data/" in f"/{info.filename}"}
    wanted = [key for key in keys if key in members]
    headers = file.read_each([members[key].header_offset for key in wanted], _LOCAL_HEADER_BYTES)
    header_of = dict(zip(wanted, headers, strict=True))

    def find(key: str, tensor: str) -> tuple[int, int]:
        info = members.get(key)
        if info is None:
            raise TensorExtentError(
                f"its storage {key!r} is not in the archive; download the file again", path=file.path, tensor=tensor
            )
        if info.compress_type != zipfile.ZIP_STORED:
            raise CompressedTensorError(
                "its storage is compressed; save it again with torch.save", path=file.path, tensor=tensor
            )
        header = header_of[key]
        if len(header) < _LOCAL_HEADER_BYTES or not header.startswith(_ZIP_MAGIC):
            raise TruncatedFileError(
                "the zip archive is damaged; download the file again", path=file.path, tensor=tensor
            )
        start = info.header_offset + _LOCAL_HEADER_BYTES
        start += int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        return start, info.file_size

    return find
