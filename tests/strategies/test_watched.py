"""A load obeys its watch: one block at a time while memory is short, and an end with everything given back."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.loads import MIB, plan_writes, run_plan
from tests.strategies.test_executor import identity_plan, resident_bytes
from tests.writers import random_tensor, same_bytes, write_safetensors
from umem._types import DType
from umem.checkpoint import Checkpoint, open_checkpoint
from umem.checkpoint.entries import Shard
from umem.checkpoint.pagecache import cached_bytes_of_files
from umem.checkpoint.readers import READERS, Pace, ReadHandle
from umem.planning import Conversion, Target
from umem.probes import Level, LoadStoppedError
from umem.strategies.relief import Relief
from umem.strategies.storage import allocate, destination_of, discard


class Watch:
    """A watch whose level a test sets."""

    def __init__(self, level: Level = Level.NORMAL) -> None:
        self.level = level
        self.alarm: Future[None] = Future()

    def stop(self) -> None:
        self.level = Level.HARD
        self.alarm.set_result(None)


class Recording:
    """The buffered reader; it counts the reads in flight and calls something before each."""

    name = "recording"
    holds_copy = False
    pace = Pace(4, MIB)

    def __init__(self, before_read: Any = lambda number: None) -> None:
        self.before_read = before_read
        self.reads = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.lock = threading.Lock()

    def alignment(self, shard: Shard) -> int:
        return 1

    def why_not(self, shard: Shard) -> None:
        return None

    @contextlib.contextmanager
    def open(self, shard: Shard, block_bytes: int) -> Iterator[ReadHandle]:
        with READERS["buffered"].open(shard, block_bytes) as handle:
            yield _Recorded(self, handle)


class _Recorded:
    def __init__(self, reader: Recording, handle: ReadHandle) -> None:
        self._reader, self._handle = reader, handle

    def fill(self, offset: int, buffers: Sequence[memoryview]) -> None:
        reader = self._reader
        with reader.lock:
            reader.reads += 1
            reader.in_flight += 1
            reader.most_in_flight = max(reader.most_in_flight, reader.in_flight)
            number = reader.reads
        reader.before_read(number)
        time.sleep(0.002)
        self._handle.fill(offset, buffers)
        with reader.lock:
            reader.in_flight -= 1

    def close(self) -> None:
        self._handle.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """32 tensors of 1 MiB."""
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    return open_checkpoint(write_safetensors(path, {f"t{i}": random_tensor((256, 1024), seed=i) for i in range(32)}))


def test_one_block_at_a_time_while_memory_is_short(checkpoint: Checkpoint) -> None:
    fast, slow = Recording(), Recording()
    expected = run_plan(identity_plan(checkpoint), reader=fast, threads=4, watch=Watch()).tensors
    tensors = run_plan(identity_plan(checkpoint), reader=slow, threads=4, watch=Watch(Level.SOFT)).tensors
    assert fast.most_in_flight > 1
    assert slow.most_in_flight == 1
    assert all(same_bytes(tensors[name], expected[name]) for name in expected)


def test_full_speed_again_when_memory_is_back(checkpoint: Checkpoint) -> None:
    watch = Watch(Level.SOFT)
    most: list[int] = []

    def before_read(number: int) -> None:
        if number == 8:
            most.append(reader.most_in_flight)
            watch.level = Level.NORMAL

    reader = Recording(before_read)
    run_plan(identity_plan(checkpoint), reader=reader, threads=4, watch=watch)
    assert most == [1]
    assert reader.most_in_flight > 1


def test_the_end_comes_within_a_block_and_gives_everything_back(checkpoint: Checkpoint) -> None:
    watch = Watch()
    reader = Recording(lambda number: watch.stop() if number == 16 else None)
    plan = identity_plan(checkpoint)
    gc.collect()
    before = resident_bytes()
    with pytest.raises(LoadStoppedError):
        run_plan(plan, reader=reader, threads=4, watch=watch)
    assert resident_bytes() - before < 4 * MIB  # while the traceback is still held
    assert reader.reads < 16 + 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("umem")]


def test_memory_is_given_back_while_a_read_still_hangs(checkpoint: Checkpoint) -> None:
    watch, hangs = Watch(), threading.Event()
    freed: list[bool] = []

    def before_read(number: int) -> None:
        if number == 30:
            before = resident_bytes()
            watch.stop()
            deadline_s = time.monotonic() + 10
            while not freed and time.monotonic() < deadline_s:
                time.sleep(0.01)
                freed.extend([True] if before - resident_bytes() > 20 * MIB else [])
            hangs.set()

    with pytest.raises(LoadStoppedError):
        run_plan(identity_plan(checkpoint), reader=Recording(before_read), threads=1, watch=watch)
    assert hangs.is_set()
    assert freed


def test_nothing_is_allocated_or_converted_when_it_is_over(checkpoint: Checkpoint) -> None:
    watch = Watch()
    watch.stop()
    reader = Recording()
    with pytest.raises(LoadStoppedError):
        run_plan(identity_plan(checkpoint), reader=reader, watch=watch)
    assert reader.reads == 0


def test_no_conversion_starts_after_the_end(tmp_path: Path) -> None:
    tensors = {name: random_tensor((4,)) for name in ("a", "b")}
    checkpoint = open_checkpoint(write_safetensors(tmp_path / "x.safetensors", tensors))
    conversions = [Conversion(name, (entry,), (name,), "owner's code") for name, entry in checkpoint.entries.items()]
    plan = plan_writes(checkpoint, [], dict.fromkeys("ab", (DType.F32, (4,))), conversions)
    watch, ran = Watch(), []

    def convert(name: str, given: Any) -> Any:
        ran.append(name)
        watch.stop()
        return given

    with pytest.raises(LoadStoppedError):
        run_plan(plan, watch=watch, convert=convert)
    assert len(ran) == 1


def test_discarded_pages_are_gone_and_can_be_written_to() -> None:
    target = Target("t", DType.U8, (32 * MIB,))
    tensor = allocate(target, huge_pages=None, residue=100)
    tensor.fill_(7)
    span = destination_of(target, tensor).span
    assert span is not None
    before = resident_bytes()
    discard(span.memory)
    assert before - resident_bytes() > 31 * MIB
    tensor[-1] = 3
    assert torch.count_nonzero(tensor) == 1


def test_relief_evicts_the_files_and_no_other(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path, other = checkpoint.shards[0].path, tmp_path / "other"
    other.write_bytes(bytes(4 * MIB))
    for file in (path, str(other)):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.read(descriptor, 64 * MIB)
        os.close(descriptor)
    if cached_bytes_of_files([path]) is None:
        pytest.skip("the kernel does not count cached pages")
    Relief([path, str(tmp_path / "absent")]).give()
    assert cached_bytes_of_files([path]) == 0
    assert cached_bytes_of_files([str(other)]) == 4 * MIB
