"""Strided views, as data: offset, shape and strides in storage items. No tensors, no torch.

A conversion is described by where the bytes go: a view of a stored tensor fills a view of a final tensor of the same
shape. That is a *pairing*: views of one shape whose items belong together, the source first and the destination last;
between them may be a factor's. The functions here build such views, simplify pairings, and cut them at a range of the
source.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

__all__ = [
    "Axis",
    "Pairing",
    "View",
    "along",
    "carried",
    "coalesced",
    "contiguous_strides",
    "placed",
    "restricted",
    "spread",
]


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in items."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)


class View(NamedTuple):
    """A strided view of a flat run of items: item (i, j) lies at `offset + i * strides[0] + j * strides[1]`."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int], strides: Sequence[int] | None = None) -> View:
        """The view of a whole tensor of `shape`; row-major where no strides are given."""
        return _row_major(tuple(shape)) if strides is None else cls(0, tuple(shape), tuple(strides))

    @property
    def items(self) -> int:
        """The number of items."""
        return prod(self.shape)

    def narrow(self, dim: int, start: int, length: int) -> View:
        """`length` indices of `dim`, from `start`. `IndexError` outside of the view."""
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise IndexError(f"[{start}, {start + length}) is no part of dimension {dim} of {self.shape}")
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return View(self.offset + start * self.strides[dim], shape, self.strides)

    def select(self, dim: int, index: int) -> View:
        """One index of `dim`; the dimension goes away. `IndexError` outside of the view."""
        if not 0 <= index < self.shape[dim]:
            raise IndexError(f"{index} is no index of dimension {dim} of {self.shape}")
        offset = self.offset + index * self.strides[dim]
        return View(offset, self.shape[:dim] + self.shape[dim + 1 :], self.strides[:dim] + self.strides[dim + 1 :])

    def permute(self, order: Sequence[int]) -> View:
        """The dimensions in another order."""
        return View(self.offset, tuple(self.shape[dim] for dim in order), tuple(self.strides[dim] for dim in order))

    def transpose(self, first: int, second: int) -> View:
        """Two dimensions exchanged."""
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        return self.permute(order)

    def unflatten(self, dim: int, sizes: Sequence[int]) -> View:
        """One dimension as several. `ValueError` unless their product is its size."""
        if prod(sizes) != self.shape[dim]:
            raise ValueError(f"{tuple(sizes)} do not make up the {self.shape[dim]} of dimension {dim}")
        steps = [step * self.strides[dim] for step in contiguous_strides(tuple(sizes))]
        shape = (*self.shape[:dim], *sizes, *self.shape[dim + 1 :])
        return View(self.offset, shape, (*self.strides[:dim], *steps, *self.strides[dim + 1 :]))

    def runs_row_major(self) -> bool:
        """Whether the items follow each other without gaps."""
        if self.strides == contiguous_strides(self.shape):
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@functools.lru_cache(maxsize=4096)
def _row_major(shape: tuple[int, ...]) -> View:
    return View(0, shape, contiguous_strides(shape))


#: Views of one shape, whose items belong together: source first, destination last.
Pairing = tuple[View, ...]


class Axis(NamedTuple):
    """One dimension of a pairing, laid along one dimension of the tensor that its destination lies in.

    Attributes
    ----------
    size
        The number of indices.
    strides
        The strides in the views before the destination, in items.
    dim, step
        It walks along dimension `dim` of the tensor, `step` indices at a time.
    """

    size: int
    strides: tuple[int, ...]
    dim: int
    step: int


def spread(pairing: Pairing, shape: Sequence[int]) -> tuple[list[Axis], list[int]]:
    """A pairing whose destination lies in a row-major tensor of `shape`, laid out along that tensor's dimensions.

    Gives the axes, and the index at which the destination begins in each dimension. A dimension of the pairing that
    runs across several of the tensor's is split.

    Raises
    ------
    ValueError
        A dimension does not follow the tensor's dimensions even when split.
    """
    *others, destination = pairing
    plain = contiguous_strides(tuple(shape))
    start = [destination.offset // step % size if size else 0 for step, size in zip(plain, shape, strict=True)]
    axes: list[Axis] = []
    for dim, (size, stride) in enumerate(zip(destination.shape, destination.strides, strict=True)):
        if size > 1:
            axes += _axes(size, tuple(view.strides[dim] for view in others), stride, plain, start, shape)
    return axes, start


def _axes(
    size: int, strides: tuple[int, ...], stride: int, plain: Sequence[int], start: Sequence[int], shape: Sequence[int]
) -> list[Axis]:
    """The axes of one dimension of a pairing: one, or more where it runs across dimensions of the tensor."""
    axes = []
    while size > 1:
        dim = next((d for d, step in enumerate(plain) if step <= stride and shape[d] > 1), None)
        if dim is None or stride % plain[dim]:
            raise ValueError(f"a stride of {stride} does not follow the dimensions of {tuple(shape)}")
        step = stride // plain[dim]
        count = size
        if start[dim] + (size - 1) * step >= shape[dim]:
            count = shape[dim] // step
            if shape[dim] % step or start[dim] >= step or size % count:
                raise ValueError(f"{size} steps of {stride} do not follow the dimensions of {tuple(shape)}")
        axes.append(Axis(count, strides, dim, step))
        size //= count
        strides = tuple(one * count for one in strides)
        stride = plain[dim] * shape[dim]
    return axes


def carried(pairing: Pairing, outer: View) -> Pairing:
    """A pairing whose destination lies in a row-major tensor of `outer.shape`, carried over to where `outer` lies.

    `ValueError` as for `spread`.
    """
    *others, destination = pairing
    if outer.strides == contiguous_strides(outer.shape):
        return (*others, destination._replace(offset=destination.offset + outer.offset))
    axes, start = spread(pairing, outer.shape)
    return (*along(axes, [view.offset for view in others]), placed(axes, start, outer))


def along(axes: Sequence[Axis], offsets: Sequence[int]) -> tuple[View, ...]:
    """The views before the destination, from these offsets on, over `axes`."""
    sizes = tuple(axis.size for axis in axes)
    return tuple(
        View(offset, sizes, tuple(axis.strides[number] for axis in axes)) for number, offset in enumerate(offsets)
    )


def placed(axes: Sequence[Axis], start: Sequence[int], outer: View) -> View:
    """The view over `axes` in a tensor that lies where `outer` does, from the index `start` on."""
    offset = outer.offset + sum(index * stride for index, stride in zip(start, outer.strides, strict=True))
    return View(offset, tuple(axis.size for axis in axes), tuple(axis.step * outer.strides[axis.dim] for axis in axes))


def coalesced(pairing: Pairing) -> Pairing:
    """The same pairing of items with as few dimensions as possible, source strides descending."""
    strides = zip(*(view.strides for view in pairing), strict=True)
    dims = [(size, steps) for size, steps in zip(pairing[0].shape, strides, strict=True) if size != 1]
    dims.sort(key=lambda dim: -dim[1][0])
    merged: list[tuple[int, tuple[int, ...]]] = []
    for size, steps in dims:
        if merged:
            outer_size, outer_steps = merged[-1]
            if all(outer == step * size for outer, step in zip(outer_steps, steps, strict=True)):
                merged[-1] = (outer_size * size, steps)
                continue
        merged.append((size, steps))
    shape = tuple(size for size, _ in merged)
    return tuple(
        View(view.offset, shape, tuple(steps[number] for _, steps in merged)) for number, view in enumerate(pairing)
    )


def restricted(pairing: Pairing, low: int, high: int) -> Iterator[Pairing]:
    """The parts of a pairing whose source items lie in [low, high), as few as that takes.

    The pairing must come from `coalesced`. Each dimension is cut to the indices that lie inside whole, and the at most
    two that lie across an edge are cut in the next dimension, so a pairing of d dimensions gives at most 2d + 1 parts.
    """
    source = pairing[0]
    if not source.shape:
        if low <= source.offset < high:
            yield pairing
        return
    size, stride = source.shape[0], source.strides[0]
    inner_span = sum((n - 1) * s for n, s in zip(source.shape[1:], source.strides[1:], strict=True))
    first_touched = max(0, -(-(low - source.offset - inner_span) // stride))
    end_touched = min(size, (high - 1 - source.offset) // stride + 1)
    if first_touched >= end_touched:
        return
    first_inside = max(first_touched, -(-(low - source.offset) // stride))
    end_inside = min(end_touched, (high - 1 - source.offset - inner_span) // stride + 1)
    if first_inside >= end_inside:
        first_inside = end_inside = end_touched
    for index in range(first_touched, first_inside):
        yield from restricted(tuple(view.select(0, index) for view in pairing), low, high)
    if first_inside < end_inside:
        count = end_inside - first_inside
        yield tuple(view.narrow(0, first_inside, count) for view in pairing)
    for index in range(end_inside, end_touched):
        yield from restricted(tuple(view.select(0, index) for view in pairing), low, high)
