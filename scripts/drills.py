"""Run the drills: loads in memory cgroups while something takes the memory away, and what they come to.

python scripts/drills.py                                    all hundred, as root; about eight minutes
python scripts/drills.py --count 12 --save results/drills   one of each kind, and the page
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

from tests.drills import MIB, Drill, Outcome, drills, failures_of, prepare, run_drill
from tests.limits import swap_file
from umem.measurement.provenance import machine

_SWAP_BYTES = 512 * MIB
_HEADER = ("disaster", "swap", "runs", "loaded", "stopped", "failed", "stop s", "latest s", "left", "kept", "swapped")
_KEY = """A load of 96 MiB, slowed down, in a memory cgroup with room for it, its window, the reserve and a bit more.
Loaded: bit-exact. Stopped: `MemoryOverrunError` with the right cause, the model as it was. Stop: the most seconds
from the decision to the error; latest: from the crossing of the hard floor, `before` where none was crossed. Left: the
least left in the group; kept: the most that the loader had not given back; swapped: the most swapped out; in MiB."""

_Run = tuple[Drill, Outcome]


def main() -> int:
    """Exit status 1 if a drill failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many, from the first seed on")
    parser.add_argument("--save", type=Path, help="write the page to this path, with .md")
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        checkpoint = prepare(Path(directory))
        stack.enter_context(swap_file(Path(directory), _SWAP_BYTES))
        for number, drill in enumerate(drills(options.count), 1):
            outcome = run_drill(drill, checkpoint)
            runs.append((drill, outcome))
            swap = "swap" if drill.swap else "no swap"
            failures = "; ".join(failures_of(drill, outcome)) or "ok"
            print(f"{number:3} {drill.disaster:20} {swap:8} {outcome.ended:20} {outcome.rule:8} {failures}", flush=True)
    page = _page(runs)
    print(f"\n{page}")
    if options.save is not None:
        options.save.with_suffix(".md").write_text(page)
    return int(any(failures_of(drill, outcome) for drill, outcome in runs))


def _page(runs: list[_Run]) -> str:
    kinds: dict[tuple[str, str], list[_Run]] = defaultdict(list)
    for drill, outcome in runs:
        kinds[str(drill.disaster), "yes" if drill.swap else "no"].append((drill, outcome))
    facts = ", ".join(f"{name} {value}" for name, value in machine(["torch"]).items())
    lines = ["# Drills", "", f"{facts}.", "", *_KEY.splitlines(), ""]
    lines += ["| " + " | ".join(_HEADER) + " |", "|" + "---|" * len(_HEADER)]
    lines += ["| " + " | ".join([*kind, *_cells(of_kind)]) + " |" for kind, of_kind in kinds.items()]
    failed = sum(bool(failures_of(drill, outcome)) for drill, outcome in runs)
    return "\n".join([*lines, "", f"{len(runs)} drills, {failed} failed."]) + "\n"


def _cells(runs: list[_Run]) -> list[str]:
    outcomes = [outcome for _, outcome in runs]
    latencies = [outcome.latency_s for outcome in outcomes if outcome.latency_s is not None]
    return [
        str(len(runs)),
        str(sum(outcome.ended == "loaded" for outcome in outcomes)),
        str(sum(outcome.ended == "MemoryOverrunError" for outcome in outcomes)),
        str(sum(bool(failures_of(drill, outcome)) for drill, outcome in runs)),
        f"{max(outcome.stop_s for outcome in outcomes):.3f}",
        f"{max(latencies):.3f}" if latencies else "before",
        str(min(outcome.least_headroom_bytes for outcome in outcomes) // MIB),
        str(max(outcome.left_bytes for outcome in outcomes) // MIB),
        str(max(outcome.swapped_bytes for outcome in outcomes) // MIB),
    ]


if __name__ == "__main__":
    sys.exit(main())
