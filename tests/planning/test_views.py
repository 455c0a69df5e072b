"""Views against torch's own strided tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from umem.planning.views import View, carried, coalesced, contiguous_strides, restricted

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


def elements(view: View) -> list[int]:
    """The items of a view, in its own order."""
    size = 1 + view.offset + sum((n - 1) * s for n, s in zip(view.shape, view.strides, strict=True))
    return torch.arange(size).as_strided(view.shape, view.strides, view.offset).flatten().tolist()


def pairs(source: View, destination: View) -> set[tuple[int, int]]:
    return set(zip(elements(source), elements(destination), strict=True))


@st.composite
def derived(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[View, torch.Tensor]:
    """A view of a row-major tensor of `shape` made by some steps, and torch's own result of the same steps."""
    view, tensor = View.whole(shape), torch.arange(torch.Size(shape).numel()).view(shape)
    for _ in range(draw(st.integers(0, 4))):
        if not view.shape:
            break
        dim = draw(st.integers(0, len(view.shape) - 1))
        size = view.shape[dim]
        step = draw(st.sampled_from(["narrow", "select", "permute", "unflatten"]))
        if step == "narrow":
            start = draw(st.integers(0, size - 1))
            length = draw(st.integers(1, size - start))
            view, tensor = view.narrow(dim, start, length), tensor.narrow(dim, start, length)
        elif step == "select":
            index = draw(st.integers(0, size - 1))
            view, tensor = view.select(dim, index), tensor.select(dim, index)
        elif step == "permute":
            order = draw(st.permutations(range(len(view.shape))))
            view, tensor = view.permute(order), tensor.permute(*order)
        else:
            part = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            view, tensor = view.unflatten(dim, (part, -(-size // part))), tensor.unflatten(dim, (part, size // part))
    return view, tensor


@given(data=st.data(), shape=shapes)
def test_steps_give_what_torch_gives(data: st.DataObject, shape: tuple[int, ...]) -> None:
    view, tensor = data.draw(derived(shape))
    assert view.shape == tuple(tensor.shape)
    assert elements(view) == tensor.flatten().tolist()


@given(data=st.data(), shape=shapes)
def test_coalescing_keeps_every_pair(data: st.DataObject, shape: tuple[int, ...]) -> None:
    destination, _ = data.draw(derived(shape))
    order = data.draw(st.permutations(range(len(destination.shape))))
    plain = View.whole(tuple(destination.shape[dim] for dim in order))
    source = plain.permute(sorted(range(len(order)), key=lambda position: order[position]))
    simpler = coalesced((source, destination))
    assert pairs(*simpler) == pairs(source, destination)
    assert len(simpler[0].shape) <= len(source.shape)
    assert list(simpler[0].strides) == sorted(simpler[0].strides, reverse=True)


@given(data=st.data(), shape=shapes)
def test_a_row_major_pairing_coalesces_to_one_run(data: st.DataObject, shape: tuple[int, ...]) -> None:
    del data
    source, destination = coalesced((View.whole(shape), View.whole(shape)))
    assert len(source.shape) <= 1
    assert destination.runs_row_major()


@given(data=st.data(), shape=shapes)
def test_restricting_cuts_at_source_positions(data: st.DataObject, shape: tuple[int, ...]) -> None:
    source, _ = data.draw(derived(shape))
    destination = View.whole(source.shape)
    reach = max(elements(source))
    low = data.draw(st.integers(0, reach + 1))
    high = data.draw(st.integers(low, reach + 2))
    parts = list(restricted(coalesced((source, destination)), low, high))
    found = [pair for part in parts for pair in pairs(*part)]
    assert len(found) == len(set(found))
    assert set(found) == {pair for pair in pairs(source, destination) if low <= pair[0] < high}
    assert len(parts) <= 2 * len(source.shape) + 1


@given(data=st.data(), shape=shapes)
def test_carrying_into_a_permuted_tensor(data: st.DataObject, shape: tuple[int, ...]) -> None:
    destination, _ = data.draw(derived(shape))
    order = data.draw(st.permutations(range(len(shape))))
    outer = View.whole(shape).permute(order)
    inner_shape = outer.shape
    again = data.draw(st.sampled_from([destination, View.whole(inner_shape)]))
    if again is destination and inner_shape != shape:
        return
    source = View.whole(again.shape)
    mapping = elements(outer)  # position in the tensor of outer's shape -> position where outer lies
    assert pairs(*carried((source, again), outer)) == {(s, mapping[d]) for s, d in pairs(source, again)}


def test_carrying_splits_a_dimension_that_runs_across() -> None:
    outer = View.whole((3, 4)).transpose(0, 1)
    flat = View(0, (12,), (1,))
    source, destination = carried((flat, flat), outer)
    assert pairs(source, destination) == set(enumerate(elements(outer)))


def test_carrying_refuses_what_follows_no_dimension() -> None:
    with pytest.raises(ValueError, match=r"does not follow|do not follow"):
        carried((View.whole((5,)), View(1, (5,), (2,))), View.whole((4, 3)).transpose(0, 1))


def test_steps_outside_of_a_view() -> None:
    view = View.whole((2, 3))
    with pytest.raises(IndexError):
        view.narrow(1, 2, 2)
    with pytest.raises(IndexError):
        view.select(0, 2)
    with pytest.raises(ValueError, match="do not make up"):
        view.unflatten(1, (2, 2))


def test_row_major_strides() -> None:
    assert contiguous_strides((2, 3, 4)) == (12, 4, 1)
    assert contiguous_strides(()) == ()
