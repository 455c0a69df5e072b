"""What numbers with scales stand for, against the definition item by item, on tensors and as compiled writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.strategies.loads import run_writes
from tests.writers import random_tensor, same_numbers, write_safetensors
from umem._types import DType
from umem.adapters.layout import stored
from umem.adapters.precision import dequantized
from umem.adapters.tracing import TracedTensor
from umem.checkpoint import open_checkpoint
from umem.strategies.storage import torch_dtype

SHAPES = [(256, 256), (130, 128), (128, 200), (200, 72), (3, 300), (5, 4), (2, 130, 140)]


def scales_of(shape: tuple[int, ...], block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    return (torch.rand(grid, generator=torch.Generator().manual_seed(5)) + 0.5).to(dtype)


def by_definition(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    rows, columns = (torch.arange(size) // step for size, step in zip(weight.shape[-2:], block, strict=True))
    return (weight.float() * scales.float()[..., rows, :][..., columns]).to(dtype)


@pytest.mark.parametrize("block", [(128, 128), (1, 32), (64, 16)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks(shape: tuple[int, ...], block: tuple[int, int]) -> None:
    weight = random_tensor(shape, torch.float8_e4m3fn)
    scales = scales_of(shape, block, torch.float32)
    given = dequantized(weight, scales, block, torch.bfloat16)
    assert same_numbers(given, by_definition(weight, scales, block, torch.bfloat16))


@pytest.mark.parametrize("block_bytes", [4096, 10_000, 1 << 20])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_blocks(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype, scale_dtype: torch.dtype, block_bytes: int
) -> None:
    """The stored numbers take every code there is, NaN included; transposed, as merged experts are."""
    codes = torch.arange(torch.Size(shape).numel(), dtype=torch.int64).mul_(37).to(torch.uint8)
    weight, scales = codes.view(shape).view(dtype), scales_of(shape, (128, 128), scale_dtype)
    checkpoint = open_checkpoint(write_safetensors(tmp_path / "m.safetensors", {"s": scales, "w": weight}))
    traced = {name: TracedTensor(stored(e), torch_dtype(e.dtype)) for name, e in checkpoint.entries.items()}
    result = dequantized(traced["w"], traced["s"], (128, 128), torch.bfloat16).transpose(-1, -2)
    assert isinstance(result, TracedTensor)
    writes = list(result.layout_of_elements.writes("out"))
    loaded = run_writes(checkpoint, writes, {"out": (DType.BF16, tuple(result.shape))}, block_bytes=block_bytes)
    expected = by_definition(weight, scales, (128, 128), torch.bfloat16).transpose(-1, -2)
    assert same_numbers(loaded["out"], expected.contiguous())


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.tensor([0.5]), torch.full((1, 1, 1), 0.5)], ids=str)
def test_one_scale_for_all(scale: torch.Tensor) -> None:
    weight = random_tensor((200, 72), torch.float8_e4m3fn)
    given = dequantized(weight, scale, (128, 128), torch.float32)
    assert same_numbers(given, weight.float() * 0.5)


@pytest.mark.parametrize("grid", [(1, 2), (2, 2, 1), (3, 1)])
def test_a_grid_that_does_not_fit(grid: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"blocks of \[128, 128\] has scales of \[2, 1\], not"):
        dequantized(random_tensor((200, 72), torch.float8_e4m3fn), torch.ones(grid), (128, 128), torch.bfloat16)
