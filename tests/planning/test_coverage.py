"""The coverage proof: right for every set of views that it accepts, and for strided ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.test_views import elements
from umem.errors import CoverageError
from umem.planning.coverage import prove_coverage
from umem.planning.views import View


def covers(shape: tuple[int, ...], views: list[View]) -> bool:
    written = sorted(element for view in views for element in (elements(view) if view.items else []))
    return written == list(range(torch.Size(shape).numel()))


@st.composite
def partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[View]]:
    """A shape and views that cut it up: cut, permuted, and with dimensions taken apart."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3).map(tuple))
    views = [View.whole(shape)]
    for _ in range(draw(st.integers(0, 4))):
        number = draw(st.integers(0, len(views) - 1))
        view = views.pop(number)
        if not view.shape:
            views.append(view)
            continue
        dim = draw(st.integers(0, len(view.shape) - 1))
        size = view.shape[dim]
        if size % 2 == 0 and draw(st.booleans()):
            halves = view.unflatten(dim, (size // 2, 2))
            views += [halves.select(dim + 1, index) for index in range(2)]  # every other index
        elif size > 1:
            cut = draw(st.integers(1, size - 1))
            views += [view.narrow(dim, 0, cut), view.narrow(dim, cut, size - cut)]
        else:
            views.append(view.permute(draw(st.permutations(range(len(view.shape))))))
    return shape, views


@given(partitions())
def test_a_partition_is_proven(partition: tuple[tuple[int, ...], list[View]]) -> None:
    shape, views = partition
    assert covers(shape, views)
    prove_coverage("t", shape, views)


@given(partition=partitions(), data=st.data())
def test_a_changed_partition_is_refused(partition: tuple[tuple[int, ...], list[View]], data: st.DataObject) -> None:
    shape, views = partition
    number = data.draw(st.integers(0, len(views) - 1))
    change = data.draw(st.sampled_from(["drop", "double", "shift", "shrink"]))
    view = views[number]
    if change == "drop":
        del views[number]
    elif change == "double":
        views.append(view)
    elif change == "shift":
        views[number] = view._replace(offset=view.offset + data.draw(st.sampled_from([-1, 1, 2])))
    elif view.shape:
        views[number] = view.narrow(0, 0, view.shape[0] - 1)
    else:
        return
    with pytest.raises(CoverageError, match="nothing was read") as caught:
        prove_coverage("layer.weight", shape, views)
    assert caught.value.target == "layer.weight"


def test_fused_experts_of_a_layer() -> None:
    experts, inner, hidden = 128, 6, 10
    whole = View.whole((experts, 2 * inner, hidden))
    views = [whole.select(0, e).narrow(0, half * inner, inner) for e in range(experts) for half in range(2)]
    prove_coverage("experts.gate_up_proj", whole.shape, views)
    transposed = [view.transpose(0, 1) for view in views]
    prove_coverage("experts.gate_up_proj", whole.shape, transposed)
    with pytest.raises(CoverageError, match="left out"):
        prove_coverage("experts.gate_up_proj", whole.shape, views[:-1])


def test_unequal_parts_of_a_concatenation() -> None:
    whole = View.whole((7, 5))
    prove_coverage("qkv", whole.shape, [whole.narrow(0, 0, 4), whole.narrow(0, 4, 1), whole.narrow(0, 5, 2)])


def test_empty_and_zero_dimensional_targets() -> None:
    prove_coverage("none", (0, 3), [View.whole((0, 3))])
    prove_coverage("none", (0, 3), [])
    prove_coverage("scalar", (), [View.whole(())])
    with pytest.raises(CoverageError):
        prove_coverage("scalar", (), [])
    with pytest.raises(CoverageError):
        prove_coverage("scalar", (), [View.whole(()), View.whole(())])


def test_views_without_a_common_system_are_marked() -> None:
    whole = View.whole((5,))
    even, odd = View(0, (3,), (2,)), View(1, (2,), (2,))
    prove_coverage("odd", whole.shape, [even, odd])
    for wrong in ([even], [even, odd, odd], [even, View(1, (3,), (2,))]):
        with pytest.raises(CoverageError):
            prove_coverage("odd", whole.shape, wrong)


def test_views_without_a_common_system_are_refused_where_marking_costs_too_much() -> None:
    size = (1 << 24) + 1
    with pytest.raises(CoverageError, match="cannot be proven"):
        prove_coverage("odd", (size,), [View(0, (size // 2 + 1,), (2,)), View(1, (size // 2,), (2,))])
