"""Models that stay mapped: the file's bytes, no memory of their own, and a file that nobody changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import umem
from tests.writers import random_tensor, same_bytes, write_safetensors
from umem.checkpoint import open_checkpoint
from umem.errors import ChangedFileError, UnsupportedError
from umem.settings import LoadSettings, Residency
from umem.strategies.mapped import MappedShards

MAPPED = LoadSettings(residency=Residency.MAPPED)


class Model(torch.nn.Module):
    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(64, 1000, dtype=torch.bfloat16, device=device))
        self.head = self.weight
        self.register_buffer("steps", torch.empty((), dtype=torch.int64, device=device))
        self.register_buffer("none", torch.empty(0, 3, device=device))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    stored = {
        "steps": torch.tensor(7),
        "weight": random_tensor((64, 1000), torch.bfloat16),
        "none": torch.empty(0, 3),
    }
    save_file(stored, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_the_model_is_the_file(path: Path) -> None:
    content = path.read_bytes()
    model, owned = Model(), Model()
    report = umem.load_into(model, path, settings=MAPPED, device="cpu")
    umem.load_into(owned, path, device="cpu")
    assert same_bytes(model.weight, owned.weight)
    assert model.head is model.weight
    assert model.steps == 7
    assert model.none.shape == (0, 3)
    assert report.reader == "none"
    with torch.no_grad():
        model.weight.fill_(1)
    assert path.read_bytes() == content


def test_a_mapping_ends_with_its_last_tensor(path: Path) -> None:
    model = Model()
    umem.load_into(model, path, settings=MAPPED, device="cpu")
    assert str(path) in Path("/proc/self/maps").read_text()
    del model
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_nothing_is_read_until_it_is_used(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"w": torch.ones(64 << 20, dtype=torch.uint8)})
    code = (
        "import sys, torch, umem\n"
        "from umem.settings import LoadSettings\n"
        "def resident():\n"
        "    return sum(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith(('RssFile', 'RssAnon')))\n"
        "module = torch.nn.Module()\n"
        "module.register_buffer('w', torch.empty(64 << 20, dtype=torch.uint8, device='meta'))\n"
        "umem.load_into(module, sys.argv[1], device='cpu', settings=LoadSettings(residency='mapped'))\n"
        "before = resident()\n"
        "total = int(module.w.sum())\n"
        "print(total, resident() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    total, grown_kib = map(int, done.stdout.split())
    assert total == 64 << 20
    assert grown_kib > 60 << 10


def test_items_that_lie_askew_in_the_file_are_refused(tmp_path: Path) -> None:
    stored = {"mask": torch.ones(3, dtype=torch.uint8), "steps": torch.tensor(7)}
    path = write_safetensors(tmp_path / "m.safetensors", stored)
    module = torch.nn.Module()
    module.register_buffer("mask", torch.empty(3, dtype=torch.uint8, device="meta"))
    module.register_buffer("steps", torch.empty((), dtype=torch.int64, device="meta"))
    with pytest.raises(UnsupportedError, match="no multiple of its items' 8"):
        umem.load_into(module, path, settings=MAPPED, device="cpu")
    assert module.mask.is_meta


def test_a_live_module_cannot_stay_mapped(path: Path) -> None:
    model = Model("cpu")
    before = model.weight.clone()
    with pytest.raises(UnsupportedError, match="memory of its own"):
        umem.load_into(model, path, settings=MAPPED)
    assert same_bytes(model.weight, before)


def test_a_file_that_was_replaced_since_it_was_planned(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.replace(path)
    entry = checkpoint.entries["weight"]
    target = umem.planning.Target("weight", entry.dtype, entry.shape)
    with pytest.raises(ChangedFileError):
        MappedShards().tensor(checkpoint.shards[0], entry, target)
