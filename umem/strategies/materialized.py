"""The materialized route: a conversion that is no set of views is run by its owner, on whole tensors of one group.

It is the fallback: reported with its reason and bytes, run one group at a time, held against what the plan promised.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from umem.errors import IncompleteConversionError
from umem.planning.writes import Group, Route
from umem.strategies.base import Converter, ReadWhole
from umem.strategies.storage import Destination
from umem.strategies.window import Window

__all__ = ["MaterializedStrategy"]


class MaterializedStrategy:
    """Reads a group's tensors whole and hands them to their owner."""

    route = Route.MATERIALIZED

    def run(
        self, group: Group, read: ReadWhole, convert: Converter, window: Window, destinations: Mapping[str, Destination]
    ) -> dict[str, torch.Tensor]:
        """The owner's tensors, checked; targets with storage of their own are filled from them.

        Raises
        ------
        IncompleteConversionError
            A promised target was not given, or has another shape.
        """
        with window.holding(group.scratch_bytes):
            given = dict(convert(group.name, read(group.entries)))
            missing = [name for name in group.targets if name not in given]
            if missing:
                raise IncompleteConversionError("gave no tensor for", conversion=group.name, targets=missing)
            for name, tensor in given.items():
                destination = destinations.get(name)
                if destination is None:
                    continue
                if destination.tensor.shape != tensor.shape:
                    raise IncompleteConversionError(
                        f"gave {list(tensor.shape)} where the model has {list(destination.tensor.shape)}",
                        conversion=group.name,
                        targets=[name],
                    )
                destination.tensor.copy_(tensor)
                given[name] = destination.tensor
            return given
