"""Torch files read without torch: the byte ranges hold what `torch.load` gives."""

from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from tests.writers import random_tensor
from umem._types import DType
from umem.checkpoint import Entry, open_checkpoint

TORCH_DTYPES = [
    getattr(torch, dtype.torch_name) for dtype in DType if dtype.torch_name is not None and dtype is not DType.F4
]


def read(path: Path, entry: Entry) -> torch.Tensor:
    raw = path.read_bytes()[entry.start : entry.start + entry.nbytes]
    flat = torch.frombuffer(bytearray(raw), dtype=getattr(torch, str(entry.dtype.torch_name)))
    return flat.as_strided(entry.shape, entry.strides) if entry.strides is not None else flat.view(entry.shape)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "m.pt"
    tensors = {"a.weight": random_tensor((4, 3), dtype), "b": random_tensor((5,), dtype, 1)}
    torch.save(tensors, path)
    for name, entry in open_checkpoint(path).entries.items():
        assert entry.dtype is DType.from_torch(dtype)
        assert read(path, entry).view(torch.uint8).equal(tensors[name].view(torch.uint8))


def test_parameters_strides_and_shared_storage(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    tensors = OrderedDict(
        parameter=torch.nn.Parameter(base.clone()),
        transposed=base.t(),
        part=base[1:3, 2:5],
        same=base,
        scalar=torch.tensor(7, dtype=torch.int64),
        none=torch.empty(0, 3),
    )
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path)
    entries = open_checkpoint(path).entries
    for name, tensor in tensors.items():
        if tensor.numel():
            assert read(path, entries[name]).equal(tensor), name
        assert entries[name].shape == tuple(tensor.shape)
    assert entries["same"].start == entries["transposed"].start
    assert entries["same"].strides is None
    assert entries["transposed"].strides == (1, 6)


def test_nested_dictionaries_give_dotted_names(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pth"
    state = {"model": {"layer": {"w": torch.ones(2)}}, "epoch": 3, "notes": ["a", None], "moments": {0: torch.zeros(1)}}
    torch.save(state, path)
    assert sorted(open_checkpoint(path).entries) == ["model.layer.w", "moments.0"]
