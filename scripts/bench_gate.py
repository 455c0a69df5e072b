"""Says whether loads have become slower, or take more memory, than a recorded benchmark says, on a machine with noise.

Compared are ratios, which outlive a noisy minute better than seconds: of each round, a load's seconds over those of the
best plain read of the same bytes; and its peak over the checkpoint's size. The recorded rounds and the new ones are
ranked together, and an exact one-sided rank test (Mann-Whitney, ties at their mean rank) asks twice: are the new ones
above the recorded ones times 1 + margin (a loss), or below (no loss)? Rounds are added until one of both is sure, or
the limit is reached. The level, 5 % by default, is that of the whole run: it is divided among all looks and series.

Exit status: 0 no loss, 1 a loss or a load that fails, 2 used wrongly, 3 not sure at the limit.

For example
  python scripts/bench_load.py dense moe --only umem --save scripts/results/bench_4gib_2core_202611
  python scripts/bench_gate.py scripts/results/bench_4gib_2core_202611.json dense moe
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench_load import Entrant, Series, play_round, say, size_of
from load_tables import ratios_to_raw, yes_or_no
from loaders import LOADERS
from raw_reads import RawRead

from umem.errors import RunFailedError

LEAST_ROUNDS = 4
LOSS_STATUS, UNSURE_STATUS = 1, 3
MARGINS = {"time": 0.10, "memory": 0.02}

#: Checkpoint, cache, loader and what is compared -> its ratios, one a round.
Ratios = dict[tuple[str, str, str, str], list[float]]


# --- statistics ------------------------------------------------------------------------------------------------------


class Verdict(StrEnum):
    """What can be said."""

    LOSS = "loss"
    NO_LOSS = "no loss"
    UNSURE = "unsure"


class Judgement(NamedTuple):
    """What one series says.

    Attributes
    ----------
    verdict
        At the level that was asked for.
    change
        The median of new over recorded ratios, of all pairs; 1.1 is 10 % worse.
    p_loss
        How probable it is to see ranks as bad as these, or worse, if the new ones are no worse than the margin.
    p_no_loss
        The same for ranks as good, if they are no better than the margin.
    """

    verdict: Verdict
    change: float
    p_loss: float
    p_no_loss: float

    @property
    def sureness(self) -> float:
        """1 less the probability of what would speak against the likelier side."""
        return 1 - min(self.p_loss, self.p_no_loss)


def judge(new: Sequence[float], recorded: Sequence[float], *, margin: float, level: float) -> Judgement:
    """Whether the new ratios are worse than the recorded ones by more than `margin`, at that level of error."""
    allowed = [ratio * (1 + margin) for ratio in recorded]
    p_loss, p_no_loss = p_of_ranks_above(new, allowed), p_of_ranks_above(allowed, new)
    verdict = Verdict.LOSS if p_loss < level else Verdict.NO_LOSS if p_no_loss < level else Verdict.UNSURE
    return Judgement(verdict, median(mine / theirs for mine in new for theirs in recorded), p_loss, p_no_loss)


def p_of_ranks_above(high: Sequence[float], low: Sequence[float]) -> float:
    """The share of all divisions of the pooled values in which the first group has ranks as high as `high`, or higher.

    Exact, by counting the divisions with each sum of ranks; 1 over the binomial coefficient at least.
    """
    ranks = _doubled_ranks([*high, *low])
    observed = sum(ranks[: len(high)])
    ways: list[dict[int, int]] = [defaultdict(int) for _ in range(len(high) + 1)]
    ways[0][0] = 1
    for rank in ranks:
        for count in range(len(high), 0, -1):
            for total, number in ways[count - 1].items():
                ways[count][total + rank] += number
    as_high = sum(number for total, number in ways[len(high)].items() if total >= observed)
    return as_high / comb(len(ranks), len(high))


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the rank of each value, so that the mean rank of ties is a whole number."""
    return [sum(2 * (other < value) + (other == value) for other in values) + 1 for value in values]


def level_of_each(level: float, looks: int, series: int) -> float:
    """The level of each look at each series, so that all of them together stay within `level`."""
    return level / (looks * series)


# --- what is compared ------------------------------------------------------------------------------------------------


def ratios_of(result: Mapping[str, Any]) -> Ratios:
    """The ratios of umem's loads in a result of `bench_load.py`."""
    found: Ratios = {}
    for series in result["series"]:
        if "raw" in series or not series["loader"].startswith("umem"):
            continue
        key = series["checkpoint"], series["cache"], series["loader"]
        size = result["checkpoints"][series["checkpoint"]]["bytes"]
        found[(*key, "time")] = ratios_to_raw(result, series)
        found[(*key, "memory")] = [facts["peak_bytes"] / size for facts in series["runs"]]
    return {key: ratios for key, ratios in found.items() if ratios}


def judged(new: Ratios, recorded: Ratios, margins: Mapping[str, float], level: float) -> dict[Any, Judgement]:
    """A judgement of each recorded series that was measured anew; `level` is that of each."""
    return {
        key: judge(new[key], ratios, margin=margins[key[3]], level=level)
        for key, ratios in recorded.items()
        if key in new
    }


def entrants_of(recorded: Mapping[str, Any]) -> dict[str, list[Entrant]]:
    """The loads by umem and the plain reads of a recorded result, by cache."""
    entrants: dict[str, dict[str, Entrant]] = defaultdict(dict)
    for series in recorded["series"]:
        name = series["loader"]
        if "raw" in series:
            raw = RawRead(**series["raw"])
            if not raw.touched:
                entrants[series["cache"]][name] = Entrant(name, raw=raw)
        elif name.startswith("umem"):
            loader = next(loader for loader in LOADERS if loader.name == name)
            entrants[series["cache"]][name] = Entrant(name, loader)
    return {cache: list(named.values()) for cache, named in entrants.items()}


def rounds_until_sure(
    recorded: Mapping[str, Any],
    checkpoints: Sequence[Path],
    *,
    margins: Mapping[str, float],
    level: float,
    limit: int,
) -> Iterator[dict[Any, Judgement]]:
    """The judgements after each look, until all series are sure or `limit` rounds are done.

    What is sure stays so: it is not looked at again.

    Raises
    ------
    RunFailedError
        A load fails that was recorded.
    """
    entrants, series, left_out = entrants_of(recorded), Series(), dict(recorded["left_out"])
    names = {path.name for path in checkpoints}
    old = {key: ratios for key, ratios in ratios_of(recorded).items() if key[0] in names}
    each = level_of_each(level, limit - LEAST_ROUNDS + 1, len(old))
    sure: dict[Any, Judgement] = {}
    for number in range(limit):
        play_round(number, checkpoints, entrants, series, left_out)
        failed = {name: why for name, why in left_out.items() if name not in recorded["left_out"]}
        if failed:
            raise RunFailedError("; ".join(f"{name}: {why}" for name, why in failed.items()))
        if number + 1 < LEAST_ROUNDS:
            continue
        result = {"series": list(series.values()), "checkpoints": recorded["checkpoints"]}
        open_series = {key: ratios for key, ratios in old.items() if key not in sure}
        found = judged(ratios_of(result), open_series, margins, each)
        sure |= {key: judgement for key, judgement in found.items() if judgement.verdict is not Verdict.UNSURE}
        yield found | sure
        if len(sure) == len(old):
            return


# --- the command line ------------------------------------------------------------------------------------------------


def lines_of(found: Mapping[Any, Judgement]) -> Iterator[str]:
    """A line a series, the losses first."""
    order = [Verdict.LOSS, Verdict.UNSURE, Verdict.NO_LOSS]
    for key, judgement in sorted(found.items(), key=lambda item: order.index(item[1].verdict)):
        change = f"{judgement.change - 1:+.1%}"
        yield f"{judgement.verdict}: {' '.join(key)}: {change}, sure to {judgement.sureness:.2%}"


def status_of(found: Mapping[Any, Judgement]) -> int:
    """The exit status."""
    verdicts = {judgement.verdict for judgement in found.values()}
    if Verdict.LOSS in verdicts:
        return LOSS_STATUS
    return UNSURE_STATUS if Verdict.UNSURE in verdicts else 0


def check(parser: argparse.ArgumentParser, recorded: Mapping[str, Any], checkpoints: Sequence[Path]) -> None:
    """Refuse what cannot be compared, with what to do."""
    for path in checkpoints:
        known = recorded.get("checkpoints", {})
        if path.name not in known:
            parser.error(f"{path.name}: not in the recorded result; it has: {', '.join(known)}")
        if size_of(path) != known[path.name]["bytes"]:
            parser.error(f"{path}: {size_of(path)} bytes, the recorded one had {known[path.name]['bytes']}")
    names = {path.name for path in checkpoints}
    if not any(key[0] in names for key in ratios_of(recorded)):
        parser.error("the recorded result has no rounds of umem beside plain reads")


def main() -> int:
    """Measure until sure, show, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recorded", type=Path, metavar="RECORDED.json")
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--limit", type=int, default=15, help="rounds at most")
    parser.add_argument("--level", type=float, default=0.05, help="the error that the whole run may make")
    parser.add_argument("--margin", type=float, default=MARGINS["time"], help="a loss of time that does not count")
    parser.add_argument("--memory-margin", type=float, default=MARGINS["memory"])
    options = parser.parse_args()
    if options.limit < LEAST_ROUNDS:
        parser.error(f"--limit: {LEAST_ROUNDS} at least")
    recorded = json.loads(options.recorded.read_text())
    checkpoints = [path.resolve() for path in options.checkpoints]
    check(parser, recorded, checkpoints)
    margins = {"time": options.margin, "memory": options.memory_margin}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    found: dict[Any, Judgement] = {}
    try:
        for found in rounds_until_sure(
            recorded, checkpoints, margins=margins, level=options.level, limit=options.limit
        ):
            unsure = sum(judgement.verdict is Verdict.UNSURE for judgement in found.values())
            say(f"{len(found)} series, {unsure} not sure yet")
    except RunFailedError as error:
        say(f"failed: {error}")
        return LOSS_STATUS
    except KeyboardInterrupt:
        say("interrupted; nothing is left running")
        return 130
    print("\n".join(lines_of(found)))
    print(f"no loss: {yes_or_no(status_of(found) == 0)}")
    return status_of(found)


if __name__ == "__main__":
    sys.exit(main())
