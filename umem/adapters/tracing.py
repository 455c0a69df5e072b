"""Runs ordinary torch code on layouts, to learn where the elements go without moving one.

A `TracedTensor` has a shape, a dtype and a `Layout` in place of storage. Code that only moves elements (stack, cat,
chunk, transpose, reshape, slicing ...) or multiplies them once runs on it unchanged and gives traced tensors; the first
step that needs numbers otherwise raises `NotALayoutError`. Casts are followed as long as they come to one cast before
a product and one after it. So a framework's own conversion code is compiled by running it, whatever it is
made of, and a step that the framework adds later works here without a change, or is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from umem._types import DType
from umem.adapters.layout import Layout, NotALayoutError, concatenate, stack
from umem.strategies.storage import torch_dtype

__all__ = ["TracedTensor"]

_aten = torch.ops.aten


class TracedTensor(torch.Tensor):
    """A tensor without storage that knows its layout."""

    layout_of_elements: Layout

    def __new__(cls, layout: Layout, dtype: torch.dtype, device: torch.device | None = None) -> Self:
        """A tensor of that layout; `dtype` is what the elements are cast to before anything else happens."""
        traced = torch.Tensor._make_wrapper_subclass(cls, layout.shape, dtype=dtype, device=device)
        traced.layout_of_elements = layout
        return traced

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TracedTensor({tuple(self.shape)}, {self.dtype}, {len(self.layout_of_elements.pieces)} pieces)"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        numeric = _NUMERIC.get(func)
        if numeric is not None:
            return numeric(*args, **(kwargs or {}))
        handler = _MOVES.get(func)
        if handler is None:
            raise NotALayoutError(f"{func} is no move of elements")
        dtype, device = _in_common(func, args)
        plain = tree_map(
            lambda value: value.layout_of_elements if isinstance(value, TracedTensor) else value, list(args)
        )
        result = handler(*plain, **(kwargs or {}))
        if isinstance(result, list):
            return [TracedTensor(layout, dtype, device) for layout in result]
        return TracedTensor(result, dtype, device)


def _in_common(func: Any, args: Sequence[Any]) -> tuple[torch.dtype, torch.device]:
    """The dtype and the device of all tensors among the arguments."""
    tensors = [tensor for tensor in _tensors(args) if isinstance(tensor, TracedTensor)]
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1 or len(tensors) != len(_tensors(args)):
        raise NotALayoutError(f"{func} mixes dtypes, or stored tensors with others")
    return tensors[0].dtype, tensors[0].device


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _dim(dim: int, count: int) -> int:
    return dim + count if dim < 0 else dim


def _same(layout: Layout, *_args: Any, **_kwargs: Any) -> Layout:
    return layout


def _view(layout: Layout, shape: Sequence[int]) -> Layout:
    sizes = list(shape)
    if -1 in sizes:
        known = 1
        for size in sizes:
            known *= size if size != -1 else 1
        total = 1
        for size in layout.shape:
            total *= size
        sizes[sizes.index(-1)] = total // known if known else 0
    return layout.reshape(sizes)


def _permute(layout: Layout, order: Sequence[int]) -> Layout:
    return layout.permute([_dim(dim, len(layout.shape)) for dim in order])


def _transpose(layout: Layout, first: int, second: int) -> Layout:
    count = len(layout.shape)
    return layout.transpose(_dim(first, count), _dim(second, count))


def _t(layout: Layout) -> Layout:
    return layout.transpose(0, 1) if len(layout.shape) == 2 else layout


def _cat(layouts: Sequence[Layout], dim: int = 0) -> Layout:
    return concatenate(layouts, _dim(dim, len(layouts[0].shape)))


def _stack(layouts: Sequence[Layout], dim: int = 0) -> Layout:
    return stack(layouts, _dim(dim, len(layouts[0].shape) + 1))


def _split(layout: Layout, size: int, dim: int = 0) -> list[Layout]:
    dim = _dim(dim, len(layout.shape))
    total = layout.shape[dim]
    sizes = [min(size, total - start) for start in range(0, total, size)] or [0]
    return layout.split(sizes, dim)


def _split_with_sizes(layout: Layout, sizes: Sequence[int], dim: int = 0) -> list[Layout]:
    return layout.split(sizes, _dim(dim, len(layout.shape)))


def _slice(layout: Layout, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Layout:
    dim = _dim(dim, len(layout.shape))
    indices = range(*slice(start, end, step).indices(layout.shape[dim]))
    return layout.narrow(dim, indices.start if indices else 0, len(indices), step)


def _select(layout: Layout, dim: int, index: int) -> Layout:
    dim = _dim(dim, len(layout.shape))
    return layout.select(dim, _dim(index, layout.shape[dim]))


def _unbind(layout: Layout, dim: int = 0) -> list[Layout]:
    dim = _dim(dim, len(layout.shape))
    return [layout.select(dim, index) for index in range(layout.shape[dim])]


def _unsqueeze(layout: Layout, dim: int) -> Layout:
    dim = _dim(dim, len(layout.shape) + 1)
    return layout.reshape((*layout.shape[:dim], 1, *layout.shape[dim:]))


def _squeeze(layout: Layout, dim: int | Sequence[int] | None = None) -> Layout:
    count = len(layout.shape)
    chosen = range(count) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {_dim(d, count) for d in chosen if layout.shape[d] == 1}
    return layout.reshape([size for d, size in enumerate(layout.shape) if d not in gone])


def _to_copy(tensor: TracedTensor, **kwargs: Any) -> TracedTensor:
    """A cast; what the elements went through before must come to nothing, so that one cast does for all."""
    dtype = kwargs.get("dtype") or tensor.dtype
    if dtype != tensor.dtype:
        pieces = tensor.layout_of_elements.pieces
        before = {piece.entry.dtype if piece.factor is None else piece.factor.dtype for piece in pieces}
        is_packed = any(piece.entry.dtype.bits < 8 for piece in pieces)
        if is_packed or not (dtype.is_floating_point and tensor.dtype.is_floating_point):
            raise NotALayoutError(f"a cast from {tensor.dtype} to {dtype}")
        if not all(_holds(tensor.dtype, torch_dtype(narrow)) for narrow in before):
            raise NotALayoutError(f"a second cast, from {tensor.dtype} to {dtype}")
    return TracedTensor(tensor.layout_of_elements, dtype, tensor.device)


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every number of `narrow` is one of `wide`, which is a floating-point dtype."""
    if wide == narrow or not narrow.is_floating_point:
        return wide == narrow
    more, less = torch.finfo(wide), torch.finfo(narrow)
    return more.max >= less.max and more.eps <= less.eps and more.tiny * more.eps <= less.tiny * less.eps


def _mul(first: Any, second: Any) -> TracedTensor:
    dtype, device = _in_common("a product", [first, second])
    if not (isinstance(first, TracedTensor) and isinstance(second, TracedTensor)):
        raise NotALayoutError("a product with a number")
    large, small = first.layout_of_elements, second.layout_of_elements
    if prod(small.shape) > prod(large.shape):
        large, small = small, large
    return TracedTensor(large.scaled(small, DType.from_torch(dtype)), dtype, device)


_NUMERIC: dict[Any, Callable[..., TracedTensor]] = {
    _aten.mul.Tensor: _mul,
    _aten._to_copy.default: _to_copy,
}

_MOVES: dict[Any, Callable[..., Layout | list[Layout]]] = {
    _aten.alias.default: _same,
    _aten.cat.default: _cat,
    _aten.clone.default: _same,
    _aten.detach.default: _same,
    _aten.permute.default: _permute,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _split_with_sizes,
    _aten.squeeze.default: _squeeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    _aten.stack.default: _stack,
    _aten.t.default: _t,
    _aten.transpose.int: _transpose,
    _aten.unbind.int: _unbind,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.view.default: _view,
    _aten._reshape_alias.default: lambda layout, shape, _strides: _view(layout, shape),
    _aten._unsafe_view.default: _view,
}
