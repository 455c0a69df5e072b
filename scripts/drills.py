"""Run the drills: loads in memory cgroups while something takes the memory away, and what they come to, as a table.

python scripts/drills.py            all hundred (root; about ten minutes)
python scripts/drills.py --count 10 the first ten
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).resolve().parent.parent))

from tests.drills import MIB, Drill, Outcome, drills, failures_of, prepare, run_drill
from tests.limits import swap_file

_SWAP_BYTES = 512 * MIB
_CAPTION = "latest: the latest stop, s after the crossing; left: the least that was left; sizes in MiB"


def main() -> int:
    """Exit status 1 if a drill failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many, from the first seed on")
    wanted = parser.parse_args().count
    console = Console()
    results: list[tuple[Drill, Outcome]] = []
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        checkpoint = prepare(Path(directory))
        stack.enter_context(swap_file(Path(directory), _SWAP_BYTES))
        for number, drill in enumerate(drills(wanted), 1):
            outcome = run_drill(drill, checkpoint)
            results.append((drill, outcome))
            failures = "; ".join(failures_of(drill, outcome)) or "ok"
            swap = "swap" if drill.swap else "no swap"
            line = f"{number:3} {drill.disaster:20} {swap:8} {outcome.ended:20} {outcome.rule:8} {failures}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(results))
    return int(any(failures_of(drill, outcome) for drill, outcome in results))


def _table(results: list[tuple[Drill, Outcome]]) -> Table:
    table = Table(
        box=None,
        pad_edge=False,
        caption=_CAPTION,
    )
    for name in ("disaster", "swap"):
        table.add_column(name, no_wrap=True)
    for name in ("runs", "loaded", "stopped", "failed", "latest", "left", "kept", "swapped"):
        table.add_column(name, justify="right", no_wrap=True)
    kinds: dict[tuple[str, bool], list[tuple[Drill, Outcome]]] = defaultdict(list)
    for drill, outcome in results:
        kinds[drill.disaster, drill.swap].append((drill, outcome))
    for (disaster, swap), runs in kinds.items():
        outcomes = [outcome for _, outcome in runs]
        latencies = [outcome.latency_s for outcome in outcomes if outcome.latency_s is not None]
        table.add_row(
            disaster,
            "yes" if swap else "no",
            str(len(runs)),
            str(sum(outcome.ended == "loaded" for outcome in outcomes)),
            str(sum(outcome.ended == "MemoryOverrunError" for outcome in outcomes)),
            str(sum(bool(failures_of(drill, outcome)) for drill, outcome in runs)),
            f"{max(latencies):.3f}" if latencies else "before",
            str(min(outcome.least_headroom_bytes for outcome in outcomes) // MIB),
            str(max(outcome.left_bytes for outcome in outcomes) // MIB),
            str(max(outcome.swapped_bytes for outcome in outcomes) // MIB),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
