"""Rows and pages from the figures of `bench_load.py`: medians, ranges, and ratios of runs of one round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

from smallest_memory import STEP_BYTES

Row = dict[str, Any]
_RunKey = tuple[str, str, int]
_GIB, _MIB = 1 << 30, 1 << 20


def rows(result: Mapping[str, Any]) -> list[Row]:
    """One row a checkpoint, cache and loader that has runs.

    `to_raw` is the median over rounds of the load's seconds over those of the best plain read into fresh memory of the
    same round; `to_umem` the same against umem's load to the same end state.
    """
    raw = _best_raw_by_round(result)
    umem = {state: _best_by_round(result, partial(_is_umem, result, state)) for state in ("model", "tensors")}
    found = []
    for series in result["series"]:
        loader = result["loaders"].get(series["loader"])
        if not series["runs"]:
            continue
        row = _row(series, result["checkpoints"][series["checkpoint"]]["bytes"], raw)
        if loader is not None:
            row |= {"end_state": loader["end_state"], "to_umem": _ratio(series, umem[loader["end_state"]])}
        found.append(row)
    return found


def ratios_to_raw(result: Mapping[str, Any], series: Mapping[str, Any]) -> list[float]:
    """Each run's seconds over those of the best plain read into fresh memory of its round, where there is one."""
    return _ratios(series, _best_raw_by_round(result))


def _best_raw_by_round(result: Mapping[str, Any]) -> dict[_RunKey, float]:
    return _best_by_round(result, lambda series: "raw" in series and not series["raw"]["touched"])


def equal(result: Mapping[str, Any]) -> bool:
    """Whether all loads of a checkpoint to one end state gave the same tensors, all in memory of the process's own."""
    digests = defaultdict(set)
    mapped = 0
    for series in result["series"]:
        for facts in series["runs"]:
            if "digest" in facts:
                digests[series["checkpoint"], result["loaders"][series["loader"]]["end_state"]].add(facts["digest"])
                mapped += facts["mapped_bytes"]
    return mapped == 0 and all(len(found) == 1 for found in digests.values())


def _is_umem(result: Mapping[str, Any], end_state: str, series: Mapping[str, Any]) -> bool:
    loader = result["loaders"].get(series["loader"])
    return loader is not None and loader["package"] == "umem" and loader["end_state"] == end_state


def _best_by_round(result: Mapping[str, Any], counts: Callable[[Mapping[str, Any]], bool]) -> dict[_RunKey, float]:
    best: dict[_RunKey, float] = {}
    for series in filter(counts, result["series"]):
        for facts in series["runs"]:
            key = series["checkpoint"], series["cache"], facts["round"]
            best[key] = min(facts["load_s"], best.get(key, facts["load_s"]))
    return best


def _ratio(series: Mapping[str, Any], reference: Mapping[_RunKey, float]) -> float | None:
    return median_or_none(_ratios(series, reference))


def _ratios(series: Mapping[str, Any], reference: Mapping[_RunKey, float]) -> list[float]:
    keyed = [((series["checkpoint"], series["cache"], facts["round"]), facts["load_s"]) for facts in series["runs"]]
    return [seconds / reference[key] for key, seconds in keyed if key in reference]


def _row(series: Mapping[str, Any], size: int, raw: Mapping[_RunKey, float]) -> Row:
    def middle(name: str) -> float | None:
        return median_or_none(facts[name] for facts in series["runs"] if facts[name] is not None)

    seconds = [facts["load_s"] for facts in series["runs"]]
    peak = median(facts["peak_bytes"] for facts in series["runs"])
    return {
        "checkpoint": series["checkpoint"],
        "cache": series["cache"],
        "loader": series["loader"],
        "touched": series.get("raw", {}).get("touched"),
        "runs": len(seconds),
        "load_s": median(seconds),
        "fastest_s": min(seconds),
        "slowest_s": max(seconds),
        "gib_per_s": size / _GIB / median(seconds),
        "to_raw": _ratio(series, raw),
        "peak_bytes": peak,
        "peak_to_size": peak / size,
        "cached_after_bytes": middle("cached_after_bytes"),
        "major_faults": middle("major_faults"),
        "minor_faults": middle("minor_faults"),
        "cpu_s": middle("cpu_s"),
        "others_cpu_s": middle("others_cpu_s"),
    }


def median_or_none(values: Iterable[float]) -> float | None:
    """The median, None of nothing."""
    listed = list(values)
    return median(listed) if listed else None


# --- pages -----------------------------------------------------------------------------------------------------------

_Column = tuple[str, Callable[[Row], str]]


def number(name: str, form: str, unit: float = 1) -> Callable[[Row], str]:
    """A cell of a table: `row[name]` in that unit and form, empty where there is none."""
    return lambda row: "" if row.get(name) is None else format(row[name] / unit, form)


_COLUMNS: tuple[_Column, ...] = (
    ("cache", lambda row: row["cache"]),
    ("loader", lambda row: row["loader"]),
    ("s", number("load_s", ".2f")),
    ("(range)", lambda row: f"{row['fastest_s']:.2f}-{row['slowest_s']:.2f}"),
    ("GiB/s", number("gib_per_s", ".2f")),
    ("to raw", number("to_raw", ".2f")),
    ("to umem", number("to_umem", ".2f")),
    ("peak MiB", number("peak_bytes", ".0f", _MIB)),
    ("peak/size", number("peak_to_size", ".2f")),
    ("cached after MiB", number("cached_after_bytes", ".0f", _MIB)),
    ("major faults", number("major_faults", ".0f")),
    ("minor faults", number("minor_faults", ".0f")),
    ("CPU s", number("cpu_s", ".2f")),
    ("others' CPU s", number("others_cpu_s", ".2f")),
    ("runs", number("runs", ".0f")),
)
_SMALLEST_COLUMNS: tuple[_Column, ...] = (
    ("checkpoint", lambda row: row["checkpoint"]),
    ("loader", lambda row: row["loader"]),
    ("smallest limit MiB", number("limit_bytes", ".0f", _MIB)),
    ("before the load MiB", number("base_bytes", ".0f", _MIB)),
    ("beyond that MiB", number("beyond_base_bytes", ".0f", _MIB)),
    ("beyond/size", number("beyond_to_size", ".2f")),
    ("s at the limit", number("limited_s", ".2f")),
    ("s without", number("unlimited_s", ".2f")),
    ("ratio", number("to_unlimited", ".2f")),
    ("just below", lambda row: row["failure_below"].replace("|", "/")[:120]),
)
_END_STATES = {
    "model": "Models: built, loaded, conversions done, all weights in memory that the process owns",
    "tensors": "Stored tensors, as they are stored (experts not merged), in memory that the process owns",
}


def markdown(result: Mapping[str, Any]) -> str:
    """The result of rounds as a page."""
    found = rows(result)
    lines = ["# Load benchmark", "", f"{_machine(result)}.", "", *_how_to_read(result)]
    for name, checkpoint in result["checkpoints"].items():
        mine = [row for row in found if row["checkpoint"] == name]
        lines += ["", f"## {name}: {checkpoint['bytes'] / _MIB:.0f} MiB in {checkpoint['shards']} files"]
        for state, title in _END_STATES.items():
            loaded = [row for row in mine if row.get("end_state") == state]
            lines += ["", f"{title}:", "", *table(_COLUMNS, loaded)] if loaded else []
        lines += ["", "Plain reads:", "", *_raw_table(mine)]
    lines += ["", "## Loaders", ""]
    lines += [
        f"* {name} ({loader['package']} {loader['version'] or ''}): {loader['how']}"
        for name, loader in result["loaders"].items()
    ]
    lines += _left_out(result)
    return "\n".join(lines) + "\n"


def smallest_markdown(result: Mapping[str, Any]) -> str:
    """The result of a search for the smallest memory as a page."""
    lines = ["# Smallest memory to load in", "", f"{_machine(result)}.", ""]
    lines += [
        f"The smallest memory cgroup (no swap, to {STEP_BYTES // _MIB} MiB) in which a cold load finishes, interpreter",
        "and page cache included; the same less what was in use before the load; and seconds there against those",
        "without a limit.",
        f"Medians of {result['rounds']} runs.",
        "",
        *table(_SMALLEST_COLUMNS, result["smallest"]),
        *_left_out(result),
    ]
    return "\n".join(lines) + "\n"


def table(columns: Sequence[_Column], found: Iterable[Row]) -> list[str]:
    """Lines of a Markdown table."""
    head = ["| " + " | ".join(title for title, _ in columns) + " |", "|" + "---|" * len(columns)]
    return head + ["| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in found]


def _raw_table(found: Sequence[Row]) -> list[str]:
    touched = {(row["cache"], row["loader"].removesuffix(" touched")): row for row in found if row["touched"]}
    fresh = [row for row in found if row["touched"] is False]

    def beside(row: Row) -> str:
        other = touched.get((row["cache"], row["loader"]))
        return "" if other is None else f"{other['load_s']:.2f}"

    shown = ("cache", "s", "(range)", "GiB/s", "cached after MiB", "CPU s", "others' CPU s", "runs")
    by_title = dict(_COLUMNS)
    columns = [("plain read", by_title["loader"]), *((title, by_title[title]) for title in shown)]
    return table([*columns[:3], ("s, memory touched before", beside), *columns[3:]], fresh)


def _how_to_read(result: Mapping[str, Any]) -> list[str]:
    counted = [facts["cached_fraction"] is not None for series in result["series"] for facts in series["runs"]]
    rejected = sum(len(series["rejected"]) for series in result["series"])
    cache = "Cold: under 1 % of the files in the page cache at the start; warm: over 99 %"
    checked = f"counted in every run, {rejected} runs done anew" if all(counted) else "NOT counted: needs Linux 6.5"
    sources = {facts["peak_source"] for series in result["series"] for facts in series["runs"]}
    return [
        f"Medians of {result['rounds']} rounds; each run a fresh process, in another order each time.",
        f"{cache} ({checked}).",
        "To raw: seconds over those of the round's best plain read into fresh memory in 4 KiB pages. To umem: over",
        "those of umem's load to the same end state in that round, above 1 if umem is faster. Peak: beyond what was in",
        f"use just before the load, by {' / '.join(sorted(sources))}; a warm load is not charged for what was",
        "cached before it. Faults and CPU seconds are the process's; others' CPU is what the machine spent meanwhile",
        "on anything else.",
        "",
        f"All loads of a checkpoint to one end state bit-equal, none left in mapped files: {yes_or_no(equal(result))}.",
    ]


def yes_or_no(is_so: bool) -> str:  # noqa: FBT001 - its only subject
    """For a page, where a no should be seen."""
    return "yes" if is_so else "NO"


def _left_out(result: Mapping[str, Any]) -> list[str]:
    reasons = [f"* {name}: {reason}" for name, reason in result["left_out"].items()]
    return ["", "Left out:", "", *reasons] if reasons else []


def _machine(result: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in result["machine"].items())
