"""Copies between views: whatever their strides, the result is what `copy_` gives, and the rest stays as it was."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from umem.strategies.tiles import copy_view


def strided(shape: tuple[int, ...], order: tuple[int, ...], gaps: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A view of that shape whose axes lie in memory in `order`, slowest first, with gaps of unused items."""
    strides = [0] * len(shape)
    step = 1
    for axis, gap in zip(reversed(order), gaps, strict=True):
        strides[axis] = step
        step = step * shape[axis] + gap
    return torch.zeros(step + 5, dtype=dtype).as_strided(shape, strides, 3)


def filled(view: torch.Tensor) -> torch.Tensor:
    view.copy_(torch.randint(0, 100, view.shape, generator=torch.Generator().manual_seed(1)))
    return view


def whole_storage(view: torch.Tensor) -> torch.Tensor:
    return view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_as_copy_does(data: st.DataObject) -> None:
    dimensions = data.draw(st.integers(1, 4))
    sizes = st.integers(1, 300 if dimensions < 3 else 90 if dimensions == 3 else 30)
    shape = tuple(data.draw(st.lists(sizes, min_size=dimensions, max_size=dimensions)))
    orders = st.permutations(range(dimensions)).map(tuple)
    gaps = st.tuples(*[st.integers(0, 3)] * dimensions)
    dtypes = st.sampled_from([torch.int16, torch.uint8, torch.float32, torch.bfloat16])
    source = filled(strided(shape, data.draw(orders), data.draw(gaps), data.draw(dtypes)))
    order, gap, dtype = data.draw(orders), data.draw(gaps), data.draw(dtypes)
    expected, into = (strided(shape, order, gap, dtype) for _ in range(2))
    expected.copy_(source)
    copy_view(into, source)
    assert torch.equal(whole_storage(into), whole_storage(expected))


@pytest.mark.parametrize("shape", [(1500, 1000), (3, 700, 900), (2, 3, 200, 300), (9, 300_000), (300_000, 9)])
def test_transposes_of_more_than_a_tile(shape: tuple[int, ...]) -> None:
    for order in itertools.permutations(range(len(shape))):
        source = filled(torch.empty(shape, dtype=torch.int16))
        into = strided(shape, order, (0,) * len(shape), torch.int16)
        copy_view(into, source)
        assert torch.equal(into, source)


def test_a_transpose_into_a_wider_matrix_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = torch.zeros(700, 1200, dtype=torch.bfloat16)
    source = torch.rand(500, 700).bfloat16()
    copy_view(outer[:, 100:600], source.t())
    assert torch.equal(outer[:, 100:600], source.t())
    assert not outer[:, :100].any()
    assert not outer[:, 600:].any()
