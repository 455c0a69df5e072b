"""The regression gate: what its statistics say of series whose truth is known; and one look at real loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import bench_gate
import pytest
from bench_gate import Verdict, judge, level_of_each, p_of_ranks_above

RECORDED = [1.02, 1.00, 1.05, 0.98, 1.01]


def noisy(middle: float, count: int, seed: int, spread: float = 0.05) -> list[float]:
    random = Random(seed)
    return [middle * random.lognormvariate(0, spread) for _ in range(count)]


def by_enumeration(high: Sequence[float], low: Sequence[float]) -> float:
    pooled = [*high, *low]
    ranks = [sum(other < value for other in pooled) + 0.5 * pooled.count(value) for value in pooled]
    observed = sum(ranks[: len(high)])
    sums = [sum(chosen) for chosen in combinations(ranks, len(high))]
    return sum(total >= observed for total in sums) / len(sums)


@pytest.mark.parametrize(
    ("high", "low"),
    [
        ([5.0, 6.0, 7.0], [1.0, 2.0, 3.0, 4.0]),
        ([1.0, 2.0], [3.0, 4.0, 5.0]),
        ([1.0, 3.0, 5.0, 7.0], [2.0, 4.0, 6.0]),
        ([1.0, 1.0, 2.0], [1.0, 2.0, 2.0, 3.0]),
        ([1.0, 1.0], [1.0, 1.0]),
    ],
)
def test_the_rank_test_counts_every_division(high: list[float], low: list[float]) -> None:
    assert p_of_ranks_above(high, low) == pytest.approx(by_enumeration(high, low))


def test_a_large_loss_is_a_loss_and_no_change_is_none() -> None:
    worse = judge([1.4 * ratio for ratio in RECORDED], RECORDED, margin=0.1, level=0.01)
    assert worse.verdict is Verdict.LOSS
    assert worse.change == pytest.approx(1.4)
    assert worse.sureness > 0.99
    assert judge(RECORDED, RECORDED, margin=0.1, level=0.01).verdict is Verdict.NO_LOSS
    assert judge([0.5 * ratio for ratio in RECORDED], RECORDED, margin=0.1, level=0.01).verdict is Verdict.NO_LOSS


def test_few_rounds_or_much_noise_are_not_sure() -> None:
    assert judge([1.4, 1.5], RECORDED, margin=0.1, level=0.01).verdict is Verdict.UNSURE
    wide = [0.6, 1.9, 0.8, 1.6, 1.1]
    assert judge(wide, wide[::-1], margin=0.1, level=0.01).verdict is Verdict.UNSURE


def test_a_loss_within_the_margin_does_not_count() -> None:
    judgement = judge([1.02 * ratio for ratio in RECORDED], RECORDED, margin=0.25, level=0.01)
    assert judgement.verdict is Verdict.NO_LOSS


def test_one_wild_round_changes_nothing() -> None:
    new = [*noisy(1.0, 9, seed=1), 30.0]
    assert judge(new, noisy(1.0, 9, seed=2), margin=0.2, level=0.01).verdict is Verdict.NO_LOSS


def test_false_alarms_stay_within_the_level_over_all_looks() -> None:
    limit, level, trials = 12, 0.05, 200
    each = level_of_each(level, limit - bench_gate.LEAST_ROUNDS + 1, 1)
    alarms = missed = 0
    for trial in range(trials):
        recorded = noisy(1.0, 8, seed=3 * trial)
        for middle in (1.0, 2.0):
            new = noisy(middle, limit, seed=3 * trial + 1)
            looks = [
                judge(new[:n], recorded, margin=0.0, level=each) for n in range(bench_gate.LEAST_ROUNDS, limit + 1)
            ]
            sure = next((look.verdict for look in looks if look.verdict is not Verdict.UNSURE), Verdict.UNSURE)
            alarms += middle == 1.0 and sure is Verdict.LOSS
            missed += middle == 2.0 and sure is not Verdict.LOSS
    assert alarms / trials <= level
    assert missed == 0


def recorded_result(seconds: Sequence[float], raw: Sequence[float], peaks: Sequence[int]) -> dict[str, Any]:
    def series(loader: str, values: Sequence[float], **more: Any) -> dict[str, Any]:
        runs = [
            {"round": number, "load_s": value, "peak_bytes": peak}
            for number, (value, peak) in enumerate(zip(values, peaks, strict=True))
        ]
        return {"checkpoint": "m", "cache": "warm", "loader": loader, "runs": runs, "rejected": [], **more}

    read = {"direct": False, "threads": 2, "block_bytes": 1 << 20, "touched": False}
    return {
        "checkpoints": {"m": {"bytes": 1000, "shards": 1}},
        "left_out": {},
        "series": [
            series("umem-load", seconds),
            series("safetensors-mmap", seconds),
            series("buffered 2x1M", raw, raw=read),
            series("buffered 2x1M touched", [value / 9 for value in raw], raw=read | {"touched": True}),
        ],
    }


def test_ratios_are_to_the_plain_read_of_the_same_round() -> None:
    result = recorded_result([2.0, 9.0], [1.0, 3.0], [1100, 1200])
    assert bench_gate.ratios_of(result) == {
        ("m", "warm", "umem-load", "time"): [2.0, 3.0],
        ("m", "warm", "umem-load", "memory"): [1.1, 1.2],
    }
    names = [entrant.name for entrant in bench_gate.entrants_of(result)["warm"]]
    assert names == ["umem-load", "buffered 2x1M"]


class Rounds:
    """Rounds whose figures are made up."""

    def __init__(self, factor: float) -> None:
        self.factor, self.played = factor, 0

    def __call__(self, number: int, checkpoints: Any, entrants: Any, series: Any, left_out: Any) -> None:
        self.played += 1
        random = Random(number)
        for loader, value in (("umem-load", 2.0 * self.factor), ("buffered 2x1M", 1.0)):
            raw = {"raw": {"touched": False}} if loader.startswith("buffered") else {}
            new = {"checkpoint": "m", "cache": "warm", "loader": loader, **raw, "runs": []}
            mine = series.setdefault(loader, new)
            seconds = value * random.lognormvariate(0, 0.02)
            mine["runs"].append({"round": number, "load_s": seconds, "peak_bytes": 1100 + random.randrange(5)})


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.5, 1)])
def test_rounds_are_added_until_it_is_sure(factor: float, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = Rounds(factor)
    monkeypatch.setattr(bench_gate, "play_round", rounds)
    count = 8
    recorded = recorded_result(
        noisy(2.0, count, 5, 0.02), [1.0] * count, [1100 + number % 4 for number in range(count)]
    )
    looks = list(
        bench_gate.rounds_until_sure(recorded, [Path("m")], margins={"time": 0.1, "memory": 0.02}, level=0.05, limit=15)
    )
    assert bench_gate.LEAST_ROUNDS <= rounds.played < 15
    assert bench_gate.status_of(looks[-1]) == status
    lines = list(bench_gate.lines_of(looks[-1]))
    assert lines[0].startswith("loss: m warm umem-load time: +" if status else "no loss")


def test_at_the_limit_it_says_that_it_is_not_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_gate, "play_round", Rounds(1.1))
    recorded = recorded_result([2.0, 2.2], [1.0, 1.0], [1100, 1101])
    looks = list(
        bench_gate.rounds_until_sure(recorded, [Path("m")], margins={"time": 0.1, "memory": 0.02}, level=0.05, limit=5)
    )
    assert bench_gate.status_of(looks[-1]) == bench_gate.UNSURE_STATUS


def test_another_checkpoint_is_refused(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded.json"
    recorded.write_text(json.dumps(recorded_result([2.0], [1.0], [1100])))
    (tmp_path / "m").mkdir()
    for name, message in (
        ("other", "not in the recorded result; it has: m"),
        ("m", "0 bytes, the recorded one had 1000"),
    ):
        command = [sys.executable, bench_gate.__file__, str(recorded), str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2
        assert message in done.stderr
