"""The direct route: stored bytes reach final storage unchanged, through any strided view."""

from __future__ import annotations

import torch

from umem.planning.views import View
from umem.planning.writes import Route
from umem.strategies.storage import Destination, raw_dtype
from umem.strategies.tiles import copy_view

__all__ = ["DirectStrategy"]


class DirectStrategy:
    """Moves items as they are; their dtype has no meaning here."""

    route = Route.DIRECT

    def deliver(
        self,
        staged: torch.Tensor,
        source: View,
        destination: Destination,
        view: View,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Copy a view of `staged` to a view of `destination`. `ValueError` for a factor: that changes numbers."""
        if factor is not None:
            raise ValueError("the direct route moves bytes; it cannot multiply")
        items = staged.view(raw_dtype(staged.element_size()))
        start = items.storage_offset() + source.offset
        copy_view(destination.region(view, raw=True), items.as_strided(source.shape, source.strides, start))
