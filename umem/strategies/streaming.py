"""The streaming route: numbers change on the way, piece by piece inside the window: casts, and a factor after them."""

from __future__ import annotations

import torch

from umem.planning.views import View
from umem.planning.writes import Route
from umem.strategies.storage import Destination
from umem.strategies.tiles import copy_view

__all__ = ["StreamingStrategy"]


class StreamingStrategy:
    """Casts as torch does (`copy_` rounds exactly as `Tensor.to`), and multiplies as torch does, in the final dtype."""

    route = Route.STREAMING

    def deliver(
        self,
        staged: torch.Tensor,
        source: View,
        destination: Destination,
        view: View,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Cast a view of `staged` into a view of `destination`, and multiply it there by `factor`."""
        region = destination.region(view, raw=False)
        start = staged.storage_offset() + source.offset
        copy_view(region, staged.as_strided(source.shape, source.strides, start))
        if factor is not None:
            region.mul_(factor.to(region.device, region.dtype))
