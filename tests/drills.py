"""Drills: a load in a memory cgroup, and something that takes the memory away from it at a random moment.

A drill runs in fresh processes: the loader, whose reads are slowed down so that the disaster has a load to meet, and
the adversary. Everything random comes from the seed. What must come out is in `failures_of`.
"""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing as mp
import os
import random
import shutil
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file

from tests.limits import MemoryGroup, memory_group
from tests.writers import Holder, random_tensor, write_safetensors
from umem.checkpoint.readers import Pace

__all__ = ["Disaster", "Drill", "Outcome", "drill_of", "drills", "failures_of", "prepare", "run_drill"]

MIB = 1 << 20

TENSORS, TENSOR_BYTES = 12, 8 * MIB
WINDOW_BYTES = 16 * MIB
FORECAST_BYTES = TENSORS * TENSOR_BYTES + WINDOW_BYTES
RESERVE_BYTES = 64 * MIB
HARD_FLOOR_BYTES = 32 * MIB
LATEST_S = 0.25
MOST_LEFT_BYTES = 16 * MIB
MOST_SWAPPED_BYTES = 64 * MIB

_FACTS = ("umem", "umem.api", "umem.session", "umem.strategies", "umem.adapters.install", "tests.drills")
_SPAWN = mp.get_context("forkserver")
_SPAWN.set_forkserver_preload(list(_FACTS))


class Disaster(StrEnum):
    """What happens to the memory."""

    TAKEN_SLOWLY = "taken slowly"
    TAKEN_IN_3_S = "taken in 3 s"
    TAKEN_IN_300_MS = "taken in 0.3 s"
    TAKEN_AT_ONCE = "taken at once"
    FLOOD = "page cache flooded"
    BUDGET = "budget too high"


_SECONDS = {
    Disaster.TAKEN_SLOWLY: 4.0,
    Disaster.TAKEN_IN_3_S: 3.0,
    Disaster.TAKEN_IN_300_MS: 0.3,
    Disaster.TAKEN_AT_ONCE: 0.0,
}


@dataclass(frozen=True, slots=True)
class Drill:
    """One drill: what happens, how much of it, when; and how fast the load is, bytes a second."""

    seed: int
    disaster: Disaster
    swap: bool
    taken_bytes: int
    delay_s: float
    spare_bytes: int
    load_bytes_per_s: float


def drill_of(seed: int, disaster: Disaster, swap: bool) -> Drill:
    """The drill of that seed."""
    chance = random.Random(f"{seed} {disaster}")
    slowest, fastest = (15, 30) if disaster is Disaster.TAKEN_SLOWLY else (25, 50)
    return Drill(
        seed=seed,
        disaster=disaster,
        swap=swap,
        taken_bytes=chance.randrange(48, 176) * MIB,
        delay_s=chance.uniform(0.0, 1.5),
        spare_bytes=chance.randrange(8, 48) * MIB,
        load_bytes_per_s=chance.uniform(slowest, fastest) * MIB,
    )


def drills(count: int) -> list[Drill]:
    """The first `count` drills: each disaster in turn, without swap and with it."""
    kinds = [(disaster, swap) for swap in (False, True) for disaster in Disaster]
    return [drill_of(seed, *kinds[seed % len(kinds)]) for seed in range(count)]


@dataclass(slots=True)
class Outcome:
    """What a drill came to.

    Attributes
    ----------
    ended
        `loaded`, the name of the error, or how the process died.
    latency_s, stop_s
        From the crossing of the hard floor to the error; None where none was crossed. From the decision to the last
        sample before the error.
    left_bytes
        Anonymous memory that the loader still had afterwards, against before.
    """

    ended: str
    cause: str = ""
    rule: str = ""
    pid_is_right: bool = True
    latency_s: float | None = None
    stop_s: float = 0.0
    least_headroom_bytes: int = 0
    left_bytes: int = 0
    exact: bool = False
    untouched: bool = False
    oom_kills: int = 0
    swapped_bytes: int = 0
    seconds: float = 0.0
    words: str = ""
    levels: list[str] = field(default_factory=list)


def failures_of(drill: Drill, outcome: Outcome) -> list[str]:
    """What a drill should not have come to; empty when all is well."""
    found = []
    if outcome.oom_kills:
        found.append("the kernel killed")
    if outcome.swapped_bytes > MOST_SWAPPED_BYTES:
        found.append(f"{outcome.swapped_bytes // MIB} MiB were swapped out")
    if outcome.ended == "loaded":
        return found + ([] if outcome.exact else ["the bits are wrong"])
    if outcome.ended != "MemoryOverrunError":
        return [*found, f"ended by {outcome.ended}: {outcome.words}"]
    if max(outcome.latency_s or 0.0, outcome.stop_s) > LATEST_S:
        found.append(f"stopped {outcome.stop_s:.3f} s after the decision, {outcome.latency_s} s after the crossing")
    if outcome.left_bytes > MOST_LEFT_BYTES:
        found.append(f"{outcome.left_bytes // MIB} MiB were not given back")
    if not outcome.untouched:
        found.append("the model was touched")
    expected = "own" if drill.disaster is Disaster.BUDGET else "other_process"
    if outcome.cause != expected or not outcome.pid_is_right:
        found.append(f"blamed {outcome.cause}: {outcome.words}")
    return found


def prepare(directory: Path) -> Path:
    """Write the checkpoint of the drills."""
    tensors = {f"layer.{i}.weight": random_tensor((2048, TENSOR_BYTES // 4096), torch.int16, i) for i in range(TENSORS)}
    return write_safetensors(directory / "model.safetensors", tensors)


def run_drill(drill: Drill, checkpoint: Path) -> Outcome:
    """Run it; skips the test where no memory cgroup can be made."""
    with memory_group() as group, contextlib.ExitStack() as stack:
        over = _SPAWN.Event()
        ours, theirs = _SPAWN.Pipe()
        loader = _SPAWN.Process(target=_load, args=(drill, group, str(checkpoint), theirs, over), daemon=True)
        stack.enter_context(_running(loader))
        theirs.close()
        ours.recv()  # it stands ready in its group
        limit = group.used_bytes + FORECAST_BYTES + RESERVE_BYTES + drill.spare_bytes
        if drill.disaster is Disaster.BUDGET:
            limit = group.used_bytes + FORECAST_BYTES + RESERVE_BYTES // 4
        group.limit(limit)
        if drill.swap:
            group.allow_swap(2 * limit, limit)
        adversary = _adversary(drill, group, checkpoint, over)
        if adversary is not None:
            stack.enter_context(_running(adversary))
        watch = stack.enter_context(_Watch(group, limit))
        started_s = time.monotonic()
        ours.send("go")
        return _outcome(drill, ours, loader, adversary, watch, started_s, group)


def _outcome(
    drill: Drill,
    ours: Connection,
    loader: Any,
    adversary: Any,
    watch: _Watch,
    started_s: float,
    group: MemoryGroup,
) -> Outcome:
    try:
        facts: dict[str, Any] = ours.recv() if ours.poll(60) else {"ended": "no answer"}
    except EOFError:
        loader.join(5)
        facts = {"ended": f"exit status {loader.exitcode}"}
    at_s, pid = facts.pop("at_s", None), facts.pop("pid", None)
    outcome = Outcome(**facts)
    outcome.seconds = time.monotonic() - started_s
    outcome.least_headroom_bytes = watch.least_bytes
    outcome.swapped_bytes = watch.most_swapped_bytes
    outcome.oom_kills = group.oom_kills
    if at_s is not None and watch.crossed_s is not None and drill.disaster is not Disaster.BUDGET:
        outcome.latency_s = at_s - watch.crossed_s
    if outcome.cause == "other_process":
        outcome.pid_is_right = adversary is not None and pid == adversary.pid
    return outcome


@contextlib.contextmanager
def _running(process: Any) -> Iterator[None]:
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _adversary(drill: Drill, group: MemoryGroup, checkpoint: Path, over: Any) -> Any:
    if drill.disaster is Disaster.BUDGET:
        return None
    if drill.disaster is Disaster.FLOOD:
        return _SPAWN.Process(target=_flood, args=(drill, group, str(checkpoint), over), daemon=True)
    return _SPAWN.Process(target=_take, args=(drill, group, over), daemon=True)


def _load(drill: Drill, group: MemoryGroup, checkpoint: str, pipe: Connection, over: Any) -> None:
    """Runs in the loader: load when told to, and tell what came of it."""
    import umem
    from umem.checkpoint.readers import READERS
    from umem.errors import MemoryOverrunError
    from umem.settings import Thresholds

    READERS["slow"] = _SlowReader(drill.load_bytes_per_s)
    expected = {name: _checksum(tensor) for name, tensor in load_file(checkpoint).items()}
    settings = umem.LoadSettings(window_bytes=WINDOW_BYTES, block_bytes=MIB, io_threads=2, reader="slow")
    if drill.disaster is Disaster.BUDGET:
        thresholds = Thresholds(floor_bytes=48 * MIB, soft_floor_bytes=56 * MIB)
        settings = settings.with_changes(reserve_bytes=0, thresholds=thresholds)
    group.join()
    pipe.send("ready")
    pipe.recv()
    module = Holder({name: torch.empty(2048, TENSOR_BYTES // 4096, dtype=torch.int16) for name in expected})
    before = _anonymous_bytes()
    facts: dict[str, Any]
    try:
        report = umem.load_into(module, checkpoint, device="cpu", settings=settings)
        over.set()
        exact = {name: _checksum(tensor) for name, tensor in module.state_dict().items()} == expected
        facts = {"ended": "loaded", "exact": exact, "levels": [verdict.words for verdict in report.verdicts]}
    except MemoryOverrunError as error:
        facts = {
            "at_s": time.monotonic(),
            "stop_s": error.series[-1]["time_s"] - error.verdicts[-1]["time_s"],
            "ended": type(error).__name__,
            "cause": error.cause,
            "rule": error.rule,
            "pid": error.process.pid if error.process else None,
            "left_bytes": _anonymous_bytes() - before,
            "untouched": all(parameter.is_meta for parameter in module.parameters()),
            "words": str(error),
        }
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the drill came to
        facts = {"ended": type(error).__name__, "words": str(error)}
    over.set()
    pipe.send(facts)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.view(torch.uint8).numpy().data)


class _SlowReader:
    """The buffered reader, at a given pace over all threads."""

    name = "slow"
    holds_copy = True
    pace = Pace(2, MIB)

    def __init__(self, bytes_per_s: float) -> None:
        from umem.checkpoint.readers import READERS

        self._buffered = READERS["buffered"]
        self._bytes_per_s = bytes_per_s
        self._due_s = 0.0
        self._lock = threading.Lock()

    def alignment(self, shard: Any) -> int:
        return self._buffered.alignment(shard)

    def why_not(self, shard: Any) -> str | None:
        return self._buffered.why_not(shard)

    @contextlib.contextmanager
    def open(self, shard: Any, block_bytes: int) -> Iterator[_SlowReader._Handle]:
        with self._buffered.open(shard, block_bytes) as handle:
            yield self._Handle(self, handle)

    class _Handle:
        def __init__(self, reader: _SlowReader, handle: Any) -> None:
            self._reader, self._handle = reader, handle

        def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
            self._reader.wait(sum(len(buffer) for buffer in buffers))
            self._handle.fill(offset, buffers)

        def close(self) -> None:
            self._handle.close()

    def wait(self, count: int) -> None:
        with self._lock:
            self._due_s = max(self._due_s, time.monotonic()) + count / self._bytes_per_s
            due_s = self._due_s
        time.sleep(max(0.0, due_s - time.monotonic()))


def _take(drill: Drill, group: MemoryGroup, over: Any) -> None:
    """Runs in the adversary: take memory at its pace, until the load is over."""
    group.join()
    time.sleep(drill.delay_s)
    pages = mmap.mmap(-1, drill.taken_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    started_s = time.monotonic()
    for done in range(0, drill.taken_bytes, MIB):
        if over.is_set():
            break
        pages[done : done + MIB] = b"x" * MIB
        due_s = started_s + _SECONDS[drill.disaster] * done / drill.taken_bytes
        time.sleep(max(0.0, due_s - time.monotonic()))
    over.wait()


def _flood(drill: Drill, group: MemoryGroup, checkpoint: str, over: Any) -> None:
    """Runs in the adversary: copy files until the load is over."""
    group.join()
    time.sleep(drill.delay_s)
    copy = f"{checkpoint}.copy"
    while not over.is_set():
        shutil.copyfile(checkpoint, copy)
        os.unlink(copy)


class _Watch:
    """Watches a group from outside it: the headroom and the swap."""

    def __init__(self, group: MemoryGroup, limit: int) -> None:
        self._group, self._limit = group, limit
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.crossed_s: float | None = None
        self.least_bytes = limit
        self.most_swapped_bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        names = (
            ("total_inactive_file", "total_active_file")
            if self._group.version == 1
            else ("inactive_file", "active_file")
        )
        while not self._stop.wait(0.01):
            now_s = time.monotonic()
            stat = dict(line.split() for line in (self._group.path / "memory.stat").read_text().splitlines())
            headroom = self._limit - self._group.used_bytes + sum(int(stat[name]) for name in names)
            self.least_bytes = min(self.least_bytes, headroom)
            self.most_swapped_bytes = max(self.most_swapped_bytes, self._group.swapped_bytes)
            if headroom < HARD_FLOOR_BYTES and self.crossed_s is None:
                self.crossed_s = now_s


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))
