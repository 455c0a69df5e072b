"""The header of a safetensors file, read and checked without torch and without touching tensor bytes.

Follows the format as safetensors 0.8 enforces it (https://github.com/huggingface/safetensors, section "Format"): eight
bytes of little-endian header length, a JSON object, then tensor data that the tensors cover without overlap or hole.
Stricter than the library in one point: duplicate keys are refused. Sharded checkpoints are `source`'s business.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from umem._types import DType
from umem.checkpoint._json import parse_strict
from umem.checkpoint.entries import Entry, Shard
from umem.checkpoint.stores import StoredFile
from umem.errors import (
    CheckpointFormatError,
    HeaderSyntaxError,
    HeaderTooLongError,
    LfsPointerError,
    MetadataError,
    TensorExtentError,
    TensorHoleError,
    TensorOverlapError,
    TensorSizeError,
    TruncatedFileError,
    UnknownDTypeError,
)

__all__ = ["MAX_HEADER_BYTES", "ShardContents", "read_safetensors"]

#: The format's own limit.
MAX_HEADER_BYTES = 100_000_000

_LFS_MAGIC = b"version https://git-lfs"
_DTYPES = {dtype.label: dtype for dtype in DType if dtype is not DType.C128}
_LARGEST = 1 << 63


class ShardContents(NamedTuple):
    """One file's identity, its entries in file order, and its metadata."""

    shard: Shard
    entries: list[Entry]
    metadata: dict[str, str]


def read_safetensors(file: StoredFile, shard_index: int) -> ShardContents:
    """The entries of a safetensors file; they refer to it as shard `shard_index`.

    Raises
    ------
    CheckpointFormatError
        One of its leaves, naming the file, the tensor and the cure.
    """
    path, size_bytes = file.path, file.shard.size_bytes
    head = file.read(0, max(8, len(_LFS_MAGIC)))
    if head.startswith(_LFS_MAGIC):
        raise LfsPointerError(
            "this is a Git LFS pointer, not the weights; run `git lfs pull`, or download the file itself", path=path
        )
    length = _header_length(head, size_bytes, path)
    raw = file.read(8, length)
    if len(raw) < length:
        raise TruncatedFileError("the file ended inside its header; download it again", path=path)
    declared = parse_strict(raw, path=path, what="the header")
    if not isinstance(declared, dict):
        raise HeaderSyntaxError("the header is no JSON object; the file is damaged or of another format", path=path)
    metadata = _checked_metadata(declared.pop("__metadata__", None), path)
    data_start = 8 + length
    entries = [_entry(name, facts, data_start, shard_index, path) for name, facts in declared.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    _check_layout(entries, data_start, size_bytes, path)
    return ShardContents(file.shard, entries, metadata)


def _header_length(head: bytes, size_bytes: int, path: str) -> int:
    if size_bytes < 8 or len(head) < 8:
        raise TruncatedFileError(f"{size_bytes} bytes are too few for a header; download the file again", path=path)
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise HeaderTooLongError(
            f"the header claims {length} bytes, the format allows {MAX_HEADER_BYTES};"
            " the file is damaged or no safetensors file",
            path=path,
        )
    if 8 + length > size_bytes:
        raise TruncatedFileError(
            f"the header claims {length} bytes, the file has {size_bytes}; download the file again", path=path
        )
    return length


def _checked_metadata(metadata: Any, path: str) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise MetadataError("`__metadata__` maps strings to strings; write the file again", path=path)
    return metadata


def _entry(name: str, facts: Any, data_start: int, shard_index: int, path: str) -> Entry:
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise _refused(HeaderSyntaxError, "the name is no valid Unicode text", name, path) from None
    try:
        label, shape, (begin, end) = facts["dtype"], facts["shape"], facts["data_offsets"]
        dtype = _DTYPES[label]
    except (KeyError, TypeError, ValueError):
        raise _malformed(facts, name, path) from None
    if not (type(shape) is list and type(begin) is int and type(end) is int):
        raise _malformed(facts, name, path)
    if not 0 <= begin <= end < _LARGEST:
        raise _refused(TensorExtentError, f"data_offsets {[begin, end]!r} are no byte range", name, path)
    bits = dtype.bits
    for size in shape:
        if type(size) is not int or size < 0:
            raise _malformed(facts, name, path)
        bits *= size
        if max(bits, size) >= _LARGEST:
            raise _refused(TensorSizeError, f"shape {shape!r} is larger than any file", name, path)
    if bits != 8 * (end - begin):
        takes = f"{dtype.label} {shape!r} takes {bits / 8:g} bytes, its range has {end - begin}"
        raise _refused(TensorSizeError, takes, name, path)
    return Entry(name, shard_index, data_start + begin, end - begin, dtype, dtype.storage_shape(tuple(shape)))


def _malformed(facts: Any, name: str, path: str) -> CheckpointFormatError:
    """Says which of its parts makes the header's description of a tensor none."""
    if not isinstance(facts, dict):
        return _refused(HeaderSyntaxError, "the header describes it by something other than an object", name, path)
    missing = {"dtype", "shape", "data_offsets"} - facts.keys()
    if missing:
        return _refused(HeaderSyntaxError, f"the header lacks its {', '.join(sorted(missing))}", name, path)
    label, shape, offsets = facts["dtype"], facts["shape"], facts["data_offsets"]
    if not isinstance(label, str) or label not in _DTYPES:
        message = f"unknown dtype {label!r}; is there a newer umem? Known: {', '.join(_DTYPES)}"
        return UnknownDTypeError(message, path=path, tensor=name)
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        return _refused(HeaderSyntaxError, f"shape {shape!r} is no list of sizes", name, path)
    return _refused(HeaderSyntaxError, f"data_offsets {offsets!r} are no pair of byte offsets", name, path)


def _refused(kind: type[CheckpointFormatError], message: str, name: str, path: str) -> CheckpointFormatError:
    return kind(f"{message}; write the file again", path=path, tensor=name)


def _check_layout(entries: list[Entry], data_start: int, size_bytes: int, path: str) -> None:
    """Entries sorted by start must follow each other without overlap or hole, up to the end of the file."""
    reached = data_start
    for entry in entries:
        if entry.start < reached:
            raise TensorOverlapError(
                "its bytes belong to another tensor too; write the file again", path=path, tensor=entry.name
            )
        if entry.start > reached:
            raise TensorHoleError(
                f"{entry.start - reached} bytes before it belong to no tensor; write the file again",
                path=path,
                tensor=entry.name,
            )
        reached += entry.nbytes
    if reached > size_bytes:
        past = next(entry for entry in entries if entry.start + entry.nbytes > size_bytes)
        raise TruncatedFileError(
            f"the file has {size_bytes} bytes, its header needs {reached}; download the file again",
            path=path,
            tensor=past.name,
        )
    if reached < size_bytes:
        raise TensorHoleError(
            f"{size_bytes - reached} bytes at the end belong to no tensor; write the file again", path=path
        )
