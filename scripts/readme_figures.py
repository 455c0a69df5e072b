"""README's figures, written between two markers from the recorded evidence: never typed.

python scripts/readme_figures.py            # writes them
python scripts/readme_figures.py --check    # ends with 1 if README says something else
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence import RESULTS, rows
from load_tables import table

from umem._types import format_bytes

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures: scripts/readme_figures.py writes them -->", "<!-- end of figures -->"
NONE = "No evidence is recorded yet; `scripts/evidence.py` records it."

Row = Mapping[str, Any]


def recorded(results: Path) -> list[Path]:
    """The newest evidence of each machine."""
    newest: dict[str, Path] = {}
    for path in sorted(results.glob("evidence_*.json")):
        newest[path.stem.rpartition("_")[0]] = path
    return list(newest.values())


def figures(paths: Sequence[Path]) -> str:
    """What stands between the markers."""
    if not paths:
        return NONE
    return "\n\n".join("\n".join(_machine(path)) for path in paths)


def _machine(path: Path) -> Iterator[str]:
    evidence = json.loads(path.read_text())
    machine = evidence["machine"]
    size = f"checkpoints of about {format_bytes(evidence['size_bytes'])}, " if evidence["size_bytes"] else ""
    yield (
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, {size}transformers {machine['transformers']}, "
        f"{machine['date']}, commit {machine['commit']} ([all figures](scripts/results/{path.stem}.md)):"
    )
    yield ""
    found = list(rows(evidence))
    pairs = [(ours, _other(ours, found)) for ours in found if ours["loader"].startswith("umem")]
    columns = (
        ("", lambda pair: pair[0]["what"] + (", mapped" if pair[0]["loader"] == "umem-mapped" else "")),
        ("cache", lambda pair: pair[0]["cache"]),
        ("umem", lambda pair: _seconds(pair[0])),
        ("without", lambda pair: _seconds(pair[1])),
        ("load, ratio", lambda pair: f"{pair[1]['load_to_umem'] / pair[0]['load_to_umem']:.2f}"),
        ("peak/model", lambda pair: f"{pair[0]['peak_to_model']:.2f}"),
        ("without", lambda pair: f"{pair[1]['peak_to_model']:.2f}"),
    )
    yield from table(columns, pairs)  # type: ignore[arg-type]


def _other(ours: Row, found: Sequence[Row]) -> Row:
    """The fastest loader besides umem's of the same case and cache."""
    rivals = (row for row in found if not row["loader"].startswith("umem"))
    alike = (row for row in rivals if (row["case"], row["cache"]) == (ours["case"], ours["cache"]))
    return min(alike, key=lambda row: row["load_s"])


def _seconds(row: Row) -> str:
    whole = row["first_forward_s"]
    return f"{row['load_s']:.2f} s" if whole is None else f"{whole:.2f} s, load {row['load_s']:.2f} s"


def with_figures(text: str, between: str) -> str:
    """The text with `between` in the place of what stood between the markers.

    Raises
    ------
    ValueError
        The markers are not there, once and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{README.name} needs one line {BEGIN} and one line {END} after it")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    return f"{before}\n{between}\n{after}"


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = README.read_text()
    wanted = with_figures(text, figures(recorded(RESULTS)))
    if options.check:
        return 0 if text == wanted else 1
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
