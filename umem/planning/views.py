"""Strided views, as data: offset, shape and strides in storage items. No tensors, no torch.

A conversion is described by where the bytes go: a view of a stored tensor fills a view of a final tensor of the same
shape. The functions here build such views, simplify pairs of them, and cut pairs at a range of the source.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

__all__ = ["Axis", "View", "carried", "coalesced", "contiguous_strides", "laid_out", "ordered", "restricted", "spread"]


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
        return cls(0, tuple(shape), contiguous_strides(tuple(shape)) if strides is None else tuple(strides))

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
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


class Axis(NamedTuple):
    """One dimension of a pairing, laid along one dimension of a tensor.

    Attributes
    ----------
    size
        The number of indices.
    source_stride
        The stride in the source, in items.
    dim, step
        It walks along dimension `dim` of the tensor, `step` indices at a time.
    """

    size: int
    source_stride: int
    dim: int
    step: int


def spread(source: View, destination: View, shape: Sequence[int]) -> tuple[list[Axis], list[int]]:
    """A pairing whose destination lies in a row-major tensor of `shape`, laid out along that tensor's dimensions.

    Gives the axes, and the index at which the destination begins in each dimension. A dimension of the pairing that
    runs across several of the tensor's is split.

    Raises
    ------
    ValueError
        A dimension does not follow the tensor's dimensions even when split.
    """
    plain = contiguous_strides(tuple(shape))
    start = [destination.offset // step % size if size else 0 for step, size in zip(plain, shape, strict=True)]
    axes: list[Axis] = []
    for size, source_stride, stride in zip(destination.shape, source.strides, destination.strides, strict=True):
        if size > 1:
            axes += _axes(size, source_stride, stride, plain, start, shape)
    return axes, start


def _axes(
    size: int, source_stride: int, stride: int, plain: Sequence[int], start: Sequence[int], shape: Sequence[int]
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
        axes.append(Axis(count, source_stride, dim, step))
        size //= count
        source_stride *= count
        stride = plain[dim] * shape[dim]
    return axes


def carried(source: View, destination: View, outer: View) -> tuple[View, View]:
    """A pairing whose destination lies in a row-major tensor of `outer.shape`, carried over to where `outer` lies.

    `ValueError` as for `spread`.
    """
    if outer.strides == contiguous_strides(outer.shape):
        return source, destination._replace(offset=destination.offset + outer.offset)
    return laid_out(source, destination, outer.shape, outer)


def laid_out(source: View, destination: View, shape: Sequence[int], other: View) -> tuple[View, View]:
    """A pairing whose destination lies in a row-major tensor of `shape`, with another view of that shape in its place.

    Unlike `carried`, it always splits along the dimensions, so that several such pairings of one destination have the
    same shape; `other` may have strides of 0. `ValueError` as for `spread`.
    """
    axes, start = spread(source, destination, shape)
    sizes = tuple(axis.size for axis in axes)
    offset = other.offset + sum(index * stride for index, stride in zip(start, other.strides, strict=True))
    return (
        View(source.offset, sizes, tuple(axis.source_stride for axis in axes)),
        View(offset, sizes, tuple(axis.step * other.strides[axis.dim] for axis in axes)),
    )


def ordered(source: View, destination: View) -> tuple[View, View]:
    """The same pairing with source strides descending, as `restricted` needs them, and no dimensions merged."""
    order = sorted(range(len(source.shape)), key=lambda dim: -source.strides[dim])
    return source.permute(order), destination.permute(order)


def coalesced(source: View, destination: View) -> tuple[View, View]:
    """The same pairing of items with as few dimensions as possible, source strides descending."""
    dims = [
        (source_stride, destination_stride, size)
        for size, source_stride, destination_stride in zip(
            source.shape, source.strides, destination.strides, strict=True
        )
        if size != 1
    ]
    dims.sort(key=lambda dim: -dim[0])
    merged: list[tuple[int, int, int]] = []
    for source_stride, destination_stride, size in dims:
        if merged:
            outer_source, outer_destination, outer_size = merged[-1]
            if outer_source == source_stride * size and outer_destination == destination_stride * size:
                merged[-1] = (source_stride, destination_stride, outer_size * size)
                continue
        merged.append((source_stride, destination_stride, size))
    shape = tuple(size for _, _, size in merged)
    return (
        View(source.offset, shape, tuple(stride for stride, _, _ in merged)),
        View(destination.offset, shape, tuple(stride for _, stride, _ in merged)),
    )


def restricted(source: View, destination: View, low: int, high: int) -> Iterator[tuple[View, View]]:
    """The parts of a pairing whose source items lie in [low, high), as few pairs of views as that takes.

    The views must come from `coalesced` or `ordered`. Each dimension is cut to the indices that lie inside whole, and
    the at most two that lie across an edge are cut in the next dimension, so a pairing of d dimensions gives at most
    2d + 1 parts.
    """
    if not source.shape:
        if low <= source.offset < high:
            yield source, destination
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
        yield from restricted(source.select(0, index), destination.select(0, index), low, high)
    if first_inside < end_inside:
        count = end_inside - first_inside
        yield source.narrow(0, first_inside, count), destination.narrow(0, first_inside, count)
    for index in range(end_inside, end_touched):
        yield from restricted(source.select(0, index), destination.select(0, index), low, high)
