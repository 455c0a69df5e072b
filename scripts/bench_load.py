r"""Benchmarks loads: umem against plain reads of the same bytes and against its peers, each run in a fresh process.

Each round runs every loader and the best plain reads once, in another order each time, from a page cache that is
counted to be cold (files evicted) or warm; runs that did not begin so are done anew. All tensors end in memory that the
process owns, which is checked, and a digest taken after the time proves that they are equal. Results are medians, with
ratios between runs of one round.

Peers that are not installed are left out. All of them, beside umem[transformers]:
  pip install --no-deps fastsafetensors==0.5.0 runai-model-streamer==0.17.1 humanize flashpack==0.4.5 \
    tensorizer==2.12.1 redis hiredis libnacl protobuf boto3 botocore jmespath s3transfer python-dateutil six urllib3

For example
  python scripts/sample_checkpoint.py dense --kind dense --size 4GiB      # --kind moe --size 4GiB --experts 128: MoE
  python scripts/bench_load.py dense moe --save scripts/results/bench_4gib_2core_202611
  python scripts/bench_load.py dense --only umem,safetensors --caches cold --rounds 9
  python scripts/bench_load.py moe --smallest-memory --only umem,transformers
  UMEM_RESERVE=0 UMEM_WINDOW=16MiB python scripts/bench_load.py moe --smallest-memory --only umem-load
  python scripts/bench_load.py --sweep sizes sweep-directory              # 64 MiB to 64 KiB tensors, 1 GiB each
  python scripts/bench_load.py --sweep sizes sweep-directory --only umem,safetensors,runai
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import load_tables
from end_state import MappedFiles
from loaders import LOADERS, Loader, convert, files_of
from raw_reads import CONFIGURATIONS, RawRead, prepared_raw
from smallest_memory import smallest_memory

from umem._types import format_bytes, parse_bytes
from umem.checkpoint import open_checkpoint
from umem.errors import RunFailedError
from umem.measurement.baselines import import_model_code
from umem.measurement.digest import digest, tensors_of
from umem.measurement.fresh import CheckedRun, Facts, run_checked, run_fresh, shuffled
from umem.measurement.meter import measured, request_of_child
from umem.measurement.page_cache import CACHES, shards_of
from umem.measurement.provenance import installed_version, machine

PACKAGES = ("torch", "transformers", "safetensors", "numpy")
TRIAL_BYTES = 512 << 20
_TRIALS, _KEPT = 2, 2

#: By checkpoint, cache and entrant.
Series = dict[tuple[str, str, str], dict[str, Any]]
_EXPERT = re.compile(r"\.experts\.\d+\.")  # in the name of a tensor of one expert


# --- in the child ----------------------------------------------------------------------------------------------------


def child(request: Mapping[str, Any]) -> Facts:
    """What the parent asks for: a plain read, a load, or a conversion."""
    files = [Path(path) for path in request.get("files", ())]
    if "convert_to" in request:
        convert(Path(request["checkpoint"]), Path(request["convert_to"]))
        return {}
    if "raw" in request:
        if "checkpoint" in request:
            start_like_a_loader(Path(request["checkpoint"]))
        return measured(prepared_raw(RawRead(**request["raw"]), files, request.get("most_bytes")), request)[1]
    loader = next(loader for loader in LOADERS if loader.name == request["loader"])
    loaded, facts = measured(loader.prepare(Path(request["checkpoint"]), files), request)
    state, report = loaded if isinstance(loaded, tuple) else (loaded, None)
    named = tensors_of(state)
    facts["mapped_bytes"] = MappedFiles(files).bytes_of(named.values())
    if request["digest"]:
        facts["digest"] = digest(named.items())
    if report is not None:
        facts |= {"reader": report.reader, "phases_s": report.seconds}
    return facts


def start_like_a_loader(checkpoint: Path) -> None:
    """Import what loaders import. A virtual machine's host takes back memory that lies idle meanwhile."""
    if (checkpoint / "config.json").exists():
        import_model_code(checkpoint)
    else:
        importlib.import_module("torch")


# --- in the parent ---------------------------------------------------------------------------------------------------


class Entrant(NamedTuple):
    """A loader or a plain read, as it takes part in every round."""

    name: str
    loader: Loader | None = None
    raw: RawRead | None = None

    def run(
        self, checkpoint: Path, converted: Path, cache: str, *, with_digest: bool = True, **limits: Any
    ) -> CheckedRun:
        """One run in a fresh process; `limits` are those of `run_fresh`."""
        if self.loader is None:
            read = {"raw": raw_facts(self.raw), "checkpoint": str(checkpoint)}
            return run_checked([__file__], read, files=shards_of(checkpoint), cache=cache)
        request = {"loader": self.name, "checkpoint": str(checkpoint), "digest": with_digest}
        files = files_of(self.loader, checkpoint, converted)
        environment = self.loader.environment
        return run_checked([__file__], request, files=files, cache=cache, environment=environment, **limits)


def raw_facts(read: RawRead | None) -> dict[str, Any]:
    """A plain read as JSON values."""
    return {} if read is None else read._asdict()


def measure(
    checkpoints: Sequence[Path],
    loaders: Sequence[Loader],
    caches: Sequence[str],
    rounds: int,
    *,
    converted: Path | None = None,
    configurations: Sequence[RawRead] = CONFIGURATIONS,
    brief: bool = False,
    after_round: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """All rounds, as JSON values.

    `brief` takes one plain read of each kind, and none into memory touched before. `after_round` is given what there is
    after each round, as if there were no more to come.
    """
    left_out: dict[str, str] = {}
    able = able_loaders(loaders, checkpoints, converted, left_out)
    series: Series = {}
    entrants: dict[str, list[Entrant]] = {}
    for cache in caches:
        raw = best_raw_reads(max(checkpoints, key=size_of), cache, configurations)
        best_of_kind = {read.direct: read for read in reversed(raw)}
        best = list(best_of_kind.values())
        reads = best if brief else [*raw, *(read._replace(touched=True) for read in best)]
        plain = [Entrant(read.label + (" touched" if read.touched else ""), raw=read) for read in reads]
        entrants[cache] = [*(Entrant(loader.name, loader) for loader in able), *plain]
    result: dict[str, Any] = {}
    for number in range(rounds):
        play_round(number, checkpoints, entrants, series, left_out, converted=converted)
        result = header(checkpoints, able, number + 1, left_out) | {"series": list(series.values())}
        result |= {"rows": load_tables.rows(result), "equal": load_tables.equal(result)}
        after_round(result)
    return result


def play_round(
    number: int,
    checkpoints: Sequence[Path],
    entrants: Mapping[str, Sequence[Entrant]],
    series: Series,
    left_out: dict[str, str],
    *,
    converted: Path | None = None,
) -> None:
    """One run more of each entrant, by cache, on each checkpoint; `series` and `left_out` take what comes of it."""
    for cache in shuffled(list(entrants), number):
        for checkpoint in shuffled(checkpoints, number):
            for entrant in shuffled(entrants[cache], number):
                if f"{entrant.name} on {checkpoint.name}" not in left_out:
                    key = (checkpoint.name, cache, entrant.name)
                    mine = series.setdefault(key, new_series(key, entrant))
                    run_of_round(mine, entrant, checkpoint, converted_of(checkpoint, converted), number, left_out)


def header(
    checkpoints: Sequence[Path], loaders: Sequence[Loader], rounds: int, left_out: Mapping[str, str]
) -> dict[str, Any]:
    """What every result says first."""
    return {
        "machine": machine([*PACKAGES, *dict.fromkeys(loader.package for loader in loaders)]),
        "checkpoints": {path.name: {"bytes": size_of(path), "shards": len(shards_of(path))} for path in checkpoints},
        "rounds": rounds,
        "loaders": {
            loader.name: {
                "package": loader.package,
                "version": installed_version(loader.package),
                "end_state": loader.end_state,
                "how": loader.how,
            }
            for loader in loaders
        },
        "left_out": dict(left_out),
    }


def new_series(key: tuple[str, str, str], entrant: Entrant) -> dict[str, Any]:
    """A series without runs."""
    checkpoint, cache, name = key
    raw = {} if entrant.raw is None else {"raw": raw_facts(entrant.raw)}
    return {"checkpoint": checkpoint, "cache": cache, "loader": name, **raw, "runs": [], "rejected": []}


def run_of_round(
    series: dict[str, Any],
    entrant: Entrant,
    checkpoint: Path,
    converted: Path,
    number: int,
    left_out: dict[str, str],
) -> None:
    """One run more in the series; a loader that fails is left out of later rounds, with its reason."""
    what = f"{checkpoint.name} {series['cache']} {entrant.name}"
    try:
        facts, rejected = entrant.run(checkpoint, converted, series["cache"])
    except RunFailedError as error:
        left_out[f"{entrant.name} on {checkpoint.name}"] = str(error)
        say(f"{what}: failed: {error}")
        return
    series["rejected"] += rejected
    if facts is None:
        say(f"{what}: given up, {max(rejected):.1%} of the files cached at the start")
        return
    series["runs"].append({"round": number, **facts})
    rate = size_of(checkpoint) / 2**30 / facts["load_s"]
    say(f"{number + 1} {what}: {facts['load_s']:.2f} s, {rate:.2f} GiB/s, peak {facts['peak_bytes'] >> 20} MiB")


def best_raw_reads(checkpoint: Path, cache: str, configurations: Sequence[RawRead]) -> list[RawRead]:
    """The fastest plain reads of each kind, by a short trial on the first part of the checkpoint.

    Which kind is faster shows only on the whole: filling the page cache with little is cheap.
    """
    seconds: dict[RawRead, list[float]] = defaultdict(list)
    files = shards_of(checkpoint)
    while len(files) > 1 and sum(path.stat().st_size for path in files[:-1]) >= TRIAL_BYTES:
        files.pop()
    for number in range(_TRIALS):
        for read in shuffled(configurations, number):
            request = {"raw": raw_facts(read), "most_bytes": TRIAL_BYTES}
            try:
                facts, _ = run_checked([__file__], request, files=files, cache=cache)
            except RunFailedError as error:  # some file systems refuse O_DIRECT
                say(f"plain read {read.label}: {error}")
                continue
            if facts is not None:
                seconds[read].append(facts["load_s"])
    ranked = sorted(seconds, key=lambda read: mean(seconds[read]))
    best = [read for kind in (True, False) for read in [read for read in ranked if read.direct is kind][:_KEPT]]
    say(f"best plain reads, {cache}: {', '.join(f'{read.label} {mean(seconds[read]):.2f} s' for read in best)}")
    return best


def able_loaders(
    loaders: Sequence[Loader], checkpoints: Sequence[Path], converted: Path | None, left_out: dict[str, str]
) -> list[Loader]:
    """The loaders that are installed and have their files; the others go into `left_out` with the reason."""
    able = []
    for loader in loaders:
        reason = None if loader.is_installed else f"{loader.package} is not installed"
        try:
            for checkpoint in checkpoints if loader.is_installed and loader.converted_name else ():
                write_converted(checkpoint, converted_of(checkpoint, converted) / (loader.converted_name or ""))
        except RunFailedError as error:
            reason = f"conversion failed: {error}"
        if reason is None:
            able.append(loader)
        else:
            left_out[loader.name] = reason
            say(f"{loader.name} is left out: {reason}")
    for loader in loaders:
        for checkpoint in checkpoints:
            reason = why_not(loader, checkpoint)
            if reason is not None:
                left_out[f"{loader.name} on {checkpoint.name}"] = reason
    return able


def why_not(loader: Loader, checkpoint: Path) -> str | None:
    """Why the loader cannot bring the checkpoint to its end state; None if it can."""
    if loader.end_state == "tensors":
        return None
    if not (checkpoint / "config.json").exists():
        return "there is no config.json, so no model"
    if not loader.merges_experts and any(map(_EXPERT.search, open_checkpoint(checkpoint).entries)):
        return "it does not merge experts"
    return None


def write_converted(checkpoint: Path, destination: Path) -> None:
    """Convert the checkpoint, unless that is done and newer."""
    if destination.exists() and destination.stat().st_mtime > max(p.stat().st_mtime for p in shards_of(checkpoint)):
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    say(f"converting {checkpoint.name} to {destination}")
    run_fresh([__file__], {"checkpoint": str(checkpoint), "convert_to": str(destination)})


def converted_of(checkpoint: Path, converted: Path | None) -> Path:
    """The directory of a checkpoint's converted files."""
    return (converted or checkpoint.parent / "converted") / checkpoint.name


def size_of(checkpoint: Path) -> int:
    """Bytes of its safetensors files."""
    return sum(path.stat().st_size for path in shards_of(checkpoint))


def search_smallest(
    checkpoints: Sequence[Path], loaders: Sequence[Loader], rounds: int, converted: Path | None
) -> dict[str, Any]:
    """The smallest memory for each loader and checkpoint, as JSON values."""
    left_out: dict[str, str] = {}
    able = able_loaders(loaders, checkpoints, converted, left_out)
    found = []
    for checkpoint in checkpoints:
        for loader in able:
            if f"{loader.name} on {checkpoint.name}" in left_out:
                continue
            try:
                run = limited_run(loader, checkpoint, converted_of(checkpoint, converted))
                facts = smallest_memory(run, size_of(checkpoint), rounds)
            except RunFailedError as error:
                left_out[f"{loader.name} on {checkpoint.name}"] = str(error)
                say(f"{checkpoint.name} {loader.name}: failed: {error}")
                continue
            ratio = facts["beyond_base_bytes"] / size_of(checkpoint)
            found.append({"checkpoint": checkpoint.name, "loader": loader.name, "beyond_to_size": ratio, **facts})
    return header(checkpoints, able, rounds, left_out) | {"smallest": found}


def limited_run(loader: Loader, checkpoint: Path, converted: Path) -> Callable[[int | None, float | None], Facts]:
    """Cold runs of a loader under a limit of bytes and seconds."""

    def run(limit_bytes: int | None, timeout_s: float | None) -> Facts:
        what = f"{checkpoint.name} {loader.name} in {format_bytes(limit_bytes) if limit_bytes else 'any memory'}"
        try:
            facts, _ = Entrant(loader.name, loader).run(
                checkpoint, converted, "cold", with_digest=False, limit_bytes=limit_bytes, timeout_s=timeout_s
            )
        except RunFailedError as error:
            say(f"{what}: {error}")
            raise
        if facts is None:
            raise RunFailedError("the files cannot be evicted from the page cache")
        say(f"{what}: {facts['load_s']:.2f} s")
        return facts

    return run


# --- the command line ------------------------------------------------------------------------------------------------


def chosen_loaders(parser: argparse.ArgumentParser, only: str | None) -> list[Loader]:
    """The loaders whose name, or the part of it before the first `-`, is among `only`; all of them for None."""
    if only is None:
        return list(LOADERS)
    wanted = [name.strip() for name in only.split(",")]
    known = {name for loader in LOADERS for name in (loader.name, loader.name.partition("-")[0])}
    for name in wanted:
        if name not in known:
            parser.error(f"--only {name}: no such loader; there are: {', '.join(loader.name for loader in LOADERS)}")
    return [loader for loader in LOADERS if {loader.name, loader.name.partition("-")[0]} & set(wanted)]


def check_checkpoints(parser: argparse.ArgumentParser, checkpoints: Sequence[Path]) -> None:
    """Refuse what cannot be loaded, with what to do."""
    for path in checkpoints:
        if not shards_of(path):
            parser.error(
                f"{path}: there is no checkpoint of safetensors files. Write one of 4 GiB: python "
                f"scripts/sample_checkpoint.py {path} --kind dense --size 4GiB, or with --kind moe (a mixture of "
                "experts) or --kind fp8"
            )
    if len({path.name for path in checkpoints}) < len(checkpoints):
        parser.error("the checkpoints' directories must have different names")


def run_command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """The result and its page."""
    loaders = chosen_loaders(parser, options.only or ("umem" if options.sweep else None))
    paths: list[Path] = [path.resolve() for path in options.paths]
    if options.sweep:
        if len(paths) != 1:
            parser.error("--sweep takes one directory, to write its checkpoints to")
        from sweeps import SWEEPS  # imports torch, which plain reads have no use for

        paths = SWEEPS[options.sweep](paths[0], options.total)
        loaders = [loader for loader in loaders if loader.end_state == "tensors"]
    check_checkpoints(parser, paths)
    if options.smallest_memory:
        result = search_smallest(paths, loaders, options.rounds, options.converted)
        return result, load_tables.smallest_markdown(result)
    result = measure(
        paths,
        loaders,
        options.caches,
        options.rounds,
        converted=options.converted,
        brief=bool(options.sweep),
        after_round=lambda rounds: save(options, rounds, load_tables.markdown(rounds)),
    )
    return result, load_tables.markdown(result)


def save(options: argparse.Namespace, result: Mapping[str, Any], page: str) -> None:
    """Write PATH.json and PATH.md, where that was asked for."""
    if options.save is not None:
        options.save.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        options.save.with_suffix(".md").write_text(page)


def main() -> int:
    """Measure, show, save."""
    request = request_of_child()
    if request is not None:
        print(json.dumps(child(request)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", type=Path, nargs="+", metavar="CHECKPOINT", help="with --sweep: where to write")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--caches", nargs="+", choices=CACHES, default=list(CACHES))
    parser.add_argument("--only", metavar="A,B", help=f"of {', '.join(loader.name for loader in LOADERS)}")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--smallest-memory", action="store_true", help="search the smallest cgroup that a load fits")
    mode.add_argument(
        "--sweep",
        choices=("sizes", "shards"),
        help="umem (and who else is named by --only) against plain reads over sizes of tensors or shards",
    )
    parser.add_argument("--total", type=parse_bytes, default="1GiB", help="the size of each checkpoint of a sweep")
    parser.add_argument("--converted", type=Path, help="where files of peers' own formats go (default: beside)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the page")
    parser.add_argument("--save", type=Path, help="write PATH.json and PATH.md, after each round")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: one at least")
    if options.save is not None and not options.save.parent.is_dir():
        parser.error(f"--save {options.save}: there is no directory {options.save.parent}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result, page = run_command(parser, options)
    except KeyboardInterrupt:
        say("interrupted; nothing is left running")
        return 130
    print(json.dumps(result, indent=1) if options.json else page)
    save(options, result, page)
    return 0 if result.get("equal", True) else 1


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
