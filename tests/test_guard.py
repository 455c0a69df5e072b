"""The guard ends a loader that hangs with memory short, and nothing else; it ends with the load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.limits import MemoryGroup, memory_group
from tests.writers import random_tensor, write_safetensors
from umem.guard import Short, Warden, shortage
from umem.probes import CgroupMemory, MemorySnapshot

MIB = 1 << 20

LOADER = """
import ctypes, sys, time
import torch, umem
from tests.writers import Holder
path, trouble = sys.argv[1:]
held = []
def progress(now):
    if not held:
        held.append(now)
        print(open("/proc/self/oom_score_adj").read().strip(), flush=True)
        sys.stdin.readline()
        if trouble == "interpreter":
            ctypes.PyDLL(None).sleep(60)
module = Holder({name: torch.empty(4 * 2**20) for name in "abcd"})
settings = umem.LoadSettings(guard=True, window_bytes=16 << 20, block_bytes=1 << 20)
umem.load_into(module, path, device="cpu", settings=settings, progress=progress)
print(open("/proc/self/oom_score_adj").read().strip(), flush=True)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    return write_safetensors(path, {name: random_tensor((4 * MIB,)) for name in "abcd"})


def started(checkpoint: Path, trouble: str, group: MemoryGroup | None = None) -> subprocess.Popen[str]:
    """A loader in the midst of its load, with a guard."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOADER, str(checkpoint), trouble],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)},
        preexec_fn=None if group is None else group.join,  # noqa: PLW1509
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "1000"
    return process


def guards_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"umem.guard" in Path(f"/proc/{child}/cmdline").read_bytes()]


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.root
@pytest.mark.parametrize("trouble", ["stopped", "interpreter"])
def test_a_loader_that_hangs_with_memory_short_is_ended(checkpoint: Path, trouble: str) -> None:
    with memory_group() as group:
        group.limit(2048 * MIB)
        process = started(checkpoint, trouble, group)
        time.sleep(1)  # the guard has read what it is to watch
        if trouble == "stopped":
            process.send_signal(signal.SIGSTOP)
        else:
            go_on(process)
        time.sleep(0.2)
        group.limit(group.used_bytes + 8 * MIB)
        try:
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode in (-signal.SIGTERM, -signal.SIGKILL)
    assert f"umem guard: ending process {process.pid} (SIGTERM)" in said
    assert "left in the control group, the floor is 32.00 MiB, and it has not answered for" in said


def test_a_stopped_loader_with_memory_to_spare_is_left_alone(checkpoint: Path) -> None:
    before = Path("/proc/self/oom_score_adj").read_text().strip()
    process = started(checkpoint, "stopped")
    guards = guards_of(process.pid)
    assert len(guards) == 1
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    said, complaints = process.communicate("\n", timeout=60)
    assert (process.returncode, said.strip(), complaints) == (0, before, "")
    assert not Path(f"/proc/{guards[0]}").exists()


def test_the_guard_ends_with_a_killed_loader(checkpoint: Path) -> None:
    process = started(checkpoint, "killed")
    (guard,) = guards_of(process.pid)
    process.kill()
    process.communicate(timeout=30)  # until the guard too has closed standard error
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{guard}").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not Path(f"/proc/{guard}").exists()


SHORT = Short(10 * MIB, 32 * MIB, "available")


def test_a_loader_that_answers_has_time_to_free_its_memory() -> None:
    warden = Warden(silence_s=0.5, patience_s=2.0)
    for tick in range(20):
        warden.heard(tick / 10)
        assert warden.verdict(tick / 10, SHORT) is None
    assert warden.verdict(1.9, None) is None  # freed: the patience begins anew
    warden.heard(2.5)
    assert warden.verdict(2.6, SHORT) is None
    warden.heard(4.7)
    assert "freed nothing for 2.1 s" in (warden.verdict(4.7, SHORT) or "")


def test_a_loader_that_does_not_answer_is_ended_at_once_when_memory_is_short() -> None:
    warden = Warden(silence_s=0.5, patience_s=2.0)
    warden.heard(0.0)
    assert warden.verdict(0.4, SHORT) is None
    assert warden.verdict(9.0, None) is None
    assert "not answered for 9.1 s" in (warden.verdict(9.1, SHORT) or "")


def test_each_memory_has_its_own_floor() -> None:
    memory = MemorySnapshot(time_s=0, available_bytes=100 * MIB, cgroups=(CgroupMemory("/g", 64 * MIB, 60 * MIB),))
    assert shortage(memory, {"system": 200 * MIB, "group": 2 * MIB}) == Short(100 * MIB, 200 * MIB, "available")
    assert shortage(memory, {"system": 2 * MIB, "group": 32 * MIB}) == Short(
        4 * MIB, 32 * MIB, "left in the control group"
    )
    assert shortage(memory, {"system": 2 * MIB, "group": 2 * MIB}) is None
