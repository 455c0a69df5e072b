"""Checkpoints that differ in one respect only: the size of their tensors, or the number of their shards."""

from __future__ import annotations

from pathlib import Path

from sample_checkpoint import Stored, write_checkpoint

from umem._types import parse_bytes

_SWEPT_TENSORS = ("64MiB", "16MiB", "4MiB", "1MiB", "256KiB", "64KiB")
_SHARD_BYTES = 256 << 20  # of those whose tensors are swept
_SWEPT_SHARDS = (1, 32)
_SHARD_TENSORS = 8  # in each of the most shards
_ROW = 1024  # elements in a row of each tensor


def sweep_sizes(directory: Path, total_bytes: int) -> list[Path]:
    """Checkpoints of `total_bytes` in tensors of 64 MiB down to 64 KiB."""
    place = f"{total_bytes >> 20}MiB-in-tensors-of"
    sizes = {name: parse_bytes(name) for name in _SWEPT_TENSORS}
    return [
        swept_checkpoint(directory / f"{place}-{name}", total_bytes, size, _SHARD_BYTES)
        for name, size in sizes.items()
        if size <= total_bytes
    ]


def sweep_shards(directory: Path, total_bytes: int) -> list[Path]:
    """Checkpoints of `total_bytes` in 1 shard and in 32."""
    tensor_bytes = total_bytes // max(_SWEPT_SHARDS) // _SHARD_TENSORS
    return [
        swept_checkpoint(
            directory / f"{total_bytes >> 20}MiB-in-{count}-shards", total_bytes, tensor_bytes, total_bytes // count
        )
        for count in _SWEPT_SHARDS
    ]


def swept_checkpoint(directory: Path, total_bytes: int, tensor_bytes: int, shard_bytes: int) -> Path:
    """A checkpoint of equal bf16 tensors, written unless it is there."""
    shape = (tensor_bytes // 2 // _ROW, _ROW)
    write_checkpoint(
        directory,
        (Stored(f"layers.{number}.weight", shape) for number in range(total_bytes // tensor_bytes)),
        shard_bytes=shard_bytes,
    )
    return directory


SWEEPS = {"sizes": sweep_sizes, "shards": sweep_shards}
