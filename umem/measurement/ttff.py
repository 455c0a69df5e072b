"""Time to first forward: from the start of a process to a model's first answer, by umem and by other roads.

Each run is a fresh process, started with the checkpoint's files out of the page cache (cold) or in it (warm), which is
counted; the rounds are interleaved. The interpreter's and the libraries' own files are warm throughout: a run that only
imports comes first. The result is JSON values; `table` and `page` show it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from umem.checkpoint import open_checkpoint
from umem.checkpoint.mounts import file_system_of
from umem.errors import CheckpointNotFoundError, RunFailedError, SettingsError, UnsupportedError
from umem.measurement.baselines import BASELINES, MODEL_LOADERS, check_installed
from umem.measurement.first_forward import PROGRAM
from umem.measurement.fresh import Facts, run_checked, run_fresh, shuffled
from umem.measurement.page_cache import CACHES
from umem.measurement.provenance import installed_version, machine
from umem.measurement.sampling import ProcessWatch, series_of
from umem.report.model import PHASES

__all__ = ["TTFF_SCHEMA_VERSION", "Measurement", "measure", "row_of"]

TTFF_SCHEMA_VERSION = 1

#: In the order in which they begin; phases of umem's that are not here come with the load.
_PHASES = ("start", "import", "probe", *PHASES, "load", "move", "first forward", "second forward")
_PACKAGES = ("umem", "torch", "transformers", "accelerate", "safetensors")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What to measure.

    Attributes
    ----------
    checkpoint
        A directory with `config.json` and weights, or a hub id that is in the cache.
    device, dtype
        As for `umem.load`.
    baselines
        The other roads, of `BASELINES`.
    caches
        `cold`, `warm` or both.
    repeats
        Rounds.
    settings
        Fields of umem's settings that are not the default.
    """

    checkpoint: str
    device: str = "auto"
    dtype: str = "auto"
    baselines: Sequence[str] = ()
    caches: Sequence[str] = CACHES
    repeats: int = 3
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, given, known in (("baseline", self.baselines, BASELINES), ("cache", self.caches, CACHES)):
            for name in given:
                if name not in known:
                    raise SettingsError(f"no {what} is called {name!r}; there are: {', '.join(known)}")
        if self.repeats < 1:
            raise SettingsError(f"repeats={self.repeats}: one at least")

    @property
    def loaders(self) -> list[str]:
        """umem, and the baselines."""
        return ["umem", *dict.fromkeys(self.baselines)]


def measure(wanted: Measurement, say: Callable[[str], None] = lambda _line: None) -> dict[str, Any]:
    """All runs, as JSON values (schema `umem.ttff`); `say` is given a line after each.

    Raises
    ------
    CheckpointError, UnsupportedError
        There is no checkpoint of a model in local files.
    MissingDependencyError
        A loader's packages are not installed.
    RunFailedError
        umem's own load failed, or the page cache cannot be made as wanted. A baseline that fails is left out, with its
        reason in the result.
    """
    for name in wanted.loaders:
        check_installed(MODEL_LOADERS[name])
    directory, files = _located(wanted.checkpoint)
    runs = _Runs(wanted, directory, files, say)
    for number in range(wanted.repeats):
        for cache in shuffled(list(wanted.caches), number):
            for loader in shuffled(wanted.loaders, number):
                runs.add(loader, cache, number)
    return runs.result()


def _located(path_or_id: str) -> tuple[Path, list[Path]]:
    """The directory of the model, and the files with its weights."""
    checkpoint = open_checkpoint(path_or_id)
    if any(shard.is_remote for shard in checkpoint.shards):
        raise UnsupportedError(f"{path_or_id}: cold and warm are measured of local files; download it first")
    files = [Path(shard.path) for shard in checkpoint.shards]
    directory = files[0].parent
    if not (directory / "config.json").exists():
        raise CheckpointNotFoundError(
            "there is no config.json, so nothing says which model's forward pass to time", path=path_or_id
        )
    return directory, files


class _Runs:
    """The runs so far, and what failed."""

    def __init__(self, wanted: Measurement, directory: Path, files: Sequence[Path], say: Callable[[str], None]) -> None:
        self._wanted, self._directory, self._files, self._say = wanted, directory, files, say
        self._left_out: dict[str, str] = {}
        self._rejected = 0
        self._runs: list[dict[str, Any]] = []
        self._digested: set[str] = set()
        self._place: Facts = {}
        for name in wanted.loaders:
            self._import(name)

    def _request(self, loader: str) -> dict[str, Any]:
        wanted = self._wanted
        return {
            "loader": loader,
            "checkpoint": str(self._directory),
            "device": self._place["platform"]["device"] if self._place else wanted.device,
            "dtype": wanted.dtype,
            "settings": dict(wanted.settings),
            "only_imports": False,
            "digest_weights": False,
        }

    def _import(self, loader: str) -> None:
        """Bring the libraries' files into the page cache, and learn which device is meant."""
        found = run_fresh(PROGRAM, self._request(loader) | {"only_imports": True})
        self._place = self._place or found

    def add(self, loader: str, cache: str, number: int) -> None:
        """One run more."""
        if loader in self._left_out:
            return
        what = f"round {number + 1} of {self._wanted.repeats}, {cache}, {loader}"
        watches: list[ProcessWatch] = []

        @contextmanager
        def watch(process: int, started_s: float) -> Any:
            watches.append(ProcessWatch(process, started_s, self._files))
            with watches[-1]:
                yield

        request = self._request(loader) | {"digest_weights": loader not in self._digested}
        try:
            facts, rejected = run_checked(PROGRAM, request, files=self._files, cache=cache, watch=watch)
        except RunFailedError as error:
            if loader == "umem":
                raise
            self._left_out[loader] = str(error)
            self._say(f"{what}: left out: {error}")
            return
        self._rejected += len(rejected)
        if facts is None:
            raise RunFailedError(
                f"the page cache could not be made {cache}: {rejected[-1]:.0%} of the files was cached at the start. "
                "Does another process have them open or mapped? As root, all of the page cache is dropped"
            )
        self._digested.add(loader)
        series = series_of(watches[-1].samples, facts["first_forward_s"])
        run = {"loader": loader, "cache": cache, "round": number, **facts, "series": series}
        self._runs.append(run | {"peaks": _peaks(run)})
        peak = f"{facts['peak_bytes'] / 2**20:.0f} MiB"
        self._say(f"{what}: first forward pass after {facts['first_forward_s']:.2f} s, peak {peak}")

    def result(self) -> dict[str, Any]:
        """Everything as JSON values."""
        wanted, first = self._wanted, next(run for run in self._runs if run["loader"] == "umem")
        stored = {"bytes": sum(path.stat().st_size for path in self._files), "shards": len(self._files)}
        model_bytes = first["report"]["plan"]["forecast"]["final_bytes"]
        keys = [(cache, name) for cache in wanted.caches for name in wanted.loaders if name not in self._left_out]
        of = {key: [run for run in self._runs if (run["cache"], run["loader"]) == key] for key in keys}
        shown = {
            key: sorted(mine, key=lambda run: run["first_forward_s"])[(len(mine) - 1) // 2] for key, mine in of.items()
        }
        for run in self._runs:
            if run is not shown.get((run["cache"], run["loader"])):
                del run["series"]
        return {
            "schema": "umem.ttff",
            "version": TTFF_SCHEMA_VERSION,
            "machine": machine(_PACKAGES),
            "model": _model_facts(self._directory, first) | {"final_bytes": model_bytes, **stored},
            "layout": first["report"]["plan"]["routes"],
            "backend": self._place["backend"],
            "topology": self._place["platform"] | {"numa_nodes": _numa_nodes()},
            "storage": {"file_system": file_system_of(self._directory)},
            "repeats": wanted.repeats,
            "settings": dict(wanted.settings),
            "loaders": {name: _loader_facts(name) for name in wanted.loaders},
            "left_out": self._left_out,
            "rejected": self._rejected,
            "equal": _is_equal(self._runs),
            "rows": [row_of(mine, of.get((key[0], "umem"), []), model_bytes) for key, mine in of.items()],
            "runs": self._runs,
        }


def _loader_facts(name: str) -> dict[str, Any]:
    loader = MODEL_LOADERS[name]
    package = "umem" if name == "umem" else loader.packages[0]
    return {"how": loader.how, "version": installed_version(package)}


def _model_facts(directory: Path, run: Mapping[str, Any]) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    return {
        "name": directory.name,
        "type": config.get("model_type"),
        "class": run["model_class"],
        "dtype": run["dtype"],
        "quantization": (config.get("quantization_config") or {}).get("quant_method"),
    }


def _numa_nodes(root: Path = Path("/sys/devices/system/node")) -> int | None:
    return len(list(root.glob("node[0-9]*"))) or None


def _is_equal(runs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all loaders gave the same weights, and all runs the same answer."""
    weights = {run["weights_digest"] for run in runs if "weights_digest" in run}
    return len(weights) == 1 and len({run["logits_digest"] for run in runs}) == 1


def _peaks(run: Mapping[str, Any]) -> dict[str, int | None]:
    """By kind, the most that a run took from the beginning of its load to its first forward pass, from its series."""
    series = run["series"]
    begun_s = next(start for name, start, _ in run["spans"] if name not in ("start", "import"))
    after = [number for number, time_s in enumerate(series["time_s"]) if time_s >= begun_s]
    first = max(0, after[0] - 1) if after else 0

    def grown(name: str, sign: int = 1) -> int | None:
        values = [sign * value for value in series[name][first:] if value is not None]
        return max(values) - values[0] if values else None

    names = ("anonymous_bytes", "file_bytes", "shared_bytes", "swapped_bytes", "page_cache_bytes", "swap_used_bytes")
    return {
        **{name: grown(name) for name in names},
        "available_dip_bytes": grown("available_bytes", -1),
        "pressure_us": grown("pressure_us"),
    }


def _place_of_phase(name: str) -> int:
    return _PHASES.index(name) if name in _PHASES else _PHASES.index("load")


def row_of(
    runs: Sequence[Mapping[str, Any]], umem_runs: Sequence[Mapping[str, Any]], model_bytes: int
) -> dict[str, Any]:
    """The medians of one loader's runs with one cache, and their ratios to umem's runs of the same rounds.

    Times and peaks over umem's: above 1 where umem is faster or takes less. `model_bytes`: what the model takes.
    """
    own = {run["round"]: run for run in umem_runs}

    def middle(name: str, part: str | None = None) -> float | None:
        holders = [run if part is None else run[part] for run in runs]
        found = [holder[name] for holder in holders if holder.get(name) is not None]
        return median(found) if found else None

    def ratio(name: str) -> float | None:
        found = [run[name] / own[run["round"]][name] for run in runs if run["round"] in own and own[run["round"]][name]]
        return median(found) if found else None

    seconds = [run["first_forward_s"] for run in runs]
    phases = sorted({name for run in runs for name in run["phases_s"]}, key=_place_of_phase)
    peak = median(run["peak_bytes"] for run in runs)
    left = [
        run["cached_after_bytes"] - run["cached_before_bytes"] for run in runs if run["cached_after_bytes"] is not None
    ]
    return {
        "cache": runs[0]["cache"],
        "loader": runs[0]["loader"],
        "runs": len(runs),
        "first_forward_s": median(seconds),
        "fastest_s": min(seconds),
        "slowest_s": max(seconds),
        "load_s": middle("load_s"),
        "phases_s": {name: median(run["phases_s"].get(name, 0.0) for run in runs) for name in phases},
        "to_umem": ratio("first_forward_s"),
        "load_to_umem": ratio("load_s"),
        "peak_to_umem": ratio("peak_bytes"),
        "peak_bytes": peak,
        "peak_to_model": peak / model_bytes,
        "cache_left_bytes": median(left) if left else None,
        "peaks": {name: middle(name, "peaks") for name in runs[0]["peaks"]},
        "minor_faults": middle("minor_faults"),
        "major_faults": middle("major_faults"),
        "cpu_s": middle("cpu_s"),
        "others_cpu_s": middle("others_cpu_s"),
        "device_peak_bytes": middle("device_peak_bytes"),
    }
