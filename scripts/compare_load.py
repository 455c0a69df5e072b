"""Loads checkpoints by umem, by transformers and by a plain read, each in fresh processes, in turn.

For each loader: seconds to loaded, seconds from process start to the first forward pass, peak memory, page cache left,
and a digest of every parameter and buffer, which must agree. Cold runs evict the files first; warm runs read them
first; what was cached at the start is in the result. Peak memory is a fresh memory cgroup's high-water mark over the
load, page cache included, where cgroups can be made; otherwise the process's own resident high-water mark. Medians of
interleaved runs, as ratios too.

The plain reads are no loaders: they put the same bytes into freshly allocated memory by two threads, through the page
cache and past it, and show what the machine gives in the same minute.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import platform
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

LOADERS = ("umem", "transformers", "raw buffered", "raw direct")
BLOCK = 8 << 20
_Item = TypeVar("_Item")
CGROUPS = Path("/sys/fs/cgroup")


# --- in the child ----------------------------------------------------------------------------------------------------


def child(loader: str, checkpoint: Path, started_s: float, group: str) -> dict[str, Any]:
    """One load in this process; what it took, in bytes and seconds."""
    prepare: Callable[[], Callable[[], Any]] = {
        "umem": lambda: prepared_umem(checkpoint),
        "transformers": lambda: prepared_transformers(checkpoint),
        "raw buffered": lambda: prepared_raw(checkpoint, direct=False),
        "raw direct": lambda: prepared_raw(checkpoint, direct=True),
    }[loader]
    load = prepare()
    memory = PeakMemory(group)
    cached_before = cached(checkpoint)
    before_s = time.monotonic()
    result = load()
    loaded_s = time.monotonic()
    facts: dict[str, Any] = {
        "load_s": loaded_s - before_s,
        "cached_before_bytes": cached_before,
        "peak_bytes": memory.peak_bytes(),
        "peak_source": memory.source,
        "cache_left_bytes": (cached(checkpoint) or 0) - (cached_before or 0),
    }
    if not loader.startswith("raw"):
        facts |= after_load(result, started_s)
    return facts


def after_load(result: Any, started_s: float) -> dict[str, Any]:
    """First and second forward pass, the digest, and umem's own report."""
    import torch

    model, report = result if isinstance(result, tuple) else (result, None)
    tokens = torch.arange(1, 17)[None]
    with torch.no_grad():
        model(tokens)
        first_s = time.monotonic()
        logits = model(tokens).logits
        second_s = time.monotonic()
    facts = {
        "first_forward_s": first_s - started_s,
        "second_forward_s": second_s - first_s,
        "digest": digest(model, logits),
    }
    if report is not None:
        facts["report"] = report.to_json()
        facts["report_text"] = rendered(report)
    return facts


def rendered(report: Any) -> str:
    """The report as a terminal of 80 columns shows it."""
    from rich.console import Console

    from umem.report.table import report_table

    console = Console(width=80)
    with console.capture() as capture:
        console.print(report_table(report))
    return capture.get()


def digest(model: Any, logits: Any) -> str:
    """A hash of names, dtypes, shapes and bytes of everything in the model, and of its logits."""
    import torch

    state = hashlib.blake2b(digest_size=16)
    for name, tensor in [*model.state_dict().items(), *model.named_buffers(), ("logits", logits)]:
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))
    return state.hexdigest()


def prepared_umem(checkpoint: Path) -> Callable[[], Any]:
    """Import what a load needs; the load itself comes later."""
    import torch  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    import umem
    import umem.adapters.hosts.transformers
    import umem.strategies

    return lambda: umem.load(checkpoint, return_report=True)


def prepared_transformers(checkpoint: Path) -> Callable[[], Any]:
    """Import what a load needs; the load itself comes later."""
    import transformers
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return lambda: transformers.AutoModelForCausalLM.from_pretrained(checkpoint)


def prepared_raw(checkpoint: Path, *, direct: bool) -> Callable[[], Any]:
    """Two threads that read every shard into fresh anonymous memory, in file order."""
    import torch  # noqa: F401 - the same process as the loaders, so the same state of the machine
    import transformers.models.qwen3.modeling_qwen3
    import transformers.models.qwen3_moe.modeling_qwen3_moe  # noqa: F401

    def load() -> list[mmap.mmap]:
        whole, pieces = [], []
        for path in sorted(checkpoint.glob("*.safetensors")):
            size = path.stat().st_size
            pages = mmap.mmap(
                -1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            whole.append(pages)
            pieces += [(path, pages, offset) for offset in range(0, size, BLOCK)]
        waiting, lock = iter(pieces), threading.Lock()
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)

        def work() -> None:
            with contextlib.ExitStack() as stack:
                opened: dict[Path, int] = {}
                while True:
                    with lock:
                        piece = next(waiting, None)
                    if piece is None:
                        return
                    path, pages, offset = piece
                    if path not in opened:
                        opened[path] = os.open(path, flags)
                        stack.callback(os.close, opened[path])
                    os.preadv(opened[path], [memoryview(pages)[offset : offset + BLOCK]], offset)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return whole

    return load


class PeakMemory:
    """The most memory taken since it was made: by the cgroup's mark, else by the process's own."""

    def __init__(self, group: str) -> None:
        self._group = Path(group) if group else None
        self.source = "cgroup, page cache included" if group else "resident memory of the process"
        if self._group is not None:
            (self._group / "memory.max_usage_in_bytes").write_text("0")
            self._base = int((self._group / "memory.usage_in_bytes").read_text())
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self._base = status_bytes("VmRSS")

    def peak_bytes(self) -> int:
        """Bytes beyond what was in use at the start."""
        if self._group is not None:
            return int((self._group / "memory.max_usage_in_bytes").read_text()) - self._base
        return status_bytes("VmHWM") - self._base


def status_bytes(name: str) -> int:
    """A size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def cached(checkpoint: Path) -> int | None:
    """Bytes of the shards in the page cache."""
    from umem.checkpoint.pagecache import cached_bytes_of_files

    return cached_bytes_of_files(str(path) for path in checkpoint.glob("*.safetensors"))


# --- in the parent ---------------------------------------------------------------------------------------------------


def run(loader: str, checkpoint: Path, *, cold: bool) -> dict[str, Any]:
    """One load in a fresh process, from a cold or warm cache."""
    prepare_cache(checkpoint, cold=cold)
    with memory_group() as group:
        command = [sys.executable, __file__, str(checkpoint), "--child", loader, str(time.monotonic()), group]
        procs = Path(group) / "cgroup.procs"
        done = subprocess.run(
            command,
            preexec_fn=(lambda: procs.write_text(str(os.getpid())) and None) if group else None,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def prepare_cache(checkpoint: Path, *, cold: bool) -> None:
    """Evict the shards from the page cache, or read them into it."""
    for path in checkpoint.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            if cold:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(BLOCK):
                    pass


@contextlib.contextmanager
def memory_group() -> Iterator[str]:
    """A fresh memory cgroup (v1), or nothing where none can be made."""
    path = CGROUPS / "memory" / f"umem-compare-{uuid.uuid4().hex[:8]}"
    try:
        path.mkdir()
    except OSError:
        yield ""
        return
    try:
        yield str(path)
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                path.rmdir()
                break
            time.sleep(0.05)


def measure(checkpoints: Sequence[Path], loaders: Sequence[str], caches: Sequence[str], repeats: int) -> dict[str, Any]:
    """All runs, interleaved."""
    keys = [(checkpoint.name, cache, loader) for checkpoint in checkpoints for cache in caches for loader in loaders]
    runs: dict[tuple[str, str, str], list[dict[str, Any]]] = {key: [] for key in keys}
    for number in range(repeats):
        for cache in caches:
            for loader in turned(loaders, number):
                for checkpoint in turned(checkpoints, number):
                    facts = run(loader, checkpoint, cold=cache == "cold")
                    runs[checkpoint.name, cache, loader].append(facts)
                    note = f"{checkpoint.name} {cache} {loader}: {facts['load_s']:.2f} s"
                    print(f"{note}, peak {facts['peak_bytes'] / 2**20:.0f} MiB", file=sys.stderr, flush=True)
    sizes = {path.name: sum(shard.stat().st_size for shard in path.glob("*.safetensors")) for path in checkpoints}
    listed = [
        {"checkpoint": name, "cache": cache, "loader": loader, "runs": runs[name, cache, loader]}
        for name, cache, loader in keys
    ]
    return {"machine": machine(), "bytes": sizes, "repeats": repeats, "series": listed}


def turned(items: Sequence[_Item], number: int) -> list[_Item]:
    """The items, begun with another one each time: what ran just before decides which memory is warm."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    memory = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **versions("torch", "transformers", "safetensors"),
    }


def versions(*names: str) -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a checkpoint, cache and loader: medians, spread, ratios to transformers and to the faster plain read."""
    times: dict[tuple[str, str, str], float] = {}
    for series in result["series"]:
        key = series["checkpoint"], series["cache"], series["loader"]
        times[key] = median(facts["load_s"] for facts in series["runs"])
    return [row(series, times, result["bytes"][series["checkpoint"]]) for series in result["series"]]


def row(series: dict[str, Any], times: dict[tuple[str, str, str], float], size: int) -> dict[str, Any]:
    """The row of one series."""
    runs, place = series["runs"], (series["checkpoint"], series["cache"])
    load_s = times[(*place, series["loader"])]
    raw = min(
        (times[(*place, name)] for name in LOADERS if name.startswith("raw") and (*place, name) in times), default=None
    )
    transformers_s = times.get((*place, "transformers"))
    forwards = [facts["first_forward_s"] for facts in runs if "first_forward_s" in facts]
    return {
        "checkpoint": series["checkpoint"],
        "cache": series["cache"],
        "loader": series["loader"],
        "load_s": load_s,
        "fastest_s": min(facts["load_s"] for facts in runs),
        "slowest_s": max(facts["load_s"] for facts in runs),
        "s_per_gib": load_s / (size / 2**30),
        "to_transformers": load_s / transformers_s if transformers_s else None,
        "to_raw": load_s / raw if raw else None,
        "first_forward_s": median(forwards) if forwards else None,
        "peak_bytes": median(facts["peak_bytes"] for facts in runs),
        "peak_to_size": median(facts["peak_bytes"] for facts in runs) / size,
        "cache_left_bytes": median(facts["cache_left_bytes"] for facts in runs),
    }


def loaders_of(result: dict[str, Any]) -> set[str]:
    """The loaders that ran."""
    return {series["loader"] for series in result["series"]}


def equal(result: dict[str, Any]) -> bool:
    """Whether all models of a checkpoint have the same bits and give the same logits."""
    digests: dict[str, set[str]] = {}
    for series in result["series"]:
        found = {facts["digest"] for facts in series["runs"] if "digest" in facts}
        digests.setdefault(series["checkpoint"], set()).update(found)
    return all(len(found) <= 1 for found in digests.values())


HEADER = (
    "checkpoint",
    "cache",
    "loader",
    "loaded s",
    "(range)",
    "s/GiB",
    "ratio",
    "to raw",
    "1st forward s",
    "peak MiB",
    "peak/size",
    "cache left MiB",
)


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text."""

    def number(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        row["checkpoint"],
        row["cache"],
        row["loader"],
        number(row["load_s"], ".2f"),
        f"{row['fastest_s']:.2f}-{row['slowest_s']:.2f}",
        number(row["s_per_gib"], ".2f"),
        number(row["to_transformers"], ".2f"),
        number(row["to_raw"], ".2f"),
        number(row["first_forward_s"], ".2f"),
        f"{row['peak_bytes'] / 2**20:.0f}",
        number(row["peak_to_size"], ".2f"),
        f"{max(0, row['cache_left_bytes']) / 2**20:.0f}",
    ]


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    sizes = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in result["bytes"].items())
    lines = [
        "# Loads compared",
        "",
        f"{', '.join(f'{name} {value}' for name, value in result['machine'].items())}.",
        "",
    ]
    lines += [f"Checkpoints: {sizes}. Medians of {result['repeats']} interleaved runs."]
    lines += ["Ratio: to `from_pretrained`; to raw: to the faster of the two plain reads."]
    lines += [f"All models of a checkpoint bit-equal, logits equal: {'yes' if equal(result) else 'NO'}.", ""]
    lines += ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cells(line)) + " |" for line in rows(result)]
    return "\n".join(lines) + "\n"


def show(result: dict[str, Any]) -> None:
    """Print umem's report and the comparison."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    texts = [facts["report_text"] for series in result["series"] for facts in series["runs"] if "report_text" in facts]
    if texts:
        console.print("umem's report of its last load", style="bold")
        print(texts[-1])
    hidden = {"(range)", "s/GiB", "peak/size"} | (set() if "raw direct" in loaders_of(result) else {"to raw"})
    hidden |= {"checkpoint"} if len(result["bytes"]) == 1 else set()
    shown = [name for name in HEADER if name not in hidden]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in shown:
        is_text = name in ("checkpoint", "cache", "loader")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=is_text)
    for line in rows(result):
        table.add_row(*(text for name, text in zip(HEADER, cells(line), strict=True) if name in shown))
    console.print(table)
    console.print(f"bit-equal, logits equal: {'yes' if equal(result) else 'NO'}", style="bold")


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--caches", nargs="+", choices=("cold", "warm"), default=["cold", "warm"])
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=list(LOADERS))
    parser.add_argument("--save", type=Path, help="write PATH.json and PATH.md")
    parser.add_argument("--child", nargs=3, metavar=("LOADER", "STARTED", "GROUP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        loader, started, group = options.child
        print(json.dumps(child(loader, options.checkpoints[0], float(started), group)))
        return
    result = measure(options.checkpoints, options.loaders, options.caches, options.repeats)
    show(result)
    if options.save is not None:
        for series in result["series"]:
            for facts in series["runs"]:
                facts.pop("report_text", None)
                facts.pop("report", None)
        options.save.with_suffix(".json").write_text(json.dumps(result | {"rows": rows(result)}, indent=1) + "\n")
        options.save.with_suffix(".md").write_text(markdown(result))
    if not equal(result):
        sys.exit(1)


if __name__ == "__main__":
    main()
