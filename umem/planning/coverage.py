"""The proof that the writes to a target cover each of its elements exactly once, for strided views too.

Every stride and size in play is written as a digit of one mixed-radix number system, in which each view is a box. That
boxes fill a box without overlap is then checked digit by digit, the most significant first. The cost is about linear
in the number of views, whatever their sizes. Views without such a common system are proven by marking every element,
up to a size; beyond it they are refused: no proof, no uninitialised memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from umem.errors import CoverageError
from umem.planning.views import View, contiguous_strides

__all__ = ["prove_coverage"]

#: The largest tensor, in elements, that is proven by marking; one byte an element is live meanwhile.
_MARKED_ITEMS = 1 << 24

#: Per digit, the half-open range of its values.
_Box = tuple[tuple[int, int], ...]


def prove_coverage(target: str, shape: tuple[int, ...], views: Sequence[View]) -> None:
    """Return if `views` cover a row-major tensor of `shape` exactly once.

    Raises
    ------
    CoverageError
        Elements are left out, written twice or out of bounds, or the proof cannot be made.
    """
    if len(views) == 1 and views[0] == View.whole(shape):
        return
    items = prod(shape)
    views = [view for view in views if view.items]
    if items == 0:
        if views:
            raise CoverageError(f"the empty tensor of {shape} is written to", target=target)
        return
    try:
        places = _places(shape, views)
        radices = [upper // lower for lower, upper in zip(places, [*places[1:], items], strict=True)]
        boxes = [_box(target, view, places, radices) for view in views]
    except _NoCommonSystemError as error:
        if items > _MARKED_ITEMS:
            raise CoverageError(f"{error}, so coverage cannot be proven", target=target) from None
        _prove_by_marking(target, items, views)
        return
    _prove_filled(target, boxes, radices, len(radices) - 1)


class _NoCommonSystemError(Exception):
    """The views have no number system in which each is a box."""


def _prove_by_marking(target: str, items: int, views: Sequence[View]) -> None:
    marks = bytearray(items)
    for view in views:
        rows, length, step = view, 1, 1
        if view.shape:
            length, step = view.shape[-1], view.strides[-1]
            rows = View(view.offset, view.shape[:-1], view.strides[:-1])
        for index in product(*map(range, rows.shape)):
            start = rows.offset + sum(i * stride for i, stride in zip(index, rows.strides, strict=True))
            end = start + (length - 1) * step + 1
            if start < 0 or end > items or step < 1 or any(marks[start:end:step]):
                raise CoverageError(f"{view} writes an element twice, or one out of bounds", target=target)
            marks[start:end:step] = b"\1" * length
    if not all(marks):
        raise CoverageError(f"{marks.count(0)} elements are left out", target=target)


def _places(shape: tuple[int, ...], views: Sequence[View]) -> list[int]:
    """The place values of the digits, ascending: each divides the next."""
    items = prod(shape)
    values = {1}
    values.update(step for step, size in zip(contiguous_strides(shape), shape, strict=True) if size > 1)
    for view in views:
        values.update(step for step, size in zip(view.strides, view.shape, strict=True) if size > 1)
    places = sorted(values)
    chain = [*places, items]
    if places[0] < 1 or any(upper % lower for lower, upper in zip(chain, chain[1:], strict=False)):
        raise _NoCommonSystemError(f"strides {places} do not divide each other")
    if items == 1:
        return [1]
    return [place for place in places if place < items]


def _box(target: str, view: View, places: list[int], radices: list[int]) -> _Box:
    rest = view.offset
    if not 0 <= rest < places[-1] * radices[-1]:
        raise CoverageError(f"{view} begins out of bounds", target=target)
    starts = [rest // place % radix for place, radix in zip(places, radices, strict=True)]
    lengths = [1] * len(places)
    for step, size in zip(view.strides, view.shape, strict=True):
        if size == 1:
            continue
        digit, left = places.index(step), size
        while left > 1:
            if digit == len(places) or lengths[digit] != 1:
                raise CoverageError(f"{view} overlaps itself or ends out of bounds", target=target)
            length = min(left, radices[digit])
            if starts[digit] + length > radices[digit] or (left > length and left % length):
                raise _NoCommonSystemError(f"{view} runs across the dimensions")
            lengths[digit] = length
            left //= length
            digit += 1
    return tuple((start, start + length) for start, length in zip(starts, lengths, strict=True))


def _prove_filled(target: str, boxes: list[_Box], radices: list[int], digit: int) -> None:
    """`boxes` fill the digits from `digit` down exactly once."""
    if digit < 0:
        if len(boxes) > 1:
            raise CoverageError(f"an element is written {len(boxes)} times", target=target)
        return
    slabs: dict[tuple[int, int], list[_Box]] = {}
    for box in boxes:
        slabs.setdefault(box[digit], []).append(box)
    ranges = sorted(slabs)
    if any(low[1] > high[0] for low, high in zip(ranges, ranges[1:], strict=False)):
        slabs = _cut(slabs)
        ranges = sorted(slabs)
    reached = 0
    for start, end in ranges:
        if start != reached:
            raise CoverageError(f"elements are left out (index {reached} of a stride)", target=target)
        reached = end
    if reached != radices[digit]:
        raise CoverageError(f"elements are left out (index {reached} of {radices[digit]})", target=target)
    for slab in slabs.values():
        _prove_filled(target, slab, radices, digit - 1)


def _cut(slabs: dict[tuple[int, int], list[_Box]]) -> dict[tuple[int, int], list[_Box]]:
    """Overlapping ranges of a digit, cut at every edge so that ranges are equal or apart."""
    edges = sorted({edge for bounds in slabs for edge in bounds})
    cut: dict[tuple[int, int], list[_Box]] = {}
    for (start, end), boxes in slabs.items():
        for low, high in zip(edges, edges[1:], strict=False):
            if start <= low and high <= end:
                cut.setdefault((low, high), []).extend(boxes)
    return cut
