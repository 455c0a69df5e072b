"""Headers of valid files: what they say is what the reference library says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.writers import Stored, file_bytes, header_of, random_tensor, safetensors_bytes, stored, write_safetensors
from umem._types import DType
from umem.checkpoint import open_checkpoint

#: Elements that fill whole bytes for every dtype, and the bytes that they take.
COUNT = 8
DTYPES = [dtype for dtype in DType if dtype is not DType.C128]


def stored_of(dtype: DType, shape: tuple[int, ...] = (2, 4)) -> Stored:
    return Stored(dtype.label, shape, bytes(range(torch.Size(shape).numel() * dtype.bits // 8)))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.label)
def test_every_dtype_of_the_format(tmp_path: Path, dtype: DType) -> None:
    path = tmp_path / "model.safetensors"
    tensor = stored_of(dtype)
    path.write_bytes(safetensors_bytes({"a": stored_of(DType.U8, (3,)), "x": tensor}))
    entry = open_checkpoint(path).entries["x"]
    assert entry.dtype is dtype
    assert path.read_bytes()[entry.start : entry.start + entry.nbytes] == tensor.data
    if dtype.torch_name is not None:
        with safe_open(str(path), "pt") as reference:
            expected = reference.get_tensor("x")
        assert entry.shape == tuple(expected.shape)
        assert DType.from_torch(expected.dtype) is dtype


@pytest.mark.parametrize("padding", range(9))
def test_data_at_any_alignment(tmp_path: Path, padding: int) -> None:
    tensors = {"a": random_tensor((5,), torch.float64), "b": random_tensor((3, 2), torch.bfloat16, 1)}
    path = write_safetensors(tmp_path / "m.safetensors", tensors, padding=padding)
    entries = open_checkpoint(path).entries
    for name, tensor in tensors.items():
        start = entries[name].start
        assert path.read_bytes()[start : start + entries[name].nbytes] == stored(tensor).data


def test_a_header_in_another_order_than_the_data(tmp_path: Path) -> None:
    tensors = {"a": stored_of(DType.F32), "b": stored_of(DType.U8), "c": stored_of(DType.I64)}
    header = header_of(tensors)
    shuffled = {name: header[name] for name in ("c", "a", "b")}
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_bytes(shuffled, b"".join(tensor.data for tensor in tensors.values())))
    assert list(open_checkpoint(path).entries) == ["a", "b", "c"]


def test_empty_and_zero_dimensional_tensors(tmp_path: Path) -> None:
    tensors = {"none": Stored("F32", (0, 7), b""), "one": Stored("F32", (), bytes(4)), "end": Stored("I8", (0,), b"")}
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes(tensors))
    entries = open_checkpoint(path).entries
    assert [(entries[name].shape, entries[name].nbytes) for name in tensors] == [((0, 7), 0), ((), 4), ((0,), 0)]


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_bytes(b"{}" + b" " * 6, b""))
    assert not open_checkpoint(path).entries


def test_metadata_and_unknown_fields(tmp_path: Path) -> None:
    header = header_of({"x": stored_of(DType.U8)}, {"format": "pt", "ключ": "значение"})
    header["x"]["added_later"] = 1
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_bytes(header, stored_of(DType.U8).data))
    checkpoint = open_checkpoint(path)
    assert dict(checkpoint.metadata) == {"format": "pt", "ключ": "значение"}
    assert "x" in checkpoint.entries


def test_names_in_any_script(tmp_path: Path) -> None:
    names = ["層.重み", "слой", "a/b c", ""]
    path = tmp_path / "m.safetensors"
    path.write_bytes(safetensors_bytes({name: stored_of(DType.U8) for name in names}))
    assert list(open_checkpoint(path).entries) == names


def test_a_header_of_many_tensors_is_read_in_time_proportional_to_them(tmp_path: Path) -> None:
    header = {f"layers.{i}.w": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(100_000)}
    path = tmp_path / "m.safetensors"
    path.write_bytes(file_bytes(json.dumps(header).encode(), bytes(100_000)))
    assert open_checkpoint(path).data_bytes == 100_000
