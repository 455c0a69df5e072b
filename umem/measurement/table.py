"""A measured time to first forward as a table for 80 columns, and the rows and words that a page shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from umem._types import format_bytes

__all__ = ["PEAK_NAMES", "detail_rows", "headline", "origin", "ttff_table", "verdict"]

_Result = Mapping[str, Any]

#: Kind of memory in a row's `peaks` -> how it is called.
PEAK_NAMES = {
    "anonymous_bytes": "anonymous",
    "shared_bytes": "shared",
    "file_bytes": "mapped files",
    "page_cache_bytes": "page cache",
    "available_dip_bytes": "MemAvailable fell",
    "swap_used_bytes": "swap",
}


def headline(result: _Result) -> str:
    """What was measured, in a line."""
    model, place = result["model"], result["topology"]
    quantized = f", {model['quantization']}" if model["quantization"] else ""
    size = f"{format_bytes(model['bytes'])} in {model['shards']} files"
    return f"{model['name']}: {model['class']}, {model['dtype']}{quantized}, {size}, to {place['device']}"


def origin(result: _Result) -> str:
    """Where it was measured."""
    facts = [f"{name} {value}" for name, value in result["machine"].items() if value is not None]
    place = result["topology"]
    found = [f"backend {result['backend']}", f"memory {place['kind']}", f"{place['numa_nodes']} NUMA nodes"]
    return ", ".join([*facts, *found, f"file system {result['storage']['file_system']}"])


def verdict(result: _Result) -> str:
    """Whether the loaders agree, which is what makes their times comparable."""
    names = [name for name in result["loaders"] if name not in result["left_out"]]
    if result["equal"]:
        who = f"{', '.join(names)} give" if len(names) > 1 else "All runs give"
        return f"{who} the same weights and the same logits, bit for bit."
    return "The loaders do NOT give the same weights and logits."


def detail_rows(result: _Result, cache: str) -> tuple[list[str], list[list[str]]]:
    """The loaders of one cache, and rows of a name and each loader's value: phases, memory by kind, faults."""
    rows = [row for row in result["rows"] if row["cache"] == cache]
    phases = dict.fromkeys(name for row in rows for name in row["phases_s"])
    found = [[f"{name} s", *(_seconds(row["phases_s"].get(name)) for row in rows)] for name in phases]
    for name, title in PEAK_NAMES.items():
        values = [row["peaks"][name] for row in rows]
        if any(values):
            found.append([title, *(format_bytes(value) for value in values)])
    if any(row["device_peak_bytes"] for row in rows):
        found.append(["device", *(format_bytes(row["device_peak_bytes"]) for row in rows)])
    found.append(["left in page cache", *(format_bytes(row["cache_left_bytes"]) for row in rows)])
    found += [[f"{kind} faults", *(f"{row[f'{kind}_faults']:.0f}" for row in rows)] for kind in ("minor", "major")]
    if any(row["peaks"]["pressure_us"] for row in rows):
        stalls = [row["peaks"]["pressure_us"] for row in rows]
        found.append(["stood still s", *("?" if value is None else f"{value / 1e6:.2f}" for value in stalls)])
    found.append(["processor s", *(_seconds(row["cpu_s"]) for row in rows)])
    return [row["loader"] for row in rows], found


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value >= 0.005 else "0"


def ttff_table(result: _Result) -> RenderableType:
    """The result for people."""
    title = "Time to first forward: seconds from the start of the process"
    parts: list[RenderableType] = [Text(title, style="bold"), Text(headline(result)), _summary(result)]
    for cache in dict.fromkeys(row["cache"] for row in result["rows"]):
        parts += ["", _details(result, cache)]
    parts += ["", Text(verdict(result), style="bold" if result["equal"] else "bold red")]
    parts += [Text(f"left out: {name}: {reason[:200]}", style="dim") for name, reason in result["left_out"].items()]
    parts.append(Text(origin(result), style="dim"))
    return Group(*parts)


def _summary(result: _Result) -> Table:
    table = _plain_table("cache", "loader", "s", "(range)", "ratio", "load s", "ratio", "peak", "/model", texts=2)
    for row in result["rows"]:
        table.add_row(
            row["cache"],
            row["loader"],
            Text(f"{row['first_forward_s']:.2f}", style="bold"),
            f"{row['fastest_s']:.2f}-{row['slowest_s']:.2f}",
            _ratio(row["to_umem"]),
            f"{row['load_s']:.2f}",
            _ratio(row["load_to_umem"]),
            format_bytes(row["peak_bytes"]),
            f"{row['peak_to_model']:.2f}",
        )
    return table


def _details(result: _Result, cache: str) -> Table:
    loaders, rows = detail_rows(result, cache)
    table = _plain_table(cache, *loaders, texts=1)
    for row in rows:
        table.add_row(*row)
    return table


def _plain_table(*names: str, texts: int) -> Table:
    """A table whose first columns are text and the others numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number < texts else "right", no_wrap=True)
    return table


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
