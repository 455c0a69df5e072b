"""Numbers that are stored with scales: what they stand for, in ordinary torch code.

It runs on tensors, and on traced tensors to learn which scale multiplies which element. Covered: floats of 8 bits with
one scale for each block of a matrix, or one for all. Packed formats of fewer bits, and scales that are stored as bare
exponents, are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

__all__ = ["dequantized"]


def dequantized(weight: torch.Tensor, scales: torch.Tensor, block: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`weight[..., i, j] * scales[..., i // block[0], j // block[1]]`, multiplied in float32, cast to `dtype`.

    Parameters
    ----------
    weight
        [..., rows, columns]; the last blocks may be cut short.
    scales
        [..., ceil(rows / block[0]), ceil(columns / block[1])], or one number for the whole tensor.

    Raises
    ------
    ValueError
        The scales are no such grid.
    """
    numbers, factors = weight.to(torch.float32), scales.to(torch.float32)
    if scales.numel() == 1:
        return (numbers * factors.reshape((1,) * weight.dim())).to(dtype)
    grid = tuple(-(-size // step) for size, step in zip(weight.shape[-2:], block, strict=True))
    if tuple(scales.shape) != (*weight.shape[:-2], *grid):
        raise ValueError(
            f"a weight of {list(weight.shape)} in blocks of {list(block)} has scales of "
            f"{[*weight.shape[:-2], *grid]}, not {list(scales.shape)}"
        )
    bands = [
        torch.cat(
            [_product(numbers, factors, rows, columns, block) for columns in _bands(weight.shape[-1], block[1])], -1
        )
        for rows in _bands(weight.shape[-2], block[0])
    ]
    return torch.cat(bands, -2).to(dtype)


def _bands(size: int, step: int) -> Iterator[range]:
    """The indices in whole blocks, then those in the last block if that is cut short."""
    whole = size // step * step
    if whole:
        yield range(whole)
    if size > whole:
        yield range(whole, size)


def _product(
    numbers: torch.Tensor, factors: torch.Tensor, rows: range, columns: range, block: Sequence[int]
) -> torch.Tensor:
    """The part of the product whose blocks are all alike."""
    part = numbers[..., rows.start : rows.stop, columns.start : columns.stop]
    (top, bottom), (left, right) = (
        (band.start // step, -(-band.stop // step)) for band, step in zip((rows, columns), block, strict=True)
    )
    by = factors[..., top:bottom, left:right]
    leading, (down, across) = part.shape[:-2], by.shape[-2:]
    tiled = part.reshape(*leading, down, len(rows) // down, across, len(columns) // across)
    return (tiled * by.reshape(*leading, down, 1, across, 1)).reshape(part.shape)
