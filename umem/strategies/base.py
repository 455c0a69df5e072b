"""What a strategy is, and which there are.

A *block* strategy delivers one staged piece of a stored tensor into final storage; the executor reads for it, in file
order over all groups. A *group* strategy does a whole group by itself. Each strategy serves one route of a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from umem.checkpoint.entries import Entry
from umem.planning.views import View
from umem.planning.writes import Group, Route
from umem.strategies.storage import Destination
from umem.strategies.window import Window

__all__ = ["BlockStrategy", "Converter", "GroupStrategy", "ReadWhole"]

#: Runs a conversion: given the group's name and its stored tensors by name, the final tensors by target name.
Converter = Callable[[str, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]

#: Reads stored tensors whole into memory of their own.
ReadWhole = Callable[[tuple[Entry, ...]], Mapping[str, torch.Tensor]]


class BlockStrategy(Protocol):
    """Delivers staged pieces."""

    route: Route

    def deliver(
        self,
        staged: torch.Tensor,
        source: View,
        destination: Destination,
        view: View,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Fill `view`, placed in `destination`, from `source`, a view of `staged`: a flat run of stored items.

        `factor`, of the same shape, multiplies what is written, which is cast to the factor's dtype for that.
        """


class GroupStrategy(Protocol):
    """Does a whole group."""

    route: Route

    def run(
        self, group: Group, read: ReadWhole, convert: Converter, window: Window, destinations: Mapping[str, Destination]
    ) -> dict[str, torch.Tensor]:
        """The final tensors of the group by target name; those that `destinations` holds are filled in place."""
