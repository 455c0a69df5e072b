"""One load, measured: in a fresh process of a memory cgroup of its own, from a page cache counted to be cold or warm.

The parent prepares the page cache and starts the process (`run_checked`); the child times what it is to load
(`measured`). What a load is, and what its figures are compared with, is the business of the scripts that use this.

Peak memory is the cgroup's high-water mark over the load less what was in use just before, page cache that the load
fills included; where no cgroup can be made, the process's own resident high-water mark.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cgroups import MemoryGroup, new_memory_group

from umem.checkpoint.pagecache import cached_bytes_of_files, evict

CACHES = ("cold", "warm")
COLD_AT_MOST, WARM_AT_LEAST = 0.01, 0.99
_TRIES = 3
_READ_BYTES = 8 << 20
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
Facts = dict[str, Any]


# --- in the parent ---------------------------------------------------------------------------------------------------


class RunFailedError(Exception):
    """A child did not give its figures; the message says why."""


class CheckedRun(NamedTuple):
    """A run whose page cache was as wanted at its start, and the cached fractions of runs that were not.

    `facts` is None if no try began as wanted.
    """

    facts: Facts | None
    rejected: list[float]


def shards_of(checkpoint: Path) -> list[Path]:
    """The safetensors files of a checkpoint, in the order of their names."""
    return sorted(checkpoint.glob("*.safetensors"))


def turned(items: Sequence[_Item], number: int) -> list[_Item]:
    """The items, begun with another one every other time and backwards in between.

    What ran just before decides which memory is warm, so no item should always come after the same one.
    """
    first = number // 2 % len(items) if items else 0
    order = [*items[first:], *items[:first]]
    return order[::-1] if number % 2 else order


def run_checked(
    script: str,
    request: Mapping[str, Any],
    *,
    files: Sequence[Path],
    cache: str,
    environment: Mapping[str, str] | None = None,
    limit_bytes: int | None = None,
    timeout_s: float | None = None,
) -> CheckedRun:
    """`run_fresh` with `files` evicted from the page cache or read into it; done anew if the child finds otherwise.

    Where the system cannot count cached pages (before Linux 6.5), a run is taken as it is.
    """
    rejected: list[float] = []
    while len(rejected) < _TRIES:
        prepare_cache(files, cache)
        whole = {**request, "files": [str(path) for path in files]}
        facts = run_fresh(script, whole, environment=environment, limit_bytes=limit_bytes, timeout_s=timeout_s)
        fraction = facts["cached_fraction"]
        if fraction is None or (fraction < COLD_AT_MOST if cache == "cold" else fraction > WARM_AT_LEAST):
            return CheckedRun(facts, rejected)
        rejected.append(fraction)
    return CheckedRun(None, rejected)


def run_fresh(
    script: str,
    request: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    limit_bytes: int | None = None,
    timeout_s: float | None = None,
) -> Facts:
    """What `script --child REQUEST` prints as its last line, run in a fresh process of a fresh memory cgroup.

    Raises
    ------
    RunFailedError
        It was killed, failed or took longer than `timeout_s`; or a limit is asked for and no cgroup can be made.
    """
    with new_memory_group(f"umem-measure-{os.getpid()}") as group:
        if limit_bytes is not None:
            if group is None:
                raise RunFailedError("no memory cgroup can be made to limit it; that needs root")
            group.limit(limit_bytes)
        place = None if group is None else [str(group.path), group.version]
        whole = json.dumps({**request, "group": place, "started_s": time.monotonic()})
        with _started([sys.executable, script, "--child", whole], group, environment or {}) as process:
            try:
                output, complaints = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise RunFailedError(f"not done after {timeout_s:.0f} s") from None
    if process.returncode == -signal.SIGKILL:
        raise RunFailedError("killed, as the kernel does when memory is out")
    if process.returncode != 0:
        said = complaints.strip().splitlines() or [f"exit status {process.returncode}"]
        raise RunFailedError(said[-1])
    facts: Facts = json.loads(output.splitlines()[-1])
    return facts


@contextlib.contextmanager
def _started(
    command: Sequence[str], group: MemoryGroup | None, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process of the group that ends with the block. Interrupts wait until there is something to end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

    def enter() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if group is not None:
            group.join()

    try:
        process = subprocess.Popen(
            command,
            preexec_fn=enter,  # noqa: PLW1509 - this process has one thread
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is this process's to handle
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(environment),
        )
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def prepare_cache(files: Iterable[Path], cache: str) -> None:
    """Evict the files from the page cache, or read them into it.

    Pages that stay in spite of the eviction go with all others if this is root.
    """
    files = list(files)
    for path in files:
        with path.open("rb", buffering=0) as file:
            if cache == "cold":
                os.fsync(file.fileno())
                evict(file.fileno())
            else:
                while file.read(_READ_BYTES):
                    pass
    if cache == "cold" and (cached_fraction(files) or 0) >= COLD_AT_MOST:
        os.sync()
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("1")


def machine(packages: Sequence[str]) -> Facts:
    """What the figures were measured on, the versions of `packages` that are there, and umem's settings if any."""
    memory = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.stdout.strip(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "architecture": platform.machine(),
        "python": platform.python_version(),
        **{name: found for name in packages if (found := installed_version(name)) is not None},
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith("UMEM_")},
    }


def installed_version(package: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# --- in the child ----------------------------------------------------------------------------------------------------


def request_of_child() -> Facts | None:
    """What the parent asks of this process; None if it is no child."""
    if sys.argv[1:2] != ["--child"]:
        return None
    request: Facts = json.loads(sys.argv[2])
    return request


def measured(load: Callable[[], _Result], request: Mapping[str, Any]) -> tuple[_Result, Facts]:
    """The result of `load` and what it took, in bytes and seconds; `request` is what the parent sent."""
    files = [Path(path) for path in request["files"]]
    gc.collect()
    peak = PeakMemory(MemoryGroup(Path(request["group"][0]), request["group"][1]) if request["group"] else None)
    fraction, cached_before = cached_fraction(files), cached_bytes_of_files(map(str, files))
    usage_before, busy_before_s = resource.getrusage(resource.RUSAGE_SELF), machine_busy_s()
    started_s = time.monotonic()
    result = load()
    loaded_s = time.monotonic()
    busy_s, usage = machine_busy_s() - busy_before_s, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    return result, {
        "load_s": loaded_s - started_s,
        "loaded_s": loaded_s,
        "cpu_s": cpu_s,
        "others_cpu_s": max(0.0, busy_s - cpu_s),
        "minor_faults": usage.ru_minflt - usage_before.ru_minflt,
        "major_faults": usage.ru_majflt - usage_before.ru_majflt,
        "peak_bytes": peak.beyond_base_bytes(),
        "base_bytes": peak.base_bytes,
        "peak_source": peak.source,
        "cached_fraction": fraction,
        "cached_before_bytes": cached_before,
        "cached_after_bytes": cached_bytes_of_files(map(str, files)),
    }


class PeakMemory:
    """The most memory taken since it was made: by the cgroup's mark, else by the process's own."""

    def __init__(self, group: MemoryGroup | None) -> None:
        self._read_peak: Callable[[], int] = lambda: status_bytes("VmHWM")
        self.source = "resident memory of the process"
        if group is not None:
            with contextlib.suppress(OSError):
                self._read_peak, self.source = group.restarted_peak(), "cgroup, page cache included"
                self.base_bytes = group.used_bytes
                return
        Path("/proc/self/clear_refs").write_text("5")
        self.base_bytes = status_bytes("VmRSS")

    def beyond_base_bytes(self) -> int:
        """The peak less what was in use at the start."""
        return self._read_peak() - self.base_bytes


def status_bytes(name: str) -> int:
    """A size from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def machine_busy_s() -> float:
    """Processor seconds that the machine has spent on anything since boot, its host's on other machines included."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def cached_fraction(files: Sequence[Path]) -> float | None:
    """How much of the files is in the page cache; None if the system cannot say."""
    cached = cached_bytes_of_files(map(str, files))
    page = os.sysconf("SC_PAGESIZE")
    whole = sum(-(-path.stat().st_size // page) * page for path in files)
    return None if cached is None or whole == 0 else cached / whole
