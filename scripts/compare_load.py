"""Loads checkpoints by umem, by transformers and by a plain read, each in fresh processes, in turn.

For each loader: seconds to loaded, seconds from process start to the first forward pass, peak memory, page cache left,
and a digest of every parameter and buffer, which must agree. `measuring.py` says how a load is measured. Medians of
interleaved runs, as ratios too. transformers may leave parameters in mapped files, whose bytes are read later;
`bench_load.py` compares loads that end in the same state, and further loaders.

The plain reads are no loaders: they put the same bytes into freshly allocated memory by two threads, through the page
cache and past it, and show what the machine gives in the same minute.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from end_state import digest
from loaders import import_model_code, prepared_umem
from measuring import CACHES, RunFailedError, machine, measured, request_of_child, run_checked, shards_of, turned
from raw_reads import RawRead, prepared_raw

LOADERS = ("umem", "transformers", "raw buffered", "raw direct")
BLOCK_BYTES, THREADS = 8 << 20, 2


# --- in the child ----------------------------------------------------------------------------------------------------


def child(request: Mapping[str, Any]) -> dict[str, Any]:
    """One load in this process; what it took, in bytes and seconds."""
    loader, checkpoint = request["loader"], Path(request["checkpoint"])
    result, facts = measured(prepared(loader, checkpoint), request)
    facts["cache_left_bytes"] = (facts["cached_after_bytes"] or 0) - (facts["cached_before_bytes"] or 0)
    if not loader.startswith("raw"):
        facts |= after_load(result, request["started_s"])
    return facts


def prepared(loader: str, checkpoint: Path) -> Callable[[], Any]:
    """Import what a load needs; the load itself comes later."""
    if loader == "umem":
        return prepared_umem(checkpoint, [])
    import_model_code(checkpoint)  # for a plain read too: the same process, so the same state of the machine
    if loader == "transformers":
        import transformers

        return lambda: transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    return prepared_raw(RawRead(loader == "raw direct", THREADS, BLOCK_BYTES), shards_of(checkpoint))


def after_load(result: Any, started_s: float) -> dict[str, Any]:
    """First and second forward pass, the digest, and umem's own report."""
    import torch

    model, report = result if isinstance(result, tuple) else (result, None)
    tokens = torch.arange(1, 17)[None]
    with torch.no_grad():
        model(tokens)
        first_s = time.monotonic()
        logits = model(tokens).logits
        second_s = time.monotonic()
    facts = {
        "first_forward_s": first_s - started_s,
        "second_forward_s": second_s - first_s,
        "digest": digest([*model.state_dict().items(), *model.named_buffers(), ("logits", logits)]),
    }
    if report is not None:
        facts["report"] = report.to_json()
        facts["report_text"] = rendered(report)
    return facts


def rendered(report: Any) -> str:
    """The report as a terminal of 80 columns shows it."""
    from rich.console import Console

    from umem.report.table import report_table

    console = Console(width=80)
    with console.capture() as capture:
        console.print(report_table(report))
    return capture.get()


# --- in the parent ---------------------------------------------------------------------------------------------------


def run(loader: str, checkpoint: Path, cache: str) -> dict[str, Any]:
    """One load in a fresh process, from a cold or warm cache."""
    request = {"loader": loader, "checkpoint": str(checkpoint)}
    facts, rejected = run_checked(__file__, request, files=shards_of(checkpoint), cache=cache)
    if facts is None:
        raise RunFailedError(f"the page cache could not be made {cache}: {max(rejected):.1%} cached at the start")
    return facts


def measure(checkpoints: Sequence[Path], loaders: Sequence[str], caches: Sequence[str], repeats: int) -> dict[str, Any]:
    """All runs, interleaved."""
    keys = [(checkpoint.name, cache, loader) for checkpoint in checkpoints for cache in caches for loader in loaders]
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {key: [] for key in keys}
    for number in range(repeats):
        for cache in caches:
            for loader in turned(loaders, number):
                for checkpoint in turned(checkpoints, number):
                    facts = run(loader, checkpoint, cache)
                    runs[checkpoint.name, cache, loader].append(facts)
                    note = f"{checkpoint.name} {cache} {loader}: {facts['load_s']:.2f} s"
                    print(f"{note}, peak {facts['peak_bytes'] / 2**20:.0f} MiB", file=sys.stderr, flush=True)
    sizes = {path.name: sum(shard.stat().st_size for shard in shards_of(path)) for path in checkpoints}
    listed = [
        {"checkpoint": name, "cache": cache, "loader": loader, "runs": runs[name, cache, loader]}
        for name, cache, loader in keys
    ]
    packages = ("torch", "transformers", "safetensors")
    return {"machine": machine(packages), "bytes": sizes, "repeats": repeats, "series": listed}


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a checkpoint, cache and loader: medians, spread, ratios to transformers and to the faster plain read."""
    times: dict[tuple[str, str, str], float] = {}
    for series in result["series"]:
        key = series["checkpoint"], series["cache"], series["loader"]
        times[key] = median(facts["load_s"] for facts in series["runs"])
    return [row(series, times, result["bytes"][series["checkpoint"]]) for series in result["series"]]


def row(series: dict[str, Any], times: dict[tuple[str, str, str], float], size: int) -> dict[str, Any]:
    """The row of one series."""
    runs, place = series["runs"], (series["checkpoint"], series["cache"])
    load_s = times[(*place, series["loader"])]
    raw = min(
        (times[(*place, name)] for name in LOADERS if name.startswith("raw") and (*place, name) in times), default=None
    )
    transformers_s = times.get((*place, "transformers"))
    forwards = [facts["first_forward_s"] for facts in runs if "first_forward_s" in facts]
    return {
        "checkpoint": series["checkpoint"],
        "cache": series["cache"],
        "loader": series["loader"],
        "load_s": load_s,
        "fastest_s": min(facts["load_s"] for facts in runs),
        "slowest_s": max(facts["load_s"] for facts in runs),
        "s_per_gib": load_s / (size / 2**30),
        "to_transformers": load_s / transformers_s if transformers_s else None,
        "to_raw": load_s / raw if raw else None,
        "first_forward_s": median(forwards) if forwards else None,
        "peak_bytes": median(facts["peak_bytes"] for facts in runs),
        "peak_to_size": median(facts["peak_bytes"] for facts in runs) / size,
        "cache_left_bytes": median(facts["cache_left_bytes"] for facts in runs),
    }


def loaders_of(result: dict[str, Any]) -> set[str]:
    """The loaders that ran."""
    return {series["loader"] for series in result["series"]}


def equal(result: dict[str, Any]) -> bool:
    """Whether all models of a checkpoint have the same bits and give the same logits."""
    digests: dict[str, set[str]] = {}
    for series in result["series"]:
        found = {facts["digest"] for facts in series["runs"] if "digest" in facts}
        digests.setdefault(series["checkpoint"], set()).update(found)
    return all(len(found) <= 1 for found in digests.values())


HEADER = (
    "checkpoint",
    "cache",
    "loader",
    "loaded s",
    "(range)",
    "s/GiB",
    "ratio",
    "to raw",
    "1st forward s",
    "peak MiB",
    "peak/size",
    "cache left MiB",
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        row["checkpoint"],
        row["cache"],
        row["loader"],
        number(row["load_s"], ".2f"),
        f"{row['fastest_s']:.2f}-{row['slowest_s']:.2f}",
        number(row["s_per_gib"], ".2f"),
        number(row["to_transformers"], ".2f"),
        number(row["to_raw"], ".2f"),
        number(row["first_forward_s"], ".2f"),
        f"{row['peak_bytes'] / 2**20:.0f}",
        number(row["peak_to_size"], ".2f"),
        f"{max(0, row['cache_left_bytes']) / 2**20:.0f}",
    ]


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    sizes = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in result["bytes"].items())
    lines = [
        "# Loads compared",
        "",
        f"{', '.join(f'{name} {value}' for name, value in result['machine'].items())}.",
        "",
    ]
    lines += [f"Checkpoints: {sizes}. Medians of {result['repeats']} interleaved runs."]
    lines += ["Ratio: to `from_pretrained`; to raw: to the faster of the two plain reads."]
    lines += [f"All models of a checkpoint bit-equal, logits equal: {'yes' if equal(result) else 'NO'}.", ""]
    lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cells(line)) + " |" for line in rows(result)]
    return "\n".join(lines) + "\n"


def show(result: dict[str, Any]) -> None:
    """Print umem's report and the comparison."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    texts = [facts["report_text"] for series in result["series"] for facts in series["runs"] if "report_text" in facts]
    if texts:
        console.print("umem's report of its last load", style="bold")
        print(texts[-1])
    hidden = {"(range)", "s/GiB", "peak/size"} | (set() if "raw direct" in loaders_of(result) else {"to raw"})
    hidden |= {"checkpoint"} if len(result["bytes"]) == 1 else set()
    shown = [name for name in HEADER if name not in hidden]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in shown:
        is_text = name in ("checkpoint", "cache", "loader")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=is_text)
    for line in rows(result):
        table.add_row(*(text for name, text in zip(HEADER, cells(line), strict=True) if name in shown))
    console.print(table)
    console.print(f"bit-equal, logits equal: {'yes' if equal(result) else 'NO'}", style="bold")


def main() -> None:
    """Measure and show."""
    request = request_of_child()
    if request is not None:
        print(json.dumps(child(request)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--save", type=Path, help="write PATH.json and PATH.md")
    options = parser.parse_args()
    result = measure(options.checkpoints, options.loaders, options.caches, options.repeats)
    show(result)
    if options.save is not None:
        for series in result["series"]:
            for facts in series["runs"]:
                facts.pop("report_text", None)
                facts.pop("report", None)
        options.save.with_suffix(".json").write_text(json.dumps(result | {"rows": rows(result)}, indent=1) + "\n")
        options.save.with_suffix(".md").write_text(markdown(result))
    if not equal(result):
        sys.exit(1)


if __name__ == "__main__":
    main()
