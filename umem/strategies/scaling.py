"""Products of stored numbers with factors, tile by tile, so that what is in between stays in the cache.

FP8 numbers are decoded by way of float16, which holds them all: torch's own cast takes ten times as long (measured on
one core of the two-core machine: 4 ms for a million E4M3 numbers against 0.4). The result is torch's, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from umem.strategies.tiles import copy_view

__all__ = ["PRODUCT_BYTES", "copy_product"]

_TILE_ITEMS = 1 << 17

#: What a call holds besides the views: a tile of numbers and their product, and of 16-bit codes, for dtypes of 4 bytes.
PRODUCT_BYTES = _TILE_ITEMS * (4 + 4 + 2)

#: E4M3 has the bits of a float16 that is 256 times smaller, less its seven lowest; its one NaN would be 480.
_E4M3_SHIFT, _E4M3_SCALE, _E4M3_NAN = 7, 256.0, 480.0
_E4M3_KEPT = -0x4001  # all but the second highest bit, into which the shift moves a copy of the sign
_E5M2_SHIFT = 8


def copy_product(into: torch.Tensor, items: torch.Tensor, factor: torch.Tensor) -> None:
    """`into.copy_(items.to(factor.dtype) * factor)`, for views of one shape."""
    for tile in _tiles(tuple(into.shape), _TILE_ITEMS):
        copy_view(into[tile], _decoded(items[tile], factor.dtype).mul(factor[tile]))


def _tiles(shape: tuple[int, ...], most: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices that cut a tensor of `shape` into parts of at most `most` items, whole in its last dimensions."""
    dim, inner = len(shape), 1
    while dim and inner * shape[dim - 1] <= most:
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield ()
        return
    step = most // inner
    for outer in itertools.product(*(range(size) for size in shape[: dim - 1])):
        for low in range(0, shape[dim - 1], step):
            yield (*outer, slice(low, low + step))


def _decoded(items: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`items.to(dtype)`, for a dtype that holds them all."""
    if items.device.type == "cpu" and items.dtype == torch.float8_e4m3fn:
        numbers = _as_float16(items, _E4M3_SHIFT).to(dtype).mul_(_E4M3_SCALE)
        if _has_nan(items):
            numbers.masked_fill_(numbers.abs() == _E4M3_NAN, torch.nan)
        return numbers
    if items.device.type == "cpu" and items.dtype == torch.float8_e5m2:
        return _as_float16(items, _E5M2_SHIFT).to(dtype)
    return items.to(dtype)


def _as_float16(items: torch.Tensor, shift: int) -> torch.Tensor:
    """The float16 numbers whose bits are those of 8-bit numbers, moved up; the sign stays the highest."""
    codes = items.view(torch.int8).to(torch.int16).bitwise_left_shift_(shift)
    return codes.bitwise_and_(_E4M3_KEPT if shift == _E4M3_SHIFT else -1).view(torch.float16)


def _has_nan(items: torch.Tensor) -> bool:
    """Whether E4M3 numbers include a NaN, whose bits are all set but for the sign."""
    codes = items.view(torch.int8)
    return bool(codes.amax() == 0x7F) or bool((codes == -1).any())
