"""A picture of a load: memory over time, stacked by kind, with the phases and the forecast. One self-contained SVG.

Colours follow the reader's light or dark setting. Numbers on the axes are growth since the load began.
"""

from __future__ import annotations

from html import escape

from umem._types import format_bytes
from umem.report.model import LoadReport
from umem.report.svg import Plot, area, byte_grid

__all__ = ["memory_chart"]

_WIDTH, _HEIGHT = 860, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 64, 64
_NARROWEST_LABEL = 46

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
    forecast = report.plan.forecast.peak_bytes
    upper = [low + high for low, high in zip(process, cache, strict=True)]
    plot = Plot(
        left=_LEFT,
        top=_TOP,
        width=_WIDTH - _LEFT - _RIGHT,
        height=_HEIGHT - _TOP - _BOTTOM,
        last=max(times[-1], 1e-6),
        highest=max(1.0, 1.08 * max(forecast, *upper)),
    )
    floor = [0.0] * len(times)
    parts = [
        f'<text class="title" x="{_LEFT}" y="24">{escape(_title(report))}</text>',
        _legend(),
        *byte_grid(plot),
        f'<path class="model" d="{area(plot, times, process, floor)}"/>',
        f'<path class="cache" d="{area(plot, times, upper, process)}"/>',
        *_forecast_line(forecast, plot),
        *_phases(report, plot),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="memory over time"><style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _forecast_line(forecast: int, plot: Plot) -> tuple[str, str]:
    height, label = plot.y(forecast), f"forecast peak {format_bytes(forecast)}"
    return (
        f'<line class="forecast" x1="{plot.left}" x2="{plot.right}" y1="{height:.1f}" y2="{height:.1f}"/>',
        f'<text class="forecast-text" text-anchor="end" x="{plot.right}" y="{height - 5:.1f}">{label}</text>',
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


def _legend() -> str:
    return (
        f'<rect class="model" x="{_LEFT}" y="36" width="12" height="12"/>'
        f'<text x="{_LEFT + 18}" y="46">memory of the process</text>'
        f'<rect class="cache" x="{_LEFT + 180}" y="36" width="12" height="12"/>'
        f'<text x="{_LEFT + 198}" y="46">page cache of the files</text>'
    )


def _phases(report: LoadReport, plot: Plot) -> list[str]:
    parts = []
    for name, start, end in report.spans:
        left, right = plot.x(start - report.started_s), plot.x(end - report.started_s)
        parts.append(f'<line class="edge" x1="{left:.1f}" x2="{left:.1f}" y1="{plot.top}" y2="{plot.base + 6}"/>')
        if right - left >= _NARROWEST_LABEL:
            label = f"{name} {report.seconds.get(name, end - start):.2f} s"
            parts.append(f'<text class="faint" x="{left + 4:.1f}" y="{plot.base + 18}">{escape(label)}</text>')
    parts.append(
        f'<text class="faint" text-anchor="end" x="{plot.right}" y="{plot.base + 44}">{plot.last:.2f} s</text>'
    )
    parts.append(f'<text class="faint" x="{plot.left}" y="{plot.base + 44}">0 s</text>')
    return parts
