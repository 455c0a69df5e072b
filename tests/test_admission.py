"""Admission: refusals before any read, waiting for memory, and loads that account for each other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.limits import memory_group
from tests.writers import random_tensor, write_safetensors, write_sparse
from umem import load_into
from umem._types import DType
from umem.adapters.families import by_name
from umem.admission import Admission, Waiting
from umem.checkpoint import open_checkpoint
from umem.errors import InsufficientMemoryError
from umem.machine import probe
from umem.planning import LoadPlan, Target, Targets, make_plan
from umem.probes import PlatformFacts, gather_facts
from umem.reservations import Claim, Reservations
from umem.settings import LoadSettings

MIB, TIB = 1 << 20, 1 << 40


@pytest.fixture
def facts() -> PlatformFacts:
    return gather_facts("cpu")


def plan_of(path: Path) -> LoadPlan:
    checkpoint = open_checkpoint(path)
    targets = Targets(Target(entry.name, DType.F32, entry.shape) for entry in checkpoint.entries.values())
    return make_plan(checkpoint, targets, by_name(checkpoint, targets), window_bytes=16 * MIB)


def small_plan(directory: Path) -> LoadPlan:
    return plan_of(write_safetensors(directory / "small.safetensors", {"a": random_tensor((1000,))}))


def test_a_load_that_fits_is_let_in_and_claims_what_it_will_take(tmp_path: Path, facts: PlatformFacts) -> None:
    plan, reservations = small_plan(tmp_path), Reservations(tmp_path)
    with Admission.of(plan, facts, LoadSettings(), reservations=reservations) as admission:
        assert [claim.memory_bytes for claim in reservations.others()] == [plan.forecast.peak_bytes]
        admission.taken(0.5)
        assert [claim.memory_bytes for claim in reservations.others()] == [plan.forecast.peak_bytes - 2000]
    assert reservations.others() == []


def test_what_another_load_will_take_is_not_there(tmp_path: Path, facts: PlatformFacts) -> None:
    plan, reservations = small_plan(tmp_path), Reservations(tmp_path)
    other = reservations.reserve(Claim(memory_bytes=TIB))
    assert other is not None
    with pytest.raises(InsufficientMemoryError, match=r"1\.00 TiB that another load will take"):
        Admission.of(plan, facts, LoadSettings(), reservations=reservations)
    other.release()
    with Admission.of(plan, facts, LoadSettings(), reservations=reservations):
        pass


def test_a_load_waits_until_it_fits(tmp_path: Path, facts: PlatformFacts) -> None:
    plan, reservations = small_plan(tmp_path), Reservations(tmp_path)
    other = reservations.reserve(Claim(memory_bytes=TIB))
    assert other is not None
    seen: list[Waiting] = []

    def follow(now: Waiting) -> None:
        seen.append(now)
        if len(seen) == 2:
            other.release()

    with Admission.of(plan, facts, LoadSettings(wait_for_memory_s=60), waiting=follow, reservations=reservations):
        assert len(seen) == 2
    assert (seen[0].needed_bytes, seen[0].available_bytes, seen[0].wait_s) == (plan.forecast.peak_bytes, 0, 60)


def test_waiting_ends(tmp_path: Path, facts: PlatformFacts) -> None:
    reservations = Reservations(tmp_path)
    other = reservations.reserve(Claim(memory_bytes=TIB))
    seen: list[Waiting] = []
    with pytest.raises(InsufficientMemoryError):
        Admission.of(
            small_plan(tmp_path),
            facts,
            LoadSettings(wait_for_memory_s=0.7),
            waiting=seen.append,
            reservations=reservations,
        )
    assert seen[0].waited_s < 0.7
    assert other is not None
    other.release()


@pytest.mark.parametrize("budget", [1000, None], ids=["a budget that was set", "more than the machine has"])
def test_what_waiting_cannot_change_is_refused_at_once(
    tmp_path: Path, facts: PlatformFacts, budget: int | None
) -> None:
    plan = small_plan(tmp_path) if budget else plan_of(write_sparse(tmp_path / "x.safetensors", 2 * TIB))
    settings = LoadSettings(wait_for_memory_s=3600, memory_budget_bytes=budget)
    seen: list[Waiting] = []
    with pytest.raises(InsufficientMemoryError):
        Admission.of(plan, facts, settings, waiting=seen.append, reservations=Reservations(tmp_path))
    assert seen == []


RACE = """
import sys
from pathlib import Path
from tests.test_admission import plan_of
from umem.admission import Admission
from umem.settings import LoadSettings
from umem.errors import InsufficientMemoryError
from umem.probes import gather_facts
from umem.reservations import Reservations
plan, facts = plan_of(Path(sys.argv[1])), gather_facts("cpu")
print("ready", flush=True)
sys.stdin.readline()
try:
    with Admission.of(plan, facts, LoadSettings(), reservations=Reservations(Path(sys.argv[2]))):
        print("in", flush=True)
        sys.stdin.readline()
except InsufficientMemoryError as error:
    print("another load" in str(error), flush=True)
"""


def test_of_loads_that_start_together_those_are_let_in_that_fit_together(tmp_path: Path) -> None:
    available = probe(device="cpu", reservations=Reservations(None)).budget.available_bytes
    assert available is not None
    path = write_sparse(tmp_path / "x.safetensors", int(0.55 * available))
    directory = tmp_path / "claims"
    directory.mkdir()
    command = [sys.executable, "-c", RACE, str(path), str(directory)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # tests.limits stands on scripts
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = []
    for process in processes:
        assert process.stdout is not None
        answers.append(process.stdout.readline().strip())
    for process in processes:
        process.communicate("end\n", timeout=60)
    assert sorted(answers) == ["True", "True", "in"]


def module_of(count: int) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_parameter("a", torch.nn.Parameter(torch.empty(count, device="meta")))
    return module


def test_a_claim_shrinks_while_the_load_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    count = 16 * MIB
    path = write_sparse(tmp_path / "model.safetensors", 4 * count, ["a"])
    seen: list[int] = []

    def follow(_: object) -> None:
        seen.extend(claim.memory_bytes for claim in Reservations(tmp_path / "umem").others())

    settings = LoadSettings(window_bytes=16 * MIB, block_bytes=MIB)
    load_into(module_of(count), path, device="cpu", settings=settings, progress=follow)
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 16 * MIB
    assert Reservations(tmp_path / "umem").others() == []


def test_a_load_needs_no_place_for_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umem.reservations.runtime_directory", lambda: None)
    load_into(module_of(1000), write_safetensors(tmp_path / "x.safetensors", {"a": random_tensor((1000,))}))


REFUSED = """
import json, sys
import torch
import umem, umem.session, umem.strategies
from umem.adapters import families, install, rules
from umem.checkpoint.pagecache import cached_bytes_of_files

def counters():
    with open("/proc/self/io") as file:
        return {name: int(value) for name, value in (line.split(":") for line in file)}

module = torch.nn.Module()
module.register_parameter("a", torch.nn.Parameter(torch.empty(64 << 20, device="meta")))
settings = umem.LoadSettings(memory_budget_bytes=64 << 20) if sys.argv[2] == "budget" else None
before = counters()
try:
    umem.load_into(module, sys.argv[1], device="cpu", settings=settings)
except umem.UmemError as error:
    after = counters()
    facts = [type(error).__name__, after["rchar"] - before["rchar"], cached_bytes_of_files([sys.argv[1]]),
             [remedy.action for remedy in error.remedies]]
    print(json.dumps(facts))
"""


@pytest.fixture
def evicted(tmp_path: Path) -> Path:
    """256 MiB in a file, none of it in the page cache."""
    path = write_sparse(tmp_path / "model.safetensors", 256 * MIB, ["a"])
    data = path.stat().st_size - 256 * MIB
    with path.open("r+b") as file:
        file.seek(data)
        for _ in range(256):
            file.write(os.urandom(1024) * 1024)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def check_refused(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    name, read_bytes, cached, _ = json.loads(done.stdout)
    assert name == "InsufficientMemoryError"
    assert read_bytes < 4 * MIB  # the header, modules, and what /proc says
    assert cached is None or cached < 4 * MIB


def test_nothing_is_read_before_a_refusal(evicted: Path) -> None:
    command = [sys.executable, "-c", REFUSED, str(evicted), "budget"]
    check_refused(subprocess.run(command, capture_output=True, text=True, timeout=120, check=False))


@pytest.mark.root
def test_nothing_is_read_before_a_refusal_in_a_small_group(evicted: Path) -> None:
    with memory_group() as group:
        group.limit(400 * MIB)
        check_refused(group.run(REFUSED, str(evicted), "group"))


def test_an_interrupt_while_waiting_is_clean(tmp_path: Path) -> None:
    directory = tmp_path / "umem"
    directory.mkdir(mode=0o700)
    other = Reservations(directory).reserve(Claim(memory_bytes=TIB))
    assert other is not None
    path = write_safetensors(tmp_path / "x.safetensors", {"a": random_tensor((1000,))})
    code = (
        "import sys, torch, umem\nfrom umem.cli import main\nimport umem.api\n"
        "def load(path, *, settings, progress, **_):\n"
        "    module = torch.nn.Module()\n"
        "    module.register_parameter('a', torch.nn.Parameter(torch.empty(1000, device='meta')))\n"
        "    def say(now):\n        print(now.waiting, flush=True)\n"
        "    umem.load_into(module, path, device='cpu', settings=settings, progress=say)\n"
        "umem.api.load = load\n"
        f"sys.argv = ['umem', 'load', {str(path)!r}, '--wait-for-memory', '5min']\nmain()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert process.stdout is not None
    assert "waiting for memory" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, "interrupted" in err, "Traceback" in err) == (130, True, False), err
    assert len(list(directory.glob("*.json"))) == 1  # only the other's
    other.release()
