"""Products of stored numbers and factors against torch's own on whole tensors."""

from __future__ import annotations

import pytest
import torch

from tests.writers import random_tensor, same_numbers
from umem.strategies.scaling import copy_product

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code(dtype: torch.dtype, compute: torch.dtype) -> None:
    codes = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    items = codes.view(dtype) if dtype.itemsize > 1 else codes.to(torch.uint8).view(dtype)
    items = items.view(-1)[: 1 << 16 // dtype.itemsize]
    for scale in (1.0, -3.0, 2.0**-130, 0.0, torch.inf):
        factor = torch.tensor(scale).to(compute).expand(items.shape)
        into = torch.empty(items.shape, dtype=torch.bfloat16)
        copy_product(into, items, factor)
        assert same_numbers(into, (items.to(compute) * factor).bfloat16())


@pytest.mark.parametrize("shape", [(), (0, 5), (1,), (700_000,), (3, 200_001), (5, 300, 300), (400_000, 2)], ids=str)
def test_tensors_of_many_tiles(shape: tuple[int, ...]) -> None:
    items, factor = random_tensor(shape, torch.float32), random_tensor(shape, torch.float32, 1)
    into = torch.full(shape, 7.0, dtype=torch.bfloat16)
    copy_product(into, items, factor)
    assert same_numbers(into, (items * factor).bfloat16())


def test_what_is_multiplied_stays_as_it_was() -> None:
    items, into = torch.ones(300, 300), torch.empty(300, 300)
    copy_product(into.t(), items, torch.full((), 3.0).expand(300, 300))
    assert torch.equal(items, torch.ones(300, 300))
    assert torch.equal(into, torch.full((300, 300), 3.0))
