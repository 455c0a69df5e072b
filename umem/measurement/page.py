"""A measured time to first forward as one HTML page: memory over time, the runs as bars, ratios, where it comes from.

The page needs nothing but itself: no scripts, no fonts, no network. Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from umem._types import format_bytes
from umem.measurement.table import detail_rows, headline, origin, verdict
from umem.report.svg import Plot, area, byte_grid, line

__all__ = ["html_table", "page_of", "section", "ttff_page"]

_Result = Mapping[str, Any]
_Run = Mapping[str, Any]

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2430; --rule: #d9dce3; --faint: #5c6473;
  --anonymous: #3b6fd4; --shared: #7d55c7; --cache: #e0902f; --fall: #1f2430; --limit: #c0392b;
  --import: #b4bac6; --load: #3b6fd4; --forward: #2f9e6e }
@media (prefers-color-scheme: dark) { :root { --paper: #14171f; --ink: #e6e8ee; --rule: #343a48; --faint: #9aa3b5;
  --anonymous: #6d9bf1; --shared: #a98bea; --cache: #f0b060; --fall: #e6e8ee; --limit: #ff7b6b;
  --import: #565e70; --load: #6d9bf1; --forward: #4cc38f } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 960px;
  margin: 2rem auto; padding: 0 1.25rem }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
section { margin-top: 3.5rem } section > h2:first-child { font-size: 1.4rem } h3 { font-size: 1rem; margin: 1rem 0 0 }
p { margin: .4rem 0 } .faint { color: var(--faint) } .wrong { color: var(--limit); font-weight: 600 }
svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif } svg text { fill: var(--ink) }
svg text.faint { fill: var(--faint) } .grid { stroke: var(--rule) } .strong { font-weight: 600 }
.anonymous { fill: var(--anonymous) } .shared { fill: var(--shared) } .cache { fill: var(--cache) }
.fall { stroke: var(--fall); stroke-width: 1.5; stroke-dasharray: 1 3; stroke-linecap: round; fill: none }
.limit { stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 6 4; fill: none }
svg text.limit-text { fill: var(--limit) }
.import { fill: var(--import) } .load { fill: var(--load) } .forward { fill: var(--forward) }
.spread { stroke: var(--ink); stroke-width: 1.25 } .dot { fill: var(--paper); stroke: var(--ink) }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .9rem .2rem 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap }
th { color: var(--faint); font-weight: 400 } td.text, th.text { text-align: left }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; color: var(--faint); font-size: .9rem }
.legend svg { display: inline-block; width: 14px; height: 12px; margin-right: .4rem; vertical-align: -1px }
"""

_WIDTH = 920
_LEFT, _RIGHT = 84, 12
_MEMORY_HEIGHT, _MEMORY_TOP, _MEMORY_BELOW = 190, 26, 44
_BAR_LEFT, _BAR_RIGHT, _BAR, _ROW, _GAP = 150, 90, 16, 28, 14
_KINDS = (("anonymous", "anonymous_bytes"), ("shared", "shared_bytes"), ("cache", "page_cache_bytes"))
_NARROWEST_LABEL = 40


def ttff_page(result: _Result) -> str:
    """The page of one measurement."""
    return page_of(f"Time to first forward: {result['model']['name']}", [section(result)])


def page_of(title: str, sections: Iterable[str]) -> str:
    """A page with sections of HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def section(result: _Result) -> str:
    """Everything about one measurement."""
    caches = list(dict.fromkeys(row["cache"] for row in result["rows"]))
    parts = [
        f"<p>{escape(headline(result))}</p>",
        f'<p class="{"" if result["equal"] else "wrong"}">{escape(verdict(result))}</p>',
        *(_note(f"Left out: {name}: {why}") for name, why in result["left_out"].items()),
        "<h2>From the start of the process to the first forward pass</h2>",
        _legend((("import", "start and imports"), ("load", "load"), ("forward", "first forward pass"))),
        _bars(result, caches),
        _note(
            f"Bars are medians of {result['repeats']} interleaved rounds, each run a fresh process; circles are single"
            " runs, lines their range. Cold: the checkpoint's files are out of the page cache; warm: they are in it;"
            " the libraries' files always are."
        ),
        "<h2>Ratios</h2>",
        _ratios(result),
        "<h2>Memory over time</h2>",
        _legend(
            (
                ("anonymous", "anonymous memory of the process"),
                ("shared", "shared memory"),
                ("cache", "page cache of the checkpoint"),
                ("fall", "fall of the system's MemAvailable"),
                ("limit", "umem's forecast and budget"),
            )
        ),
        *(_memory(result, cache) for cache in caches),
        "<h2>Phases, memory by kind, faults</h2>",
        _note(
            "Sizes are growth from the beginning of the load to the first forward pass; mapped files that are the"
            " checkpoint's are in its page cache too."
        ),
        *(_details(result, cache) for cache in caches),
        "<h2>Measured on</h2>",
        _note(origin(result)),
        *(f'<p class="faint">{escape(name)}: {_code(loader["how"])}</p>' for name, loader in result["loaders"].items()),
    ]
    return "\n".join(parts)


def _note(text: str) -> str:
    return f'<p class="faint">{escape(text)}</p>'


def _code(text: str) -> str:
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    drawn = {"fall": '<path class="fall" d="M1 6H13"/>', "limit": '<path class="limit" d="M0 6H14"/>'}
    marks = ((drawn.get(name, f'<rect class="{name}" width="12" height="12"/>'), text) for name, text in entries)
    return (
        '<div class="legend">'
        + "".join(f'<span><svg viewBox="0 0 14 12">{mark}</svg>{escape(text)}</span>' for mark, text in marks)
        + "</div>"
    )


# --- bars ------------------------------------------------------------------------------------------------------------


def _bars(result: _Result, caches: Sequence[str]) -> str:
    slowest = max(row["slowest_s"] for row in result["rows"])
    width = _WIDTH - _BAR_LEFT - _BAR_RIGHT
    height = len(result["rows"]) * _ROW + len(caches) * _GAP
    plot = Plot(left=_BAR_LEFT, top=0, width=width, height=height, last=slowest, highest=1)
    parts, top = [], 0.0
    for cache in caches:
        top += _GAP
        for row in (row for row in result["rows"] if row["cache"] == cache):
            seconds = [
                run["first_forward_s"]
                for run in result["runs"]
                if (run["cache"], run["loader"]) == (cache, row["loader"])
            ]
            parts += _bar(plot, row, seconds, top)
            top += _ROW
    label = 'role="img" aria-label="seconds to the first forward pass"'
    return f'<svg viewBox="0 0 {_WIDTH} {top + 4:.0f}" {label}>{"".join(parts)}</svg>'


def _bar(plot: Plot, row: Mapping[str, Any], seconds: Sequence[float], top: float) -> list[str]:
    middle = top + _BAR / 2
    name = f'{escape(row["loader"])} <tspan fill-opacity=".6">{row["cache"]}</tspan>'
    parts = [f'<text text-anchor="end" x="{plot.left - 10}" y="{middle + 4:.1f}">{name}</text>']
    phases = row["phases_s"]
    known = phases.get("start", 0) + phases.get("import", 0)
    forward = phases.get("first forward", 0)
    ends = (("import", known), ("load", row["first_forward_s"] - forward), ("forward", row["first_forward_s"]))
    left = plot.left
    for name, end in ends:
        right = plot.x(end)
        parts.append(f'<rect class="{name}" x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{_BAR}"/>')
        left = right
    low, high = plot.x(min(seconds)), plot.x(max(seconds))
    parts.append(f'<path class="spread" d="M{low:.1f} {middle:.1f}H{high:.1f}"/>')
    parts += [f'<circle class="dot" cx="{plot.x(value):.1f}" cy="{middle:.1f}" r="3"/>' for value in seconds]
    text = f"{row['first_forward_s']:.2f} s"
    parts.append(f'<text class="strong" x="{max(high, left) + 10:.1f}" y="{middle + 4:.1f}">{text}</text>')
    return parts


# --- tables ----------------------------------------------------------------------------------------------------------


def _ratios(result: _Result) -> str:
    head = ("cache", "loader", "s", "to umem", "load s", "to umem", "peak", "to umem", "peak/model")
    rows = [
        (
            row["cache"],
            row["loader"],
            f"{row['first_forward_s']:.2f}",
            _ratio(row["to_umem"]),
            f"{row['load_s']:.2f}",
            _ratio(row["load_to_umem"]),
            format_bytes(row["peak_bytes"]),
            _ratio(row["peak_to_umem"]),
            f"{row['peak_to_model']:.2f}",
        )
        for row in result["rows"]
    ]
    sources = " / ".join(sorted({run["peak_source"] for run in result["runs"]}))
    return html_table(head, rows, texts=2) + (
        '<p class="faint">To umem: medians of the ratios within rounds, above 1 where umem is faster or takes less.'
        f" Peak: from the beginning of the load to the first forward pass, by {escape(sources)}; what was cached before"
        " is not charged.</p>"
    )


def _details(result: _Result, cache: str) -> str:
    loaders, rows = detail_rows(result, cache)
    return html_table([cache, *loaders], rows, texts=1)


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int) -> str:
    """A table of text, whose first columns stand left, the others, numbers, right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (' class="text"' if number < texts else "" for number in range(len(row)))
        return "".join(f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(kinds, row, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{cells("th", head)}</tr>{body}</table></div>'


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


# --- memory over time ------------------------------------------------------------------------------------------------


def _memory(result: _Result, cache: str) -> str:
    """One picture a loader, all on the same scales."""
    drawn = {run["loader"]: run for run in result["runs"] if run["cache"] == cache and "series" in run}
    runs = [drawn[row["loader"]] for row in result["rows"] if row["cache"] == cache]
    last = max(run["first_forward_s"] for run in runs)
    highest = 1.1 * max(max(_stacked(run)[-1]) for run in runs)
    limits = {run["loader"]: _limits(run) for run in runs}
    forecasts = [height for found in limits.values() for name, height, *_ in found if name == "forecast"]
    highest = max(highest, *(1.1 * height for height in forecasts), 1.0)
    pictures = (_picture(run, last, highest, limits[run["loader"]]) for run in runs)
    return f"<h3>{cache}</h3>" + "".join(pictures)


def _picture(run: _Run, last: float, highest: float, limits: Sequence[tuple[str, float, float, str]]) -> str:
    plot = Plot(
        left=_LEFT, top=_MEMORY_TOP, width=_WIDTH - _LEFT - _RIGHT, height=_MEMORY_HEIGHT, last=last, highest=highest
    )
    times, layers = run["series"]["time_s"], _stacked(run)
    lower = [0.0] * len(times)
    parts = [f'<text class="strong" x="{_LEFT}" y="16">{escape(run["loader"])}</text>', *byte_grid(plot)]
    for (name, _), upper in zip(_KINDS, layers, strict=True):
        parts.append(f'<path class="{name}" d="{area(plot, times, upper, lower)}"/>')
        lower = upper
    fallen = [min(value, highest) for value in _fall(run)]
    if fallen:
        parts.append(f'<path class="fall" d="{line(plot, times, fallen)}"/>')
    above = [text for _, height, _, text in limits if height > highest]
    for _, height, start_s, text in limits:
        if height <= highest:
            parts += _limit_line(plot, height, start_s, text)
    if above:
        note = "; ".join(f"{text}, above this picture" for text in above)
        parts.append(f'<text class="limit-text" text-anchor="end" x="{plot.right}" y="16">{escape(note)}</text>')
    parts += _phase_band(plot, run)
    height = plot.base + _MEMORY_BELOW
    label = f'role="img" aria-label="memory over time by {escape(run["loader"])}"'
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" {label}>{"".join(parts)}</svg>'


def _stacked(run: _Run) -> list[list[float]]:
    """The upper edge of each kind, in the order of `_KINDS`."""
    height = [0.0] * len(run["series"]["time_s"])
    layers = []
    for _, name in _KINDS:
        height = [below + (value or 0) for below, value in zip(height, run["series"][name], strict=True)]
        layers.append(height)
    return layers


def _fall(run: _Run) -> list[float]:
    """How far MemAvailable has fallen since the start of the process; nothing where the system does not tell."""
    available = run["series"]["available_bytes"]
    return [] if None in available else [float(max(0, available[0] - value)) for value in available]


def _limits(run: _Run) -> list[tuple[str, float, float, str]]:
    """Forecast and budget of umem: name, height, start in seconds, words. They are on top of what was in use before."""
    if "report" not in run:
        return []
    start_s = next(start for name, start, _ in run["spans"] if name not in ("start", "import"))
    before = [number for number, time_s in enumerate(run["series"]["time_s"]) if time_s <= start_s]
    base = _stacked(run)[-1][before[-1]] if before else 0.0
    report = run["report"]
    forecast, budget = report["peak"]["forecast_bytes"], report["budget"]["available_bytes"]
    limits = [("forecast", base + forecast, start_s, f"forecast {format_bytes(forecast)}")]
    if budget is not None:
        limits.append(("budget", base + budget, start_s, f"budget {format_bytes(budget)}"))
    return limits


def _limit_line(plot: Plot, height: float, start_s: float, text: str) -> list[str]:
    left, y = plot.x(start_s), plot.y(height)
    return [
        f'<path class="limit" d="M{left:.1f} {y:.1f}H{plot.right}"/>',
        f'<text class="limit-text" text-anchor="end" x="{left - 6:.1f}" y="{y + 4:.1f}">{escape(text)}</text>',
    ]


def _phase_band(plot: Plot, run: _Run) -> list[str]:
    """The phases as a band under the plot, the wide ones named."""
    parts, top = [], plot.base + 4
    end_s = run["first_forward_s"]
    for name, start_s, stop_s in run["spans"]:
        if start_s >= end_s:
            break
        kind = "import" if name in ("start", "import") else "forward" if name == "first forward" else "load"
        left, right = plot.x(start_s), plot.x(min(stop_s, end_s))
        parts.append(
            f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{max(0.0, right - left - 0.6):.1f}" height="7">'
            f"<title>{escape(name)} {stop_s - start_s:.2f} s</title></rect>"
        )
        if right - left >= max(_NARROWEST_LABEL, 7 * len(name) + 34):
            text = f"{name} {stop_s - start_s:.2f} s"
            parts.append(f'<text class="faint" x="{left:.1f}" y="{top + 22}">{escape(text)}</text>')
    return parts
