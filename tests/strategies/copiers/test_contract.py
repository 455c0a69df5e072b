"""The contract of copiers: whatever brings the blocks, and however late its copies land, the model gets its bits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.strategies.copiers.late_device import LANDINGS, LateDevice, LateStream
from tests.strategies.copiers.models import KIND, FakeMachine, Model, make_model
from tests.strategies.loads import MIB, run_plan
from tests.strategies.test_executor import Failing
from umem.checkpoint.readers import READERS
from umem.errors import ReadError
from umem.strategies import Progress
from umem.strategies.copiers import ring

WINDOW = 4 * MIB
BLOCK = 256 * 1024
NAMES = [*LANDINGS, "refusing", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=NAMES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A kind of device that a ring, or plain copies, fill."""
    if request.param == "cuda":
        yield "cuda"
        return
    late = LateDevice("latest" if request.param == "refusing" else request.param)
    late.refuses_from = 0 if request.param == "refusing" else None
    with FakeMachine(late, monkeypatch):
        yield KIND
    assert not late.faults
    assert request.param == "refusing" or late.registrations > 1


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files of whole models are."""
    return tmp_path_factory.mktemp("model")


@pytest.fixture
def model(files: Path, device: str) -> Model:
    return make_model(files, f"{device}:0", f"{device}:0")


@pytest.mark.parametrize("reader", ["buffered", "odirect"])
@pytest.mark.parametrize("block_bytes", [4096, 50_000, BLOCK])
def test_every_kind_of_write_gives_its_bits(model: Model, reader: str, block_bytes: int) -> None:
    if READERS[reader].why_not(model.checkpoint.shards[0]):
        pytest.skip("the file system has no O_DIRECT")
    outcome = run_plan(model.plan, reader=READERS[reader], window_bytes=WINDOW, block_bytes=block_bytes, threads=3)
    assert not model.differing(outcome.tensors)
    assert outcome.window_peak_bytes <= WINDOW


def test_a_window_of_two_blocks(model: Model) -> None:
    outcome = run_plan(model.plan, window_bytes=2 * BLOCK, block_bytes=BLOCK, threads=4)
    assert not model.differing(outcome.tensors)
    assert outcome.window_peak_bytes <= 2 * BLOCK


def test_a_failed_read_is_the_error_that_is_raised(model: Model) -> None:
    error = ReadError("failed", path="x")
    with pytest.raises(ReadError) as caught:
        run_plan(model.plan, reader=Failing(MIB, error), window_bytes=WINDOW, block_bytes=BLOCK, threads=3)
    assert caught.value is error
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("umem")]


def test_an_interrupt(model: Model) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.read_bytes > MIB:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_plan(model.plan, window_bytes=WINDOW, block_bytes=BLOCK, progress=interrupt)


# --- what only a ring over a late device shows --------------------------------------------------------------------


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateDevice]:
    late = LateDevice("latest")
    with FakeMachine(late, monkeypatch):
        yield late


@pytest.fixture
def late_model(files: Path, late: LateDevice) -> Model:
    return make_model(files, f"{KIND}:0", f"{KIND}:1")


def run_late(model: Model, threads: int = 2) -> list[str]:
    outcome = run_plan(model.plan, window_bytes=WINDOW, block_bytes=BLOCK, threads=threads)
    return model.differing(outcome.tensors)


@pytest.mark.parametrize("seed", range(5))
def test_two_devices_and_the_processor_share_blocks(files: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    late = LateDevice("seeded", seed)
    with FakeMachine(late, monkeypatch):
        assert not run_late(make_model(files, f"{KIND}:0", f"{KIND}:1"), threads=4)
    assert len({id(stream) for stream in late.streams if stream.issued}) >= 2
    assert not late.faults


def test_slots_that_are_not_guarded_are_noticed(late_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring._Slot, "wait", lambda slot: None)
    assert run_late(late_model)


def test_slots_that_share_memory_are_noticed(
    late_model: Model, late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = late.pages(MIB)
    monkeypatch.setattr(late, "pages", lambda count: shared)
    assert run_late(late_model)


def test_delivery_outside_of_the_stream_is_noticed(late_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(lane: ring._Lane, step: ring._Staged) -> None:
        with pytest.MonkeyPatch.context() as unordered:
            unordered.setattr(lane._stream, "issue", lambda work: work())
            scatter(lane, step)

    scatter = ring._Lane._scatter
    monkeypatch.setattr(ring._Lane, "_scatter", at_once)
    assert run_late(late_model)


def test_a_stream_that_has_not_run_dry_is_noticed(
    late_model: Model, late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring._Lane, "__exit__", lambda lane, *error: None)
    assert run_late(late_model)
    assert late.faults


@pytest.mark.parametrize("refused", [0, 1, 3])
def test_a_device_that_refuses_is_filled_by_plain_copies(late_model: Model, late: LateDevice, refused: int) -> None:
    late.refuses_from = refused
    outcome = run_plan(late_model.plan, window_bytes=WINDOW, block_bytes=BLOCK, threads=2)
    assert not late_model.differing(outcome.tensors)
    assert (outcome.copier, outcome.copier_reason) == ("plain", "late devices refuse: operation not supported")
    assert late.live_bytes == 0


def test_what_a_ring_holds_is_drawn_from_the_window(late_model: Model, late: LateDevice) -> None:
    outcome = run_plan(late_model.plan, window_bytes=WINDOW, block_bytes=BLOCK, threads=2)
    assert outcome.copier == "ring"
    assert "fake:0, fake:1" in outcome.copier_reason
    assert late.peak_bytes <= outcome.window_peak_bytes <= WINDOW


def test_the_first_error_wins_over_those_of_closing(
    late_model: Model, late: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(stream: LateStream) -> None:
        stream.land_until(stream.issued)
        if stream.copies > 1:
            raise RuntimeError("the device is lost")

    monkeypatch.setattr(LateStream, "synchronize", lost)
    error = ReadError("failed", path="x")
    with pytest.raises(ReadError) as caught:
        run_plan(late_model.plan, reader=Failing(MIB, error), window_bytes=WINDOW, block_bytes=BLOCK, threads=1)
    assert caught.value is error
    with pytest.raises(RuntimeError, match="the device is lost"):
        run_late(late_model)
    assert not late.faults
    assert late.live_bytes == 0


def test_neighbours_go_over_in_one_copy(tmp_path: Path, late: LateDevice) -> None:
    model = make_model(tmp_path, f"{KIND}:0", f"{KIND}:0", only="small")
    outcome = run_plan(model.plan, window_bytes=WINDOW, block_bytes=MIB)
    assert not model.differing(outcome.tensors)
    assert len(outcome.tensors) > 50
    assert [stream.copies for stream in late.streams] == [len(model.checkpoint.shards)]


def test_a_kind_without_a_ring_is_said(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateDevice("latest")
    with FakeMachine(late, monkeypatch, registered=False):
        model = make_model(files, f"{KIND}:0", f"{KIND}:0")
        outcome = run_plan(model.plan, window_bytes=WINDOW, block_bytes=BLOCK)
    assert not model.differing(outcome.tensors)
    assert (outcome.copier, outcome.copier_reason) == ("plain", "there is no ring for fake devices")
