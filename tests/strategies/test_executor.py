"""Running a plan when things go wrong: nothing half-written, nothing kept, nothing hung."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.strategies.loads import MIB, execution, plan_writes, run_plan
from tests.writers import random_tensor, same_bytes, write_safetensors, write_sharded
from umem._types import DType
from umem.adapters.layout import stored
from umem.checkpoint import Checkpoint, open_checkpoint
from umem.checkpoint.entries import Shard
from umem.checkpoint.pagecache import CachePolicy, cached_bytes_of_files, cached_ranges, evict
from umem.checkpoint.readers import READERS, Pace, ReadHandle
from umem.errors import ReadError, TruncatedFileError
from umem.planning import LoadPlan
from umem.strategies import Outcome, Progress, execute


def identity_plan(checkpoint: Checkpoint) -> LoadPlan:
    writes = [write for entry in checkpoint.entries.values() for write in stored(entry).writes(entry.name)]
    specs = {entry.name: (entry.dtype, entry.shape) for entry in checkpoint.entries.values()}
    return plan_writes(checkpoint, writes, specs)


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError


class Failing:
    """A reader whose reads fail from some byte on, or call something."""

    name = "failing"
    holds_copy = False
    pace = Pace(2, MIB)

    def __init__(self, from_byte: int, error: BaseException) -> None:
        self.from_byte, self.error = from_byte, error

    def open(self, shard: Shard, block_bytes: int) -> _FailingFile:
        return _FailingFile(shard, block_bytes, self)

    def alignment(self, shard: Shard) -> int:
        return 1

    def why_not(self, shard: Shard) -> None:
        return None


class _FailingFile:
    def __init__(self, shard: Shard, block_bytes: int, reader: Failing) -> None:
        self._inner = READERS["buffered"].open(shard, block_bytes)
        self._reader = reader

    def __enter__(self) -> ReadHandle:
        self._handle = self._inner.__enter__()
        return self

    def __exit__(self, *facts: object) -> None:
        self._inner.__exit__(None, None, None)

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        if offset >= self._reader.from_byte:
            raise self._reader.error
        self._handle.fill(offset, buffers)

    def close(self) -> None:
        self._handle.close()


@pytest.fixture
def shards(tmp_path: Path) -> Checkpoint:
    """16 MiB in two shards, tensors large and small."""
    tensors = {f"t{i}": random_tensor((512, 1024), torch.float32, i) for i in range(8)}
    small = {f"s{i}": random_tensor((i,), torch.int8, i) for i in range(50)}
    return open_checkpoint(write_sharded(tmp_path, [{**tensors, **small}, {"end": random_tensor((3,))}]))


def test_many_sizes_over_shards(shards: Checkpoint) -> None:
    outcome = run_plan(identity_plan(shards), threads=4)
    for entry in shards.entries.values():
        raw = Path(shards.shards[entry.shard].path).read_bytes()[entry.start : entry.start + entry.nbytes]
        loaded = outcome.tensors[entry.name]
        assert bytes(loaded.view(-1).view(torch.uint8).numpy() if loaded.numel() else b"") == raw
    assert outcome.window_peak_bytes <= 16 * MIB


def test_memory_of_a_tensor_is_given_back_when_it_dies(shards: Checkpoint) -> None:
    tensors = run_plan(identity_plan(shards)).tensors
    before = resident_bytes()
    for index in range(4):
        del tensors[f"t{index}"]
    gc.collect()
    assert before - resident_bytes() > 7.5 * MIB


@pytest.mark.parametrize("error", [ReadError("failed", path="x"), TruncatedFileError("short", path="x"), MemoryError()])
def test_a_failed_read_ends_the_load_and_frees_everything(shards: Checkpoint, error: Exception) -> None:
    plan = identity_plan(shards)
    gc.collect()
    before = resident_bytes()
    with pytest.raises(type(error)) as caught:
        run_plan(plan, reader=Failing(8 * MIB, error), threads=4)
    assert resident_bytes() - before < 4 * MIB  # while the traceback is still held
    assert caught.value is error
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("umem")]


def test_a_file_cut_short_after_it_was_planned(shards: Checkpoint) -> None:
    plan = identity_plan(shards)
    os.truncate(shards.shards[0].path, 9 * MIB)
    with pytest.raises(TruncatedFileError, match="shrank"):
        run_plan(plan)


def test_the_drive_fails(shards: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def fails_later(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if offset > 10 * MIB:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", fails_later)
    with pytest.raises(ReadError, match="Input/output error"):
        run_plan(identity_plan(shards))


def test_an_interrupt_ends_the_load_and_frees_everything(shards: Checkpoint) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    gc.collect()
    before = resident_bytes()
    with pytest.raises(KeyboardInterrupt):
        run_plan(identity_plan(shards), progress=interrupt)
    assert resident_bytes() - before < 4 * MIB
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("umem")]


def test_what_a_failed_load_in_place_touched_is_known(shards: Checkpoint) -> None:
    plan = identity_plan(shards)
    live = {
        target.name: torch.zeros(target.shape, dtype=getattr(torch, str(target.dtype.torch_name)))
        for target in plan.filled
    }
    outcome = Outcome()
    reader = Failing(8 * MIB, ReadError("failed", path="x"))
    with pytest.raises(ReadError):
        execute(plan, execution(reader=reader, threads=1), live=live, outcome=outcome)
    changed = {name for name, tensor in live.items() if tensor.view(torch.uint8).any()}
    assert changed
    assert changed <= outcome.touched < set(live)


def test_progress_comes_from_the_calling_thread_and_ends_whole(shards: Checkpoint) -> None:
    seen: list[tuple[Progress, threading.Thread]] = []
    plan = identity_plan(shards)
    run_plan(plan, progress=lambda progress: seen.append((progress, threading.current_thread())))
    assert {thread for _, thread in seen} == {threading.current_thread()}
    counts = [progress.read_bytes for progress, _ in seen]
    assert counts == sorted(counts)
    assert seen[-1][0].total_bytes == plan.forecast.read_bytes <= counts[-1]


def test_pages_of_cold_files_are_not_left_behind(shards: Checkpoint) -> None:
    paths = [shard.path for shard in shards.shards]
    if cached_bytes_of_files(paths) is None:
        pytest.skip("the kernel does not have cachestat")
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        evict(descriptor)
        os.close(descriptor)
    run_plan(identity_plan(shards))
    assert (cached_bytes_of_files(paths) or 0) < MIB
    run_plan(identity_plan(shards), cache_policy=CachePolicy.KEEP)
    assert (cached_bytes_of_files(paths) or 0) > 15 * MIB
    run_plan(identity_plan(shards), cache_policy=CachePolicy.DROP, reader=READERS["odirect"])
    assert (cached_bytes_of_files(paths) or 0) < MIB


def test_pages_of_cached_files_stay(shards: Checkpoint) -> None:
    paths = [shard.path for shard in shards.shards]
    if cached_bytes_of_files(paths) is None:
        pytest.skip("the kernel does not have cachestat")
    for path in paths:
        Path(path).read_bytes()
    before = cached_bytes_of_files(paths)
    run_plan(identity_plan(shards))
    assert cached_bytes_of_files(paths) == before


@pytest.mark.parametrize("reader", ["buffered", "dontcache", "mapped"])
def test_a_cache_that_held_a_part_holds_that_part_again(tmp_path: Path, reader: str) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"w": random_tensor((3, 1024, 1024), torch.float32)})
    if cached_ranges(str(path)) is None or READERS[reader].why_not(open_checkpoint(path).shards[0]):
        pytest.skip("the kernel or file system cannot show it")
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    evict(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
    os.preadv(descriptor, [bytearray(4 * MIB)], 4 * MIB)
    os.close(descriptor)
    before = cached_ranges(str(path))
    run_plan(identity_plan(open_checkpoint(path)), reader=READERS[reader])
    assert cached_ranges(str(path)) == before == [range(4 * MIB, 8 * MIB)]


def test_a_small_window_still_loads_everything(shards: Checkpoint) -> None:
    outcome = run_plan(identity_plan(shards), window_bytes=2 * MIB, threads=8)
    assert outcome.window_peak_bytes <= 2 * MIB
    assert len(outcome.tensors) == len(shards.entries)


def test_live_tensors_of_any_strides_are_filled_in_place(tmp_path: Path) -> None:
    weight, half = random_tensor((2, 3, 4, 4)), random_tensor((6, 5), torch.float16, 1)
    checkpoint = open_checkpoint(write_safetensors(tmp_path / "m.safetensors", {"w": weight, "h": half}))
    writes = [write for entry in checkpoint.entries.values() for write in stored(entry).writes(entry.name)]
    specs = {"w": (DType.F32, (2, 3, 4, 4)), "h": (DType.F32, (6, 5))}
    outer = torch.zeros(10, 12)
    live = {
        "w": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "h": outer[2:8, 1:11:2],
    }
    run_plan(plan_writes(checkpoint, writes, specs), live=live, block_bytes=100)
    assert live["w"].is_contiguous(memory_format=torch.channels_last)
    assert same_bytes(live["w"], weight)
    assert torch.equal(live["h"].nan_to_num(), half.float().nan_to_num())
    outer[2:8, 1:11:2] = 0
    assert not outer.any()


def test_loads_side_by_side(shards: Checkpoint) -> None:
    results: list[Outcome] = []
    threads = [threading.Thread(target=lambda: results.append(run_plan(identity_plan(shards)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    assert all(same_bytes(results[0].tensors[n], other.tensors[n]) for other in results for n in results[0].tensors)


def test_a_slow_drive_can_be_interrupted(shards: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def slow(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        time.sleep(0.2)
        return real(descriptor, buffers, offset, flags)

    calls = 0

    def interrupt_on_the_second_tick(progress: Progress) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", slow)
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run_plan(identity_plan(shards), progress=interrupt_on_the_second_tick)
    assert time.perf_counter() - started < 1.5  # 16 blocks by two threads would take 1.6 s
