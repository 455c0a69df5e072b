"""Checks umem on a GPU: the tests that need one, then loads of a sample checkpoint in fresh processes, in turn.

Two comparisons: tensors as they are stored (`umem.load_into` by each reader, against `safetensors.torch.load_file`),
and a transformers model (`umem.load`, against `from_pretrained`). Seconds are those of the load alone, until the device
has everything, in a process that has its imports and its device context behind it. Host peak is the process's own
resident high-water mark over the load; device peak is what torch's allocator reserved. Rounds are repeated as far as
time allows.

Exit status: 0 all is well, 1 a test failed, a load failed or bits differ, 3 there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree as ET

from umem.errors import RunFailedError
from umem.measurement.digest import digest
from umem.measurement.fresh import run_fresh, shuffled
from umem.measurement.meter import measured, request_of_child
from umem.measurement.page_cache import prepare_cache, shards_of
from umem.measurement.provenance import machine

NO_GPU = 3
DEVICE = "cuda:0"
PACKAGES = ("torch", "transformers", "safetensors", "cuda-python")
ROOT = Path(__file__).parents[1]
TESTS_LIMIT_S = 150
TOTAL_LIMIT_S = 450

Load = Callable[[], tuple[Mapping[str, Any], Any]]


# --- in the child ----------------------------------------------------------------------------------------------------


def child(request: Mapping[str, Any]) -> dict[str, Any]:
    """One load in this process; what it took, in bytes and seconds."""
    import torch

    load = prepared(request["loader"], Path(request["checkpoint"]))
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()

    def whole_load() -> tuple[Mapping[str, Any], Any]:
        loaded = load()
        torch.cuda.synchronize()
        return loaded

    (tensors, report), facts = measured(whole_load, request)
    facts["device_peak_bytes"] = torch.cuda.max_memory_reserved()
    facts["cache_left_bytes"] = (facts["cached_after_bytes"] or 0) - (facts["cached_before_bytes"] or 0)
    facts["digest"] = digest((name, tensor.cpu()) for name, tensor in tensors.items())
    if report is not None:
        facts |= {name: getattr(report, name) for name in ("reader", "copier", "copier_reason")}
        facts["report"] = {name: report.to_json()[name] for name in ("seconds", "thread_seconds", "peak")}
    return facts


def prepared(loader: str, checkpoint: Path) -> Load:
    """Import what a load needs; the load itself comes later."""
    kind, _, reader = loader.partition("/")
    makers: dict[str, Callable[[], Load]] = {
        "umem stored": lambda: umem_stored(checkpoint, reader),
        "safetensors stored": lambda: safetensors_stored(checkpoint),
        "umem model": lambda: umem_model(checkpoint, reader),
        "transformers model": lambda: transformers_model(checkpoint),
    }
    return makers[kind]()


def umem_stored(checkpoint: Path, reader: str) -> Load:
    """Tensors as they are stored, into a module that has a parameter for each."""
    import torch

    import umem
    import umem.strategies
    from umem.checkpoint import open_checkpoint

    module = torch.nn.Module()
    for entry in open_checkpoint(checkpoint).entries.values():
        dtype = getattr(torch, str(entry.dtype.torch_name))
        place = module
        *path, leaf = entry.name.split(".")
        for part in path:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        tensor = torch.empty(entry.shape, dtype=dtype, device="meta")
        place.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))

    def load() -> tuple[Mapping[str, Any], Any]:
        report = umem.load_into(module, checkpoint, device=DEVICE, settings=umem.LoadSettings(reader=reader))
        return module.state_dict(), report

    return load


def safetensors_stored(checkpoint: Path) -> Load:
    """Tensors as they are stored, shard by shard."""
    from safetensors.torch import load_file

    def load() -> tuple[Mapping[str, Any], Any]:
        tensors: dict[str, Any] = {}
        for path in shards_of(checkpoint):
            tensors |= load_file(path, device=DEVICE)
        return tensors, None

    return load


def umem_model(checkpoint: Path, reader: str) -> Load:
    """A transformers model by umem."""
    import transformers.models.qwen3_moe.modeling_qwen3_moe

    import umem
    import umem.adapters.hosts.transformers
    import umem.strategies

    del transformers

    def load() -> tuple[Mapping[str, Any], Any]:
        settings = umem.LoadSettings(reader=reader)
        model, report = umem.load(checkpoint, device=DEVICE, settings=settings, return_report=True)
        return model.state_dict(), report

    return load


def transformers_model(checkpoint: Path) -> Load:
    """A transformers model by its own loader."""
    import transformers
    import transformers.models.qwen3_moe.modeling_qwen3_moe

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def load() -> tuple[Mapping[str, Any], Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, device_map=DEVICE)
        return model.state_dict(), None

    return load


# --- in the parent ---------------------------------------------------------------------------------------------------


def gpu() -> dict[str, Any] | None:
    """The GPU, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "integrated": int(getattr(properties, "is_integrated", 0)),
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda or f"hip {torch.version.hip}",
    }


def run_tests() -> dict[str, Any]:
    """The tests that are marked `gpu`: counts, and the names of those that failed."""
    if importlib.util.find_spec("pytest") is None:
        return {"passed": 0, "failed": ["pytest is not installed"], "skipped": 0}
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={result}", "-p", "no:cacheprovider"]
        try:
            subprocess.run(command, cwd=ROOT, check=False, timeout=TESTS_LIMIT_S, stdout=sys.stderr)
            cases = list(ET.parse(result).iter("testcase"))  # noqa: S314 - written by the line above
        except (subprocess.TimeoutExpired, OSError, ET.ParseError) as error:
            return {"passed": 0, "failed": [f"the tests did not end: {error}"], "skipped": 0}
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    names = [f"{case.get('classname')}::{case.get('name')}" for case in failed]
    return {"passed": len(cases) - len(failed) - len(skipped), "failed": names, "skipped": len(skipped)}


def loaders(checkpoint: Path) -> list[str]:
    """What can be compared here."""
    from umem.checkpoint import open_checkpoint
    from umem.checkpoint.readers import READERS

    shards = open_checkpoint(checkpoint).shards
    readers = ["auto", *(name for name in READERS if not any(READERS[name].why_not(shard) for shard in shards))]
    found = [*(f"umem stored/{reader}" for reader in readers), "safetensors stored"]
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"):
        found += ["umem model/auto", "transformers model"]
    return found


def measure(checkpoint: Path, repeats: int, deadline_s: float) -> list[dict[str, Any]]:
    """All runs, interleaved; rounds end when time does."""
    names = loaders(checkpoint)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {(c, n): [] for c in ("cold", "warm") for n in names}
    for number in range(repeats):
        for cache, loader in ((cache, name) for cache in ("cold", "warm") for name in shuffled(names, number)):
            left_s = deadline_s - time.monotonic()
            if left_s < 30:
                break
            prepare_cache(shards_of(checkpoint), cache)
            facts = run(loader, checkpoint, left_s)
            runs[cache, loader].append(facts)
            said = facts.get("error") or f"{facts['load_s']:.2f} s"
            print(f"{cache} {loader}: {said}", file=sys.stderr, flush=True)
    return [{"cache": cache, "loader": loader, "runs": found} for (cache, loader), found in runs.items() if found]


def run(loader: str, checkpoint: Path, limit_s: float) -> dict[str, Any]:
    """One load in a fresh process."""
    request = {"loader": loader, "checkpoint": str(checkpoint), "files": [str(path) for path in shards_of(checkpoint)]}
    try:
        return run_fresh([__file__], request, timeout_s=limit_s)
    except RunFailedError as error:
        return {"error": str(error)}


HEADER = ("cache", "loader", "runs", "loaded s", "GiB/s", "ratio", "host MiB", "device MiB", "cache left MiB", "copier")


def rows(result: Mapping[str, Any]) -> list[list[str]]:
    """One row a series: medians, and the ratio to safetensors or transformers from the same cache."""
    times = {
        (s["cache"], s["loader"]): median(times)
        for s in result["series"]
        if (times := [facts["load_s"] for facts in s["runs"] if "load_s" in facts])
    }
    return [_row(series, times, result["bytes"]) for series in result["series"]]


def _row(series: Mapping[str, Any], times: Mapping[tuple[str, str], float], size: int) -> list[str]:
    cache, loader = series["cache"], series["loader"]
    good = [facts for facts in series["runs"] if "error" not in facts]
    if not good:
        return [cache, loader, str(len(series["runs"])), series["runs"][-1]["error"], *[""] * (len(HEADER) - 4)]
    load_s = times[cache, loader]
    other = times.get((cache, "safetensors stored" if " stored" in loader else "transformers model"))

    def mib(name: str) -> str:
        return f"{max(0, median(facts[name] for facts in good)) / 2**20:.0f}"

    return [
        cache,
        loader,
        str(len(good)),
        f"{load_s:.2f}",
        f"{size / 2**30 / load_s:.2f}",
        f"{load_s / other:.2f}" if other else "",
        mib("peak_bytes"),
        mib("device_peak_bytes"),
        mib("cache_left_bytes"),
        good[-1].get("copier", ""),
    ]


def copiers(result: Mapping[str, Any]) -> list[str]:
    """Each copier that was used, with its reason."""
    used = [facts for series in result["series"] for facts in series["runs"] if "copier" in facts]
    return list(dict.fromkeys(f"{facts['copier']}: {facts['copier_reason']}" for facts in used))


def faults(result: Mapping[str, Any]) -> list[str]:
    """What went wrong, for people; empty if all is well."""
    found = [f"test failed: {name}" for name in result["tests"]["failed"]]
    digests: dict[str, set[str]] = {}
    for series in result["series"]:
        found += [f"{series['loader']}: {facts['error']}" for facts in series["runs"] if "error" in facts]
        kind = "stored" if " stored" in series["loader"] else "model"
        digests.setdefault(kind, set()).update(facts["digest"] for facts in series["runs"] if "digest" in facts)
    found += [f"the loaders of {kind} tensors do not agree on their bits" for kind, d in digests.items() if len(d) > 1]
    return found


def markdown(result: Mapping[str, Any]) -> str:
    """The result as a page."""
    tests, wrong = result["tests"], faults(result)
    lines = ["# umem on a device", "", ", ".join(f"{name} {value}" for name, value in result["machine"].items()) + "."]
    lines += ["", f"Tests that need a GPU: {tests['passed']} passed, {len(tests['failed'])} failed"]
    lines[-1] += (
        f", {tests['skipped']} skipped. Checkpoint: {result['bytes'] / 2**20:.0f} MiB. Medians of fresh processes."
    )
    lines += ["Ratio: to safetensors for stored tensors, to transformers for models.", ""]
    lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(row) + " |" for row in rows(result)]
    lines += ["", *(f"Copier {copier}." for copier in copiers(result)), ""]
    lines += [f"* {fault}" for fault in wrong] if wrong else ["All bits agree."]
    return "\n".join(lines) + "\n"


def show(result: Mapping[str, Any]) -> None:
    """Print the table and what went wrong."""
    from rich.console import Console
    from rich.table import Table

    tests = result["tests"]
    title = f"{result['machine']['gpu']}: {tests['passed']} tests passed, {len(tests['failed'])} failed"
    table = Table(*HEADER, title=title)
    for row in rows(result):
        table.add_row(*row)
    console = Console()
    console.print(table)
    for copier in copiers(result):
        console.print(f"copier {copier}", markup=False)
    for fault in faults(result):
        console.print(fault, style="red", markup=False)


def save(result: Mapping[str, Any], directory: Path) -> None:
    """Write JSON and Markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "_", str(result["machine"]["gpu"]).lower()).strip("_")
    path = directory / f"device_{name}_{str(result['machine']['date'])[:7].replace('-', '')}"
    path.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(result))
    print(f"written: {path}.json and .md", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="another one than the sample")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of loads, as far as time allows")
    request = request_of_child()
    if request is not None:
        print(json.dumps(child(request)))
        return 0
    options = parser.parse_args(arguments)
    deadline_s = time.monotonic() + TOTAL_LIMIT_S
    found = gpu()
    if found is None:
        print("There is no GPU here: torch sees none. Nothing was checked.", file=sys.stderr)
        return NO_GPU
    tests = run_tests()
    checkpoint = options.checkpoint
    if checkpoint is None:
        from sample_checkpoint import write_sample

        checkpoint = ROOT / ".sample" / "qwen3-moe"
        write_sample(checkpoint)
    result = {
        "machine": machine(PACKAGES) | found,
        "tests": tests,
        "bytes": sum(path.stat().st_size for path in shards_of(checkpoint)),
        "series": measure(checkpoint, options.repeats, deadline_s),
    }
    show(result)
    save(result, Path(os.environ.get("OUT") or ROOT / "scripts" / "results"))
    return 1 if faults(result) else 0


if __name__ == "__main__":
    sys.exit(main())
