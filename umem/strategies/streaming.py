"""The streaming route: numbers change on the way, piece by piece inside the window. So far: casts between dtypes."""

from __future__ import annotations

import torch

from umem.planning.views import View
from umem.planning.writes import Route
from umem.strategies.storage import Destination

__all__ = ["StreamingStrategy"]


class StreamingStrategy:
    """Casts as torch casts: `copy_` rounds exactly as `Tensor.to` does."""

    route = Route.STREAMING

    def deliver(self, staged: torch.Tensor, source: View, destination: Destination, view: View) -> None:
        """Cast a view of `staged` into a view of `destination`."""
        destination.region(view, raw=False).copy_(staged.as_strided(source.shape, source.strides, source.offset))
