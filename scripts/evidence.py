"""The evidence: umem against transformers for each way in which stored bytes become a model, cold and warm.

| case | what |
|---|---|
| direct | a dense model, stored as it is used; umem also mapped, as transformers leaves it on a processor |
| merge | a mixture of experts, whose experts are merged into new tensors |
| precision | FP8 blocks and their factors, loaded as bf16 |
| kept | the same file, kept in FP8 |

The first three go from the start of a process to the first forward pass, which gives equal logits (`umem ttff`). So
does the last on a GPU that can; on a processor transformers does not keep FP8, so there the loads of the stored
tensors are compared, by `bench_load.py`. Writes evidence_MACHINE_YYYYMM.{md,json,html}, from which
`readme_figures.py` takes the figures of README.

For example
  python scripts/evidence.py --size 1GiB
  python scripts/evidence.py --size 256MiB --repeats 1 --cases direct --out /tmp
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import bench_load
from load_tables import number, table
from loaders import LOADERS
from sample_checkpoint import QUANTIZATION, layers_of_size, write_sample

from umem._types import format_bytes, parse_bytes
from umem.errors import RunFailedError, UmemError
from umem.measurement.page import html_table, page_of, section
from umem.measurement.page_cache import CACHES
from umem.measurement.table import headline, origin, verdict
from umem.measurement.ttff import Measurement, measure

SCHEMA, VERSION = "umem.evidence", 1
RESULTS = Path(__file__).parent / "results"
STORED_LOADERS = ("umem-load-into", "safetensors-mmap", "safetensors-pread")
WHY_STORED = "transformers does not keep FP8 on a processor, so the loads of the stored tensors are compared"


class Case(NamedTuple):
    """One way in which stored bytes become a model.

    Attributes
    ----------
    what
        In words.
    kind
        Of the sample checkpoint.
    quantization
        What its config says of its FP8, where the sample's own would not do.
    baselines
        The other loaders, of `umem ttff`.
    """

    what: str
    kind: str
    quantization: Mapping[str, Any] | None = None
    baselines: tuple[str, ...] = ("transformers",)


CASES = {
    "direct": Case("dense, stored as it is used", "dense", baselines=("umem-mapped", "transformers")),
    "merge": Case("mixture of experts, merged", "moe"),
    "precision": Case("FP8 blocks to bf16", "fp8", QUANTIZATION | {"dequantize": True}),
    "kept": Case("FP8 blocks, kept", "fp8"),
}


def written(case: str, directory: Path, size_bytes: int) -> Path:
    """The checkpoint of a case; cases of one kind share their files."""
    kind = CASES[case].kind
    place = directory / f"{kind}-{size_bytes >> 20}MiB"
    write_sample(place, kind, num_hidden_layers=layers_of_size(kind, size_bytes))
    quantization = CASES[case].quantization
    return place if quantization is None else with_quantization(place, directory / f"{place.name}-{case}", quantization)


def with_quantization(checkpoint: Path, directory: Path, quantization: Mapping[str, Any]) -> Path:
    """The same checkpoint with another `quantization_config`, by links to its files."""
    directory.mkdir(exist_ok=True)
    for path in checkpoint.iterdir():
        if path.name != "config.json" and not (directory / path.name).exists():
            (directory / path.name).symlink_to(os.path.relpath(path, directory))
    config = json.loads((checkpoint / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": dict(quantization)}, indent=2))
    return directory


def measure_case(case: str, checkpoint: Path, repeats: int, caches: Sequence[str]) -> dict[str, Any]:
    """What was found of one case, as JSON values: `ttff`, or `stored` with the reason."""
    say(f"{case}: {checkpoint}")
    found: dict[str, Any] = {"case": case, "what": CASES[case].what}
    why = WHY_STORED
    if case != "kept" or has_gpu():
        wanted = Measurement(
            checkpoint=str(checkpoint), baselines=CASES[case].baselines, caches=caches, repeats=repeats
        )
        try:
            return found | {"ttff": measure(wanted, say)}
        except RunFailedError as error:
            if case != "kept":
                raise
            why = f"no forward pass in FP8 can be made here ({error}), so the loads of the stored tensors are compared"
            say(why)
    loaders = [loader for loader in LOADERS if loader.name in STORED_LOADERS]
    result = bench_load.measure([checkpoint], loaders, caches, repeats, configurations=())
    return found | {"stored": result, "why": why}


def has_gpu() -> bool:
    """Whether torch sees one."""
    import torch

    return torch.cuda.is_available()


# --- pages -----------------------------------------------------------------------------------------------------------


def rows(evidence: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row a case, cache and loader: seconds, ratios to umem's, peaks."""
    for found in evidence["cases"]:
        result = found.get("ttff") or found["stored"]
        for row in result["rows"]:
            yield {
                "case": found["case"],
                "what": found["what"],
                "cache": row["cache"],
                "loader": row["loader"],
                "first_forward_s": row.get("first_forward_s"),
                "load_s": row["load_s"],
                "fastest_s": row["fastest_s"],
                "slowest_s": row["slowest_s"],
                "to_umem": row["to_umem"],
                "load_to_umem": row.get("load_to_umem", row["to_umem"]),
                "peak_bytes": row["peak_bytes"],
                "peak_to_model": row.get("peak_to_model", row.get("peak_to_size")),
                "runs": row["runs"],
            }


def is_equal(evidence: Mapping[str, Any]) -> bool:
    """Whether the loaders agree in every case."""
    return all((found.get("ttff") or found["stored"])["equal"] for found in evidence["cases"])


COLUMNS = (
    ("case", lambda row: row["case"]),
    ("cache", lambda row: row["cache"]),
    ("loader", lambda row: row["loader"]),
    ("first forward s", number("first_forward_s", ".2f")),
    ("(range)", lambda row: f"{row['fastest_s']:.2f}-{row['slowest_s']:.2f}"),
    ("to umem", number("to_umem", ".2f")),
    ("load s", number("load_s", ".2f")),
    ("load to umem", number("load_to_umem", ".2f")),
    ("peak MiB", number("peak_bytes", ".0f", 1 << 20)),
    ("peak/model", number("peak_to_model", ".2f")),
    ("runs", number("runs", ".0f")),
)


def markdown(evidence: Mapping[str, Any]) -> str:
    """The evidence as a page."""
    lines = ["# Evidence", "", f"{evidence['origin']}.", ""]
    lines += [
        f"Medians of {evidence['repeats']} interleaved rounds, each run a fresh process. First forward: seconds from",
        "the start of the process; the range is that of these seconds, or of the load's where no forward pass is made.",
        "To umem: medians of the ratios within rounds, above 1 where umem is faster. Peak: beyond what was in use",
        "before the load, page cache that it fills included, to the model's own size; a warm load is not charged for",
        "what was cached before.",
        "",
        *table(COLUMNS, rows(evidence)),
        "",
    ]
    for found in evidence["cases"]:
        lines.append(f"* {found['case']}: {found['what']}. {_about(found)}")
    return "\n".join(lines) + "\n"


def _about(found: Mapping[str, Any]) -> str:
    if "ttff" in found:
        return f"{headline(found['ttff'])}. {verdict(found['ttff'])}"
    (checkpoint,) = found["stored"]["checkpoints"].values()
    agree = "equal" if found["stored"]["equal"] else "NOT equal"
    size = f"{format_bytes(checkpoint['bytes'])} in {checkpoint['shards']} files"
    return f"{size}; {found['why']}. The tensors are {agree}."


def html(evidence: Mapping[str, Any]) -> str:
    """The evidence as an HTML page with pictures."""
    sections = []
    for found in evidence["cases"]:
        title = f"<h2>{escape(found['case'])}: {escape(found['what'])}</h2>"
        body = section(found["ttff"]) if "ttff" in found else f"<p>{escape(_about(found))}</p>{_stored_table(found)}"
        sections.append(f"<section>{title}{body}</section>")
    return page_of("Evidence", sections)


def _stored_table(found: Mapping[str, Any]) -> str:
    shown = [column for column in COLUMNS if column[0] not in ("case", "first forward s", "to umem")]
    lines = ([cell(row) for _, cell in shown] for row in rows({"cases": [found]}))
    return html_table([title for title, _ in shown], lines, texts=2)


def file_name(evidence: Mapping[str, Any], machine: str | None) -> str:
    """As `evidence_2core_202611`; the machine is called by its GPU, else by its processor cores."""
    name = machine or next(
        (found["ttff"]["topology"]["evidence"].partition(":")[0] for found in evidence["cases"]
         if "ttff" in found and found["ttff"]["topology"]["kind"] != "cpu"),
        f"{evidence['machine']['cores']}core",
    )  # fmt: skip
    name = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return f"evidence_{name}_{evidence['machine']['date'][:7].replace('-', '')}"


def gather(
    checkpoints: Mapping[str, Path], repeats: int, caches: Sequence[str], size_bytes: int | None = None
) -> dict[str, Any]:
    """All cases, as JSON values."""
    cases = [measure_case(case, checkpoint, repeats, caches) for case, checkpoint in checkpoints.items()]
    first = cases[0].get("ttff") or cases[0]["stored"]
    said = origin(first) if "ttff" in cases[0] else ", ".join(f"{k} {v}" for k, v in first["machine"].items())
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "machine": first["machine"],
        "origin": said,
        "repeats": repeats,
        "size_bytes": size_bytes,
        "cases": cases,
    }


def save(evidence: Mapping[str, Any], path: Path) -> None:
    """Write PATH.json, PATH.md and PATH.html."""
    path.with_suffix(".json").write_text(json.dumps(evidence) + "\n")
    path.with_suffix(".md").write_text(markdown(evidence))
    path.with_suffix(".html").write_text(html(evidence))
    say(f"written: {path}.md, .json and .html")


def main() -> int:
    """Write the checkpoints, measure, show, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_bytes, default="1GiB", help="of each checkpoint, to a layer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--samples", type=Path, default=Path(".sample"), help="where the checkpoints are written")
    parser.add_argument("--machine", help="what the machine is called in the file's name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not options.out.is_dir():
        parser.error(f"--out {options.out}: there is no such directory")
    if options.repeats < 1:
        parser.error("--repeats: one at least")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        checkpoints = {case: written(case, options.samples.resolve(), options.size) for case in options.cases}
        evidence = gather(checkpoints, options.repeats, options.caches, options.size)
    except UmemError as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        say("interrupted; nothing is left running")
        return 130
    print(markdown(evidence))
    save(evidence, options.out / file_name(evidence, options.machine))
    return 0 if is_equal(evidence) else 1


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
