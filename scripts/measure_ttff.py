"""Time to first forward, recorded: the measurement of `umem ttff`, its result kept as JSON and as a page.

For example
  python scripts/sample_checkpoint.py moe
  python scripts/measure_ttff.py moe --baseline transformers --repeats 5 --save scripts/results/ttff_moe_2core_202611
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from umem.errors import UmemError
from umem.measurement.baselines import BASELINES
from umem.measurement.page import ttff_page
from umem.measurement.page_cache import CACHES
from umem.measurement.table import ttff_table
from umem.measurement.ttff import Measurement, measure


def save(result: dict[str, Any], path: Path) -> None:
    """Write PATH.json and PATH.html."""
    path.with_suffix(".json").write_text(json.dumps(result) + "\n")
    path.with_suffix(".html").write_text(ttff_page(result))


def main() -> int:
    """Measure, show, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("--baseline", action="append", choices=BASELINES, default=[])
    parser.add_argument("--cache", action="append", choices=CACHES, help="both if not said")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--save", type=Path, help="write PATH.json and PATH.html")
    options = parser.parse_args()
    if options.save is not None and not options.save.parent.is_dir():
        parser.error(f"--save {options.save}: there is no directory {options.save.parent}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        wanted = Measurement(
            checkpoint=options.checkpoint,
            device=options.device,
            dtype=options.dtype,
            baselines=options.baseline,
            caches=options.cache or CACHES,
            repeats=options.repeats,
        )
        result = measure(wanted, lambda line: print(line, file=sys.stderr, flush=True))
    except UmemError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing is left running", file=sys.stderr)
        return 130
    Console().print(ttff_table(result))
    if options.save is not None:
        save(result, options.save)
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
