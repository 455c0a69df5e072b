"""The streaming route: numbers change on the way, piece by piece inside the window, by casts and by factors."""

from __future__ import annotations

import torch

from umem.planning.views import View
from umem.planning.writes import Route
from umem.strategies.scaling import copy_product
from umem.strategies.storage import Destination
from umem.strategies.tiles import copy_view

__all__ = ["StreamingStrategy"]


class StreamingStrategy:
    """Casts and multiplies as torch does (`copy_` rounds exactly as `Tensor.to`)."""

    route = Route.STREAMING

    def deliver(
        self,
        staged: torch.Tensor,
        source: View,
        destination: Destination,
        view: View,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Cast a view of `staged` into a view of `destination`, multiplied by `factor` before."""
        region = destination.region(view, raw=False)
        items = staged.as_strided(source.shape, source.strides, staged.storage_offset() + source.offset)
        if factor is None:
            copy_view(region, items)
        else:
            copy_product(region, items, factor)
