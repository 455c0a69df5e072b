"""Writers of tiny checkpoints, byte by byte: valid ones for every dtype, and the pieces of broken ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from umem._types import DType


class Stored(NamedTuple):
    """A tensor to store: safetensors dtype, shape in elements, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def stored(tensor: torch.Tensor) -> Stored:
    """A torch tensor as it is stored."""
    plain = tensor.detach().clone(memory_format=torch.contiguous_format)
    data = bytes(plain.reshape(-1).view(torch.uint8).tolist()) if plain.numel() else b""
    return Stored(DType.from_torch(tensor.dtype).label, tuple(tensor.shape), data)


def header_of(tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The header that describes `tensors`, one after the other."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        position += len(data)
    return header


def file_bytes(header: Mapping[str, Any] | bytes, data: bytes) -> bytes:
    """A safetensors file of that header, which may be raw bytes, and that data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def safetensors_bytes(
    tensors: Mapping[str, Stored], metadata: Mapping[str, str] | None = None, *, padding: int = 0
) -> bytes:
    """A valid file; `padding` spaces end the header, which moves the data off its alignment."""
    raw = json.dumps(header_of(tensors, metadata)).encode() + b" " * padding
    return file_bytes(raw, b"".join(tensor.data for tensor in tensors.values()))


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], *, padding: int = 0) -> Path:
    """Write torch tensors to one file."""
    path.write_bytes(safetensors_bytes({name: stored(t) for name, t in tensors.items()}, padding=padding))
    return path


def write_sharded(directory: Path, shards: Sequence[Mapping[str, torch.Tensor]]) -> Path:
    """Write shards and their index."""
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_safetensors(directory / file, shard)
        weight_map.update(dict.fromkeys(shard, file))
    write_index(directory / "model.safetensors.index.json", weight_map)
    return directory


def write_index(path: Path, weight_map: Any) -> Path:
    """Write an index file."""
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return path


def random_tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bytes as a tensor, so that any misplaced byte shows; NaNs included."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    if dtype is torch.bool:
        raw %= 2
    return raw.view(dtype).reshape(tuple(shape))


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    if left.numel() == 0:
        return True
    return torch.equal(*(_raw(tensor) for tensor in (left, right)))


def same_numbers(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same bits, except that any NaN is as good as another: which one a cast gives depends on the processor."""
    nan = left.isnan()
    return torch.equal(nan, right.isnan()) and same_bytes(left.masked_fill(nan, 0), right.masked_fill(nan, 0))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy.copy_(tensor.detach())
    return copy.view(-1).view(torch.uint8)


class Holder(torch.nn.Module):
    """A module with a parameter of any dtype under any dotted name, on the meta device or with live tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: str = "meta") -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            live = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if device != "meta":
                live.view(torch.uint8 if live.element_size() == 1 else live.dtype).zero_()
            module.register_parameter(leaf, torch.nn.Parameter(live, requires_grad=False))


def write_sparse(path: Path, nbytes: int, names: Sequence[str] = ("a", "b", "c")) -> Path:
    """A file of equal F32 tensors with `nbytes` in all, zeros that take no room on the disk."""
    each = nbytes // len(names) // 4 * 4
    header = {
        name: {"dtype": "F32", "shape": [each // 4], "data_offsets": [i * each, (i + 1) * each]}
        for i, name in enumerate(names)
    }
    with path.open("wb") as file:
        file.write(file_bytes(header, b""))
        file.truncate(file.tell() + len(names) * each)
    return path
