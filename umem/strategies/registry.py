"""The strategies there are, by the route that they serve."""

from __future__ import annotations

from umem.planning.writes import Route
from umem.strategies.base import BlockStrategy, GroupStrategy
from umem.strategies.direct import DirectStrategy
from umem.strategies.materialized import MaterializedStrategy
from umem.strategies.streaming import StreamingStrategy

__all__ = [
    "BLOCK_STRATEGIES",
    "GROUP_STRATEGIES",
    "block_strategy",
    "group_strategy",
    "is_block_route",
    "is_group_route",
]

BLOCK_STRATEGIES: dict[Route, BlockStrategy] = {
    strategy.route: strategy for strategy in (DirectStrategy(), StreamingStrategy())
}
GROUP_STRATEGIES: dict[Route, GroupStrategy] = {strategy.route: strategy for strategy in (MaterializedStrategy(),)}


def is_block_route(route: Route) -> bool:
    """Whether the executor reads for this route, block by block."""
    return route in BLOCK_STRATEGIES


def is_group_route(route: Route) -> bool:
    """Whether a strategy does the groups of this route by itself."""
    return route in GROUP_STRATEGIES


def block_strategy(route: Route) -> BlockStrategy:
    """The strategy of a block route."""
    return BLOCK_STRATEGIES[route]


def group_strategy(route: Route) -> GroupStrategy:
    """The strategy of a group route."""
    return GROUP_STRATEGIES[route]
