"""Layouts: tensors described by where their elements come from. The words of a conversion, as arithmetic on views.

A `Layout` is a tensor that nobody holds: a shape, and pieces that say which view of which stored tensor fills which
view of it. Stacking, concatenating, cutting, permuting and reshaping layouts gives layouts; `writes` turns one into
the writes of a plan. Besides moves of elements, only one product with a stored tensor is possible here: what changes
numbers otherwise is no layout (`NotALayoutError`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from umem._types import DType
from umem.checkpoint.entries import Entry
from umem.planning.views import Axis, Pairing, View, along, carried, placed, spread
from umem.planning.writes import Factor, Write, paired

__all__ = ["Layout", "NotALayoutError", "Piece", "concatenate", "stack", "stored"]


class NotALayoutError(Exception):
    """A step that is no move of elements, or one that these views cannot express."""


class Piece(NamedTuple):
    """A view of a stored tensor that fills a view of a row-major tensor, multiplied by a factor's if there is one.

    All views have the same shape.
    """

    entry: Entry
    source: View
    destination: View
    factor: Factor | None = None

    @property
    def pairing(self) -> Pairing:
        """Its views: the source, the factor's if there is one, the destination."""
        return paired(self.source, self.factor, self.destination)

    def over(self, pairing: Pairing) -> Piece:
        """The same stored tensors with other views."""
        source, *between, destination = pairing
        factor = self.factor._replace(view=between[0]) if self.factor is not None else None
        return Piece(self.entry, source, destination, factor)


class Layout(NamedTuple):
    """A tensor described by its pieces. Its own order is row-major."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def permute(self, order: Sequence[int]) -> Layout:
        """The dimensions in another order."""
        shape = tuple(self.shape[dim] for dim in order)
        inverse = sorted(range(len(order)), key=lambda position: order[position])
        return Layout(shape, _carry(self.pieces, View.whole(shape).permute(inverse)))

    def transpose(self, first: int, second: int) -> Layout:
        """Two dimensions exchanged."""
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        return self.permute(order)

    def reshape(self, shape: Sequence[int]) -> Layout:
        """Another shape over the same elements in the same order. `ValueError` unless the numbers of elements agree."""
        if prod(shape) != prod(self.shape):
            raise ValueError(f"shape {tuple(shape)} does not fit the elements of {self.shape}")
        return Layout(tuple(shape), self.pieces)

    def narrow(self, dim: int, start: int, length: int, step: int = 1) -> Layout:
        """`length` indices of `dim`: `start`, `start + step`, ... `IndexError` outside of the tensor."""
        if start < 0 or length < 0 or (length and start + (length - 1) * step >= self.shape[dim]):
            raise IndexError(f"{length} indices from {start} by {step} are no part of dimension {dim} of {self.shape}")
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        if length == 0:
            return Layout(shape, ())
        if step != 1:
            padded = self.narrow(dim, start, (length - 1) * step + 1)
            return Layout(shape, tuple(_every(padded, dim, step, shape)))
        pieces = tuple(part for piece in self.pieces for part in _clipped(piece, self.shape, dim, start, length, shape))
        return Layout(shape, pieces)

    def select(self, dim: int, index: int) -> Layout:
        """One index of `dim`; the dimension goes away."""
        return self.narrow(dim, index, 1).reshape(self.shape[:dim] + self.shape[dim + 1 :])

    def split(self, sizes: Sequence[int], dim: int) -> list[Layout]:
        """Consecutive parts along `dim`."""
        starts = [sum(sizes[:position]) for position in range(len(sizes))]
        return [self.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=True)]

    def writes(self, target: str) -> Iterator[Write]:
        """The writes that fill `target` with this layout."""
        for piece in self.pieces:
            yield Write(piece.entry, piece.source, target, piece.destination, piece.factor)

    def scaled(self, by: Layout, dtype: DType) -> Layout:
        """The product with another layout, which is one stored tensor whose shape broadcasts to this one's.

        Both are cast to `dtype` before they are multiplied.
        """
        if len(by.pieces) != 1 or len(by.shape) > len(self.shape):
            raise NotALayoutError("a product of tensors of which neither is one stored tensor that broadcasts")
        if any(piece.factor is not None for piece in (*self.pieces, *by.pieces)):
            raise NotALayoutError("a product of more than two tensors")
        shape = (1,) * (len(self.shape) - len(by.shape)) + by.shape
        if any(size not in (1, full) for size, full in zip(shape, self.shape, strict=True)):
            raise NotALayoutError(f"a product of {self.shape} and {by.shape}")
        factor = by.pieces[0]
        strides = [0] * len(shape)
        for axis in _spread(factor, shape)[0]:
            strides[axis.dim] = axis.strides[0]
            if axis.step != 1 or axis.size != shape[axis.dim]:
                raise NotALayoutError("a product with parts of a tensor")
        view = View(factor.source.offset, self.shape, tuple(strides))
        return self._replace(pieces=tuple(_scaled(piece, factor.entry, view, dtype) for piece in self.pieces))


def stored(entry: Entry) -> Layout:
    """The layout of a stored tensor as it lies in its file."""
    return Layout(entry.shape, (Piece(entry, View.whole(entry.shape, entry.strides), View.whole(entry.shape)),))


def stack(layouts: Sequence[Layout], dim: int) -> Layout:
    """Equal shapes, along a new dimension. `ValueError` where shapes differ."""
    first = layouts[0].shape
    if any(layout.shape != first for layout in layouts):
        raise ValueError(
            f"tensors of different shapes cannot be stacked: {sorted({layout.shape for layout in layouts})}"
        )
    shape = (*first[:dim], len(layouts), *first[dim:])
    whole = View.whole(shape)
    parts = [_carry(layout.pieces, whole.select(dim, index)) for index, layout in enumerate(layouts)]
    return Layout(shape, tuple(piece for part in parts for piece in part))


def concatenate(layouts: Sequence[Layout], dim: int) -> Layout:
    """One after the other along `dim`. `ValueError` where the other dimensions differ."""
    others = {layout.shape[:dim] + layout.shape[dim + 1 :] for layout in layouts}
    if len(others) != 1:
        raise ValueError(
            f"tensors of shapes {[layout.shape for layout in layouts]} do not line up along dimension {dim}"
        )
    first = layouts[0].shape
    shape = (*first[:dim], sum(layout.shape[dim] for layout in layouts), *first[dim + 1 :])
    whole = View.whole(shape)
    pieces: list[Piece] = []
    start = 0
    for layout in layouts:
        size = layout.shape[dim]
        pieces += _carry(layout.pieces, whole.narrow(dim, start, size))
        start += size
    return Layout(shape, tuple(pieces))


def _scaled(piece: Piece, entry: Entry, view: View, dtype: DType) -> Piece:
    """The piece, multiplied by a view of a stored tensor that has the shape of the layout it is a piece of."""
    axes, start = _spread(piece, view.shape)
    (source,) = along(axes, [piece.source.offset])
    destination = placed(axes, start, View.whole(view.shape))
    return Piece(piece.entry, source, destination, Factor(entry, placed(axes, start, view), dtype))


def _carry(pieces: Sequence[Piece], outer: View) -> tuple[Piece, ...]:
    try:
        return tuple(piece.over(carried(piece.pairing, outer)) for piece in pieces)
    except ValueError as error:
        raise NotALayoutError(str(error)) from None


def _spread(piece: Piece, shape: Sequence[int]) -> tuple[list[Axis], list[int]]:
    try:
        return spread(piece.pairing, shape)
    except ValueError as error:
        raise NotALayoutError(str(error)) from None


def _clipped(
    piece: Piece, shape: tuple[int, ...], dim: int, start: int, length: int, new_shape: tuple[int, ...]
) -> Iterator[Piece]:
    """What of `piece` lies in `length` indices of `dim` from `start`, as pieces of the narrowed tensor."""
    axes, begin = _spread(piece, shape)
    coarsest_first = sorted((axis for axis in axes if axis.dim == dim), key=lambda axis: -axis.step)
    across = [axis for axis in axes if axis.dim != dim]
    begins = tuple(view.offset for view in piece.pairing[:-1])
    for kept, first, offsets in _cut(coarsest_first, begin[dim] - start, begins, length):
        chosen = [*across, *kept]
        index = [*begin[:dim], first, *begin[dim + 1 :]]
        yield piece.over((*along(chosen, offsets), placed(chosen, index, View.whole(new_shape))))


def _cut(
    axes: Sequence[Axis], first: int, offsets: tuple[int, ...], length: int
) -> Iterator[tuple[list[Axis], int, tuple[int, ...]]]:
    """The parts of nested axes, coarsest first, whose indices from `first` on lie in [0, length).

    Gives the axes of each part, its first index, and the offsets of the views before the destination there.
    """
    if not axes:
        if 0 <= first < length:
            yield [], first, offsets
        return
    axis, finer = axes[0], axes[1:]
    reach = sum((a.size - 1) * a.step for a in finer)
    index = 0
    while index < axis.size:
        position = first + index * axis.step
        here = tuple(offset + index * stride for offset, stride in zip(offsets, axis.strides, strict=True))
        inside = 0
        while index + inside < axis.size and position >= 0 and position + inside * axis.step + reach < length:
            inside += 1
        if inside:
            yield [axis._replace(size=inside), *finer], position, here
            index += inside
            continue
        if position < length and position + reach >= 0:
            yield from _cut(finer, position, here, length)
        index += 1


def _every(layout: Layout, dim: int, step: int, shape: tuple[int, ...]) -> Iterator[Piece]:
    """The pieces of every `step`-th index of `dim`, for a tensor of `shape`."""
    for index in range(shape[dim]):
        one = layout.narrow(dim, index * step, 1)
        yield from _carry(one.pieces, View.whole(shape).narrow(dim, index, 1))
