"""The pieces of a picture: a plot area with its scales, a grid in binary units, areas between two series. SVG text.

What is drawn and in which colours is the business of whoever draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from umem._types import format_bytes

__all__ = ["Plot", "area", "byte_grid", "line"]

_MOST_STEPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Where a plot lies in its picture, and the values at its right and upper edge; the other edges are 0."""

    left: float
    top: float
    width: float
    height: float
    last: float
    highest: float

    @property
    def right(self) -> float:
        """The right edge."""
        return self.left + self.width

    @property
    def base(self) -> float:
        """The lower edge."""
        return self.top + self.height

    def x(self, value: float) -> float:
        """From left to right; what lies outside is put on the edge."""
        return self.left + self.width * min(max(value / self.last, 0.0), 1.0)

    def y(self, value: float) -> float:
        """From bottom to top."""
        return self.base - self.height * value / self.highest


def area(plot: Plot, times: Sequence[float], upper: Sequence[float], lower: Sequence[float]) -> str:
    """The outline between two series, as the `d` of a path."""
    forth = [f"{plot.x(time):.1f},{plot.y(value):.1f}" for time, value in zip(times, upper, strict=True)]
    back = [
        f"{plot.x(time):.1f},{plot.y(value):.1f}" for time, value in zip(reversed(times), reversed(lower), strict=True)
    ]
    return f"M{' L'.join(forth + back)} Z"


def line(plot: Plot, times: Sequence[float], values: Sequence[float]) -> str:
    """A series, as the `d` of a path."""
    return "M" + " L".join(f"{plot.x(time):.1f},{plot.y(value):.1f}" for time, value in zip(times, values, strict=True))


def byte_grid(plot: Plot) -> list[str]:
    """Lines across the plot at sizes that are round in binary units, with their labels at the left."""
    lines = []
    step = 1.0
    while plot.highest / step > _MOST_STEPS:
        step *= 2
    for number in range(int(plot.highest / step) + 1):
        height = plot.y(number * step)
        label = format_bytes(number * step).replace(".00", "")
        lines.append(f'<line class="grid" x1="{plot.left}" x2="{plot.right}" y1="{height:.1f}" y2="{height:.1f}"/>')
        lines.append(f'<text class="faint" text-anchor="end" x="{plot.left - 8}" y="{height + 4:.1f}">{label}</text>')
    return lines
