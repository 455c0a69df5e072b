"""A model with every kind of write, on the devices asked for, and the machine that has such devices."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest
import torch

from tests.strategies.copiers.late_device import LateDevice
from tests.writers import random_tensor, same_bytes, write_sharded
from umem._types import DType
from umem.adapters.layout import concatenate, stack, stored
from umem.checkpoint import Checkpoint, open_checkpoint
from umem.planning import Adaptation, LoadPlan, Target, Targets, View, Write, make_plan
from umem.planning.writes import Factor
from umem.strategies import copiers, executor, placing
from umem.strategies.storage import allocate

KIND = "fake"


class FakeMachine(contextlib.AbstractContextManager["FakeMachine"]):
    """While it lasts, devices of the kind `fake` are ordinary memory, poisoned, behind a late device."""

    def __init__(self, late: LateDevice, monkeypatch: pytest.MonkeyPatch, *, registered: bool = True) -> None:
        self._late = late
        if registered:
            monkeypatch.setitem(copiers.ACCELERATORS, KIND, lambda: late)
        monkeypatch.setattr(executor, "allocate", _allocate)
        monkeypatch.setattr(placing, "allocate", _allocate)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._late.close()


def _allocate(target: Target, *, huge_pages: bool | None, residue: int = 0) -> torch.Tensor:
    if not target.device.startswith(KIND):
        return allocate(target, huge_pages=huge_pages, residue=residue)
    tensor = allocate(target._replace(device="cpu"), huge_pages=None)
    tensor.view(-1).view(torch.uint8).fill_(0xEE)
    return tensor


@dataclass(frozen=True)
class Model:
    """A plan, and what its targets must be."""

    checkpoint: Checkpoint
    plan: LoadPlan
    expected: Mapping[str, torch.Tensor]

    def differing(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """The targets whose bits are not the expected ones."""
        assert set(tensors) == set(self.expected)
        return [name for name, tensor in tensors.items() if not same_bytes(tensor.cpu(), self.expected[name])]


def make_model(directory: Path, first: str, second: str, *, only: str = "") -> Model:
    """Large, small, misaligned, strided, cast, scaled and split tensors on two devices, and some on the processor.

    They are written to `directory` if that is empty.
    """
    kinds = {
        "large": [(f"large{i}", random_tensor((300_000,), torch.float32, i)) for i in range(6)],
        "small": [(f"small{i}", random_tensor((64 + 8 * i,), torch.bfloat16, i)) for i in range(60)],
        "odd": [(f"odd{i}", random_tensor((3 + 2 * i,), torch.int8, i)) for i in range(3)],
        "misaligned": [("misaligned0", random_tensor((40_001,), torch.float32, 7))],
        "strided": [(f"strided{i}", random_tensor((160, 128), torch.float16, i)) for i in range(4)],
        "cast": [("cast0", random_tensor((200, 301), torch.bfloat16, 1).nan_to_num())],
        "scaled": [("scaled0", torch.arange(-2100, 2100).reshape(60, 70).float()), ("scale", torch.arange(60) / 8)],
        "split": [("qkv", random_tensor((300, 200), torch.float32, 2))],
        "here": [(f"here{i}", random_tensor((30_000,), torch.float32, i)) for i in range(3)],
    }
    chosen = {kind: dict(named) for kind, named in kinds.items() if only in ("", kind)}
    everything = [pair for named in chosen.values() for pair in named.items()]
    half = len(everything) // 2
    if not any(directory.iterdir()):
        # The second file has the order turned, so that other neighbours meet.
        write_sharded(directory, [dict(everything[:half]), dict(everything[: half - 1 : -1])])
    checkpoint = open_checkpoint(directory)
    return _Build(checkpoint, {n: t for named in chosen.values() for n, t in named.items()}, first, second).model()


class _Build:
    def __init__(self, checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], first: str, second: str) -> None:
        self.checkpoint, self.tensors = checkpoint, tensors
        self.first, self.second = first, second
        self.targets: list[Target] = []
        self.writes: list[Write] = []
        self.expected: dict[str, torch.Tensor] = {}

    def model(self) -> Model:
        for name in self.tensors:
            if name.startswith(("large", "small", "odd", "misaligned", "here")):
                even = name.endswith(tuple("02468"))
                self._whole(name, "cpu" if name.startswith("here") else self.first if even else self.second)
        if "strided0" in self.tensors:
            self._strided()
            self._numbers()
            self._split()
        adaptation = Adaptation(self.writes, [], [], [])
        plan = make_plan(self.checkpoint, Targets(self.targets), adaptation, window_bytes=1 << 22)
        return Model(self.checkpoint, plan, self.expected)

    def _target(self, name: str, value: torch.Tensor, device: str) -> None:
        self.targets.append(Target(name, DType.from_torch(value.dtype), tuple(value.shape), device))
        self.expected[name] = value

    def _whole(self, name: str, device: str) -> None:
        self._target(name, self.tensors[name], device)
        self.writes += stored(self.checkpoint.entries[name]).writes(name)

    def _strided(self) -> None:
        parts = [self.tensors[f"strided{i}"] for i in range(4)]
        layouts = [stored(self.checkpoint.entries[f"strided{i}"]) for i in range(4)]
        self._target("stacked", torch.stack(parts[:2]).transpose(1, 2).contiguous(), self.second)
        self.writes += stack(layouts[:2], 0).transpose(1, 2).writes("stacked")
        self._target("joined", torch.cat(parts[2:], dim=1), self.first)
        self.writes += concatenate(layouts[2:], 1).writes("joined")

    def _numbers(self) -> None:
        cast, scaled, scale = (self.tensors[name] for name in ("cast0", "scaled0", "scale"))
        entries = self.checkpoint.entries
        self._target("cast", cast.float(), self.first)
        self.writes += stored(entries["cast0"]).writes("cast")
        for device, name in ((self.second, "scaled"),):
            whole = View.whole(tuple(scaled.shape))
            factor = Factor(entries["scale"], View(0, tuple(scaled.shape), (1, 0)), DType.from_torch(scaled.dtype))
            self._target(name, scaled * scale[:, None], device)
            self.writes.append(Write(entries["scaled0"], whole, name, whole, factor))

    def _split(self) -> None:
        parts = stored(self.checkpoint.entries["qkv"]).split([100, 120, 80], 0)
        values = self.tensors["qkv"].split([100, 120, 80])
        for name, part, value, device in zip("qkv", parts, values, (self.first, self.second, "cpu"), strict=True):
            self._target(name, value, device)
            self.writes += part.writes(name)
