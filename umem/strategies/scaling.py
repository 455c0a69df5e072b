"""Products of stored numbers with factors, tile by tile, so that what is in between stays in the cache.

FP8 numbers are decoded by way of float16, which holds them all: torch's own cast takes ten times as long (measured on
one core of the two-core machine: 4 ms for a million E4M3 numbers against 0.4). The result is torch's, to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from umem.strategies.tiles import copy_touched, fault_in_view

__all__ = ["PRODUCT_BYTES", "copy_product"]

_TILE_ITEMS = 1 << 18

#: What a call holds besides the views: a tile of numbers, of 8 bytes at most, and of 16-bit codes.
PRODUCT_BYTES = _TILE_ITEMS * (8 + 2)

#: E4M3 has the bits of a float16 that is 256 times smaller, less its seven lowest. Its NaNs, all bits set but for the
#: sign, would come out as 480.
_E4M3_SHIFT, _E4M3_SCALE, _E4M3_NAN = 7, 256.0, 480.0
_E4M3_KEPT = -0x4001  # all but the second highest bit, into which the shift moves a copy of the sign
_E5M2_SHIFT = 8
_DECODED = (torch.float8_e4m3fn, torch.float8_e5m2)


def copy_product(into: torch.Tensor, items: torch.Tensor, factor: torch.Tensor) -> None:
    """`into.copy_(items.to(factor.dtype) * factor)`, for views of one shape."""
    if into.numel() == 0:
        return
    fault_in_view(into)
    count, shape = min(_TILE_ITEMS, into.numel()), tuple(into.shape)
    decodes = items.device.type == "cpu" and items.dtype in _DECODED
    numbers = torch.empty(count, dtype=factor.dtype, device=into.device)
    codes = torch.empty(count if decodes else 0, dtype=torch.int16)
    product, code = numbers, codes
    has_nan = items.dtype == torch.float8_e4m3fn and _has_nan(items)
    for tile in _tiles(shape, _TILE_ITEMS):
        target = into[tile]
        if product.shape != target.shape:
            product = numbers[: target.numel()].view(target.shape)
            code = codes[: target.numel()].view(target.shape) if decodes else codes
        if decodes:
            _decode(product, items[tile], code, has_nan=has_nan)
        else:
            product.copy_(items[tile])
        copy_touched(target, product.mul_(factor[tile]))


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


def _decode(into: torch.Tensor, items: torch.Tensor, codes: torch.Tensor, *, has_nan: bool) -> None:
    """`into.copy_(items)`, for FP8 numbers and a dtype that holds them all; `codes` is scratch of that shape."""
    codes.copy_(items.view(torch.int8))
    if items.dtype == torch.float8_e5m2:
        into.copy_(codes.bitwise_left_shift_(_E5M2_SHIFT).view(torch.float16))
        return
    into.copy_(codes.bitwise_left_shift_(_E4M3_SHIFT).bitwise_and_(_E4M3_KEPT).view(torch.float16))
    into.mul_(_E4M3_SCALE)
    if has_nan:
        into.masked_fill_(into.abs() == _E4M3_NAN, torch.nan)


def _has_nan(items: torch.Tensor) -> bool:
    """Whether E4M3 numbers include a NaN: the largest code there is with either sign."""
    return int(items.view(torch.int8).amax()) == 0x7F or int(items.view(torch.uint8).amax()) == 0xFF
