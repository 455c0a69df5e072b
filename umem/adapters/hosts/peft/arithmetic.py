"""Adds the product of two small matrices to a large one, in place and tile by tile, as peft's merge does it whole.

A weight is seen as a matrix of (out, in) elements, whichever way it lies in memory. Operations and their order are
those of peft 0.21 without `safe_merge`; only the matrix product sees a part of its rows or columns at a time, so its
last bits may depend on the tile where the library's kernel sums in another order for another size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

__all__ = ["Product", "add_product", "scale_rows"]

#: A tile is held as the product, the changed weight, and a rounded or squared copy of it.
_COPIES_OF_A_TILE = 4


class Product(NamedTuple):
    """`scaling * (left @ right)`, rounded on the way as peft rounds it.

    Attributes
    ----------
    left, right
        B of shape (out, rank) and A of shape (rank, in).
    scaling
        A plain number.
    roundings
        The dtypes that the product is cast to, one after the other, before it is added.
    """

    left: torch.Tensor
    right: torch.Tensor
    scaling: float
    roundings: tuple[torch.dtype, ...] = ()

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows `start` to `stop` of the product."""
        return self._rounded(self.left[start:stop] @ self.right)

    def columns(self, start: int, stop: int) -> torch.Tensor:
        """Columns `start` to `stop` of the product."""
        return self._rounded(self.left @ self.right[:, start:stop])

    def _rounded(self, product: torch.Tensor) -> torch.Tensor:
        product *= self.scaling
        for dtype in self.roundings:
            product = product.to(dtype)
        return product


def add_product(matrix: torch.Tensor, product: Product, *, tile_bytes: int) -> None:
    """`matrix += product`, for a view of (out, in) elements.

    Tiles are rows; columns where the matrix lies column by column in memory.
    """
    by_rows = matrix.stride(0) >= matrix.stride(1)
    if by_rows:
        for start, stop in _tiles(matrix.shape[0], matrix.shape[1], product, tile_bytes):
            matrix[start:stop] += product.rows(start, stop)
    else:
        for start, stop in _tiles(matrix.shape[1], matrix.shape[0], product, tile_bytes):
            matrix[:, start:stop] += product.columns(start, stop)


def scale_rows(matrix: torch.Tensor, product: Product, magnitude: torch.Tensor, *, tile_bytes: int) -> None:
    """DoRA: `matrix = magnitude / |matrix + product| * (matrix + product)`, where |.| is the 2-norm of each row.

    A tile holds whole rows, for their norms. `magnitude` has one element a row.
    """
    for start, stop in _tiles(matrix.shape[0], matrix.shape[1], product, tile_bytes):
        rows = matrix[start:stop]
        changed = rows + product.rows(start, stop)
        norm = torch.linalg.norm(changed, dim=1).to(changed.dtype)
        factor = magnitude[start:stop] / norm
        rows.copy_(factor.view(-1, 1) * changed)


def _tiles(count: int, across: int, product: Product, tile_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of `count` lines of `across` elements each, so that what is live for one stays below `tile_bytes`."""
    line_bytes = across * max(product.left.element_size(), 4) * _COPIES_OF_A_TILE
    step = max(1, tile_bytes // max(1, line_bytes))
    for start in range(0, count, step):
        yield start, min(count, start + step)
