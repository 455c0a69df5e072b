"""The promise about memory, by the kernel's own count: a control group's high-water mark, page cache included."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_checkpoint import write_sample

from tests.limits import MemoryGroup, memory_group
from umem.checkpoint import open_checkpoint

pytest.importorskip("transformers")
pytestmark = pytest.mark.root

MIB = 1 << 20

LOAD = """
import json, sys
import torch
from pathlib import Path
import accelerate.big_modeling, torch._dynamo, transformers.models.qwen3_moe.modeling_qwen3_moe
import umem, umem.adapters.hosts.transformers, umem.strategies
path, used, peak = sys.argv[1:]
umem.plan(path, device="cpu")
Path(peak).write_text("0")
base = int(Path(used).read_text())
model, report = umem.load(path, device="cpu", return_report=True, settings=umem.LoadSettings(reader=READER), SETTINGS)
print(json.dumps([int(Path(peak).read_text()) - base, report.plan.forecast.peak_bytes, report.plan.forecast.final_bytes,
                  report.measured_peak_bytes]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture-of-experts model of 350 MiB."""
    directory = tmp_path_factory.mktemp("moe")
    write_sample(directory, num_hidden_layers=1, num_experts=32)
    return directory


def evict(directory: Path) -> None:
    for shard in open_checkpoint(directory).shards:
        descriptor = os.open(shard.path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run(group: MemoryGroup, directory: Path, reader: str, **settings: Any) -> list[int]:
    if group.version != 1:
        pytest.skip("memory.peak of cgroup v2 can only be reset through a descriptor of its own")
    files = [str(group.path / name) for name in ("memory.usage_in_bytes", "memory.max_usage_in_bytes")]
    code = LOAD.replace("READER", repr(reader)).replace("SETTINGS", f"**{settings!r}")
    done = group.run(code, str(directory), *files)
    assert done.returncode == 0, done.stderr
    facts: list[int] = json.loads(done.stdout)
    return facts


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "warm"])
@pytest.mark.parametrize("reader", ["auto", "buffered"])
def test_the_peak_is_the_model_and_the_window(checkpoint: Path, reader: str, cold: bool) -> None:
    if cold:
        evict(checkpoint)
    with memory_group() as group:
        peak, forecast, final, measured = run(group, checkpoint, reader)
    assert final > 340 * MIB
    assert final < peak <= forecast + 0.02 * final
    assert abs(measured - peak) < 64 * MIB  # samples miss what a window holds for a moment


def test_a_load_fits_a_limit_of_the_model_and_the_window(checkpoint: Path) -> None:
    with memory_group() as group:
        peak, forecast, *_ = run(group, checkpoint, "buffered")
        del peak
    evict(checkpoint)
    with memory_group() as group:
        group.limit(forecast + 420 * MIB)  # the interpreter with torch and transformers takes about 300 MiB
        run(group, checkpoint, "buffered")


def test_a_limit_that_is_too_small_is_an_error_and_no_kill(checkpoint: Path) -> None:
    with memory_group() as group:
        group.limit(500 * MIB)
        code = (
            "import sys, umem\n"
            "try:\n    umem.load(sys.argv[1], device='cpu')\n"
            "except umem.UmemError as error:\n    print(type(error).__name__, error.source)\n"
        )
        done = group.run(code, str(checkpoint))
    assert done.stdout.startswith("InsufficientMemoryError the control group's headroom"), done.stderr


@pytest.mark.parametrize("reader", ["auto", "buffered"])
def test_a_load_to_disk_takes_the_window(checkpoint: Path, tmp_path: Path, reader: str) -> None:
    evict(checkpoint)
    with memory_group() as group:
        device_map = {"": "disk"}
        peak, forecast, final, _ = run(group, checkpoint, reader, device_map=device_map, offload_folder=str(tmp_path))
    assert forecast == 64 * MIB
    assert peak <= forecast + 0.02 * final  # 96 MiB are written


ANSWER = """
import sys, torch, umem
path, folder, answer = sys.argv[1:]
settings = {"offload": "disk", "offload_folder": folder} if folder else {}
model, report = umem.load(path, device="cpu", return_report=True, **settings)
with torch.no_grad():
    torch.save(model(torch.arange(1, 9)[None]).logits, answer)
forecast = report.plan.forecast
print(forecast.final_bytes, forecast.final_bytes_by_device.get("disk", 0), forecast.offloaded_bytes)
"""


def test_a_model_larger_than_the_limit_loads_and_answers_from_disk(tmp_path: Path) -> None:
    write_sample(tmp_path / "moe", num_hidden_layers=6, num_experts=24)
    evict(tmp_path / "moe")
    answers = [tmp_path / "whole.pt", tmp_path / "split.pt"]
    limit = 600 * MIB
    with memory_group() as group:
        group.limit(limit)
        split = group.run(ANSWER, str(tmp_path / "moe"), str(tmp_path / "off"), str(answers[1]))
    assert split.returncode == 0, split.stderr
    final, on_disk, written = map(int, split.stdout.split())
    assert final > limit
    assert on_disk > final - 300 * MIB
    assert written > 400 * MIB
    assert not (tmp_path / "off").exists()
    with memory_group() as group:
        whole = group.run(ANSWER, str(tmp_path / "moe"), "", str(answers[0]))
    assert whole.returncode == 0, whole.stderr
    assert torch.equal(*(torch.load(answer) for answer in answers))
