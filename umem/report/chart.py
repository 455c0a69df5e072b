"""A picture of a load: memory over time, stacked by kind, with the phases and the forecast. One self-contained SVG.

Colours follow the reader's light or dark setting. Numbers on the axes are growth since the load began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from umem._types import format_bytes
from umem.report.model import LoadReport

__all__ = ["memory_chart"]

_WIDTH, _HEIGHT = 860, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 64, 64
_PLOT_WIDTH, _PLOT_HEIGHT = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
_NARROWEST_LABEL = 46

#: From a value to a place in the picture.
_Scale = Callable[[float], float]

_STYLE = """
svg { font: 12px system-ui, sans-serif; background: #fff; color: #1f2430 }
text { fill: currentColor } .faint { opacity: .65 } .title { font-size: 15px; font-weight: 600 }
.grid { stroke: currentColor; opacity: .15 } .edge { stroke: currentColor; opacity: .3; stroke-dasharray: 2 3 }
.model { fill: #3b6fd4; fill-opacity: .75 } .cache { fill: #e0902f; fill-opacity: .8 }
.forecast { stroke: #c0392b; stroke-width: 1.5; stroke-dasharray: 6 4; fill: none } .forecast-text { fill: #c0392b }
@media (prefers-color-scheme: dark) { svg { background: #14171f; color: #e6e8ee }
  .model { fill: #6d9bf1 } .cache { fill: #f0b060 } .forecast { stroke: #ff7b6b } .forecast-text { fill: #ff7b6b } }
"""


def memory_chart(report: LoadReport) -> str:
    """The SVG text of the load's memory over time."""
    times, process, cache = _series(report)
    duration = max(times[-1], 1e-6)
    forecast = report.plan.forecast.peak_bytes
    top = max(1.0, 1.08 * max(forecast, *(low + high for low, high in zip(process, cache, strict=True))))

    def x(time_s: float) -> float:
        return _LEFT + _PLOT_WIDTH * min(max(time_s / duration, 0.0), 1.0)

    def y(count: float) -> float:
        return _TOP + _PLOT_HEIGHT * (1 - count / top)

    upper = [low + high for low, high in zip(process, cache, strict=True)]
    floor = [0.0] * len(times)
    parts = [
        f'<text class="title" x="{_LEFT}" y="24">{escape(_title(report))}</text>',
        _legend(),
        *_grid(top, y),
        f'<path class="model" d="{_area(times, process, floor, x, y)}"/>',
        f'<path class="cache" d="{_area(times, upper, process, x, y)}"/>',
        *_forecast_line(forecast, y(forecast)),
        *_phases(report, duration, x),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="memory over time"><style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _forecast_line(forecast: int, height: float) -> tuple[str, str]:
    right, label = _LEFT + _PLOT_WIDTH, f"forecast peak {format_bytes(forecast)}"
    return (
        f'<line class="forecast" x1="{_LEFT}" x2="{right}" y1="{height:.1f}" y2="{height:.1f}"/>',
        f'<text class="forecast-text" text-anchor="end" x="{right}" y="{height - 5:.1f}">{label}</text>',
    )


def _title(report: LoadReport) -> str:
    size = format_bytes(report.plan.forecast.final_bytes)
    return f"{size} in {report.total_s:.2f} s, measured peak {format_bytes(report.measured_peak_bytes)}"


def _series(report: LoadReport) -> tuple[list[float], list[float], list[float]]:
    """Seconds since the start, growth of the process's memory, growth of the files' page cache."""
    first = report.samples[0]
    times, process, cache = [], [], []
    for sample in report.samples:
        memory = sample.memory
        own = (memory.anonymous_bytes or 0) + (memory.shared_bytes or 0)
        own -= (first.memory.anonymous_bytes or 0) + (first.memory.shared_bytes or 0)
        times.append(memory.time_s - first.memory.time_s)
        process.append(float(max(0, own)))
        cache.append(float(max(0, (sample.cached_file_bytes or 0) - (first.cached_file_bytes or 0))))
    return times, process, cache


def _area(times: Sequence[float], upper: Sequence[float], lower: Sequence[float], x: _Scale, y: _Scale) -> str:
    forth = [f"{x(time):.1f},{y(value):.1f}" for time, value in zip(times, upper, strict=True)]
    back = [f"{x(time):.1f},{y(value):.1f}" for time, value in zip(reversed(times), reversed(lower), strict=True)]
    return f"M{' L'.join(forth + back)} Z"


def _legend() -> str:
    return (
        f'<rect class="model" x="{_LEFT}" y="36" width="12" height="12"/>'
        f'<text x="{_LEFT + 18}" y="46">memory of the process</text>'
        f'<rect class="cache" x="{_LEFT + 180}" y="36" width="12" height="12"/>'
        f'<text x="{_LEFT + 198}" y="46">page cache of the files</text>'
    )


def _grid(top: float, y: _Scale) -> list[str]:
    lines = []
    step = 1.0
    while top / step > 6:
        step *= 2  # powers of two are round in binary units
    for number in range(int(top / step) + 1):
        height = y(number * step)
        label = format_bytes(number * step).replace(".00", "")
        lines.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _PLOT_WIDTH}" y1="{height:.1f}" y2="{height:.1f}"/>'
        )
        lines.append(f'<text class="faint" text-anchor="end" x="{_LEFT - 8}" y="{height + 4:.1f}">{label}</text>')
    return lines


def _phases(report: LoadReport, duration: float, x: _Scale) -> list[str]:
    base = _TOP + _PLOT_HEIGHT
    parts = []
    for name, start, end in report.spans:
        left, right = x(start - report.started_s), x(end - report.started_s)
        parts.append(f'<line class="edge" x1="{left:.1f}" x2="{left:.1f}" y1="{_TOP}" y2="{base + 6}"/>')
        if right - left >= _NARROWEST_LABEL:
            label = f"{name} {report.seconds.get(name, end - start):.2f} s"
            parts.append(f'<text class="faint" x="{left + 4:.1f}" y="{base + 18}">{escape(label)}</text>')
    parts.append(
        f'<text class="faint" text-anchor="end" x="{_LEFT + _PLOT_WIDTH}" y="{base + 44}">{duration:.2f} s</text>'
    )
    parts.append(f'<text class="faint" x="{_LEFT}" y="{base + 44}">0 s</text>')
    return parts
