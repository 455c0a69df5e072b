"""Measure what watching a load costs: a sample and its judgement, and the watch's share of warm loads.

python scripts/watch_cost.py [--size 1GiB] [--loads 7]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import umem
from umem._types import format_bytes, parse_bytes
from umem.probes import Expectation, MemoryProbe, Policy, Sample

_TENSORS = 32
_SAMPLES = 500


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1GiB", help="of the checkpoint")
    parser.add_argument("--loads", type=int, default=7)
    wanted = parser.parse_args()
    sampled, judged = _cost_of_a_sample()
    print(f"a sample {1e6 * sampled:.0f} us, its judgement {1e6 * judged:.0f} us of processor time (medians)")
    size = parse_bytes(wanted.size)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "model.safetensors"
        side = size // _TENSORS // 4096
        save_file({f"{i}.weight": torch.zeros(side, 1024) for i in range(_TENSORS)}, path)
        reports = [_loaded(path, side) for _ in range(wanted.loads + 1)][1:]
    shares = [report.thread_seconds["watch"] / report.total_s for report in reports]
    seconds = statistics.median(report.total_s for report in reports)
    samples = statistics.median(len(report.samples) / report.total_s for report in reports)
    print(f"{len(reports)} warm loads of {format_bytes(size)}: median {seconds:.2f} s, {samples:.0f} samples a second")
    print(f"the watch took {100 * statistics.median(shares):.2f} % of the wall time (most {100 * max(shares):.2f} %)")


def _cost_of_a_sample() -> tuple[float, float]:
    sampled, judged = [], []
    policy = Policy(umem.Thresholds())
    with MemoryProbe() as probe:
        policy.expect(Expectation(taken_bytes=1 << 30, peak_bytes=1 << 30), Sample(probe.sample(), None))
        for _ in range(_SAMPLES):
            started_s = time.thread_time()
            sample = Sample(probe.sample(counters_within_s=0.2), None)
            taken_s = time.thread_time()
            policy.judge(sample)
            sampled.append(taken_s - started_s)
            judged.append(time.thread_time() - taken_s)
            time.sleep(0.002)
    return statistics.median(sampled), statistics.median(judged)


def _loaded(path: Path, side: int) -> umem.LoadReport:
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, side, bias=False) for _ in range(_TENSORS)))
    return umem.load_into(model, path, device="cpu")


if __name__ == "__main__":
    main()
