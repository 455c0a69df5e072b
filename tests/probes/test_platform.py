"""The class of the machine, by what torch says of its devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from umem.probes import PlatformClass, probe_platform


def with_cuda(monkeypatch: pytest.MonkeyPatch, **properties: object) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(**properties))


def test_shared_memory_is_told_by_the_integrated_attribute_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, name="some renamed box", is_integrated=1)
    platform = probe_platform()
    assert (platform.kind, platform.device) == (PlatformClass.UNIFIED, "cuda:0")
    assert "integrated=1" in platform.evidence


def test_a_name_does_not_make_memory_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, name="NVIDIA GB10", is_integrated=0)
    assert probe_platform("cuda:1").kind is PlatformClass.DISCRETE
    with_cuda(monkeypatch, name="NVIDIA GB10")
    assert probe_platform("cuda:1").kind is PlatformClass.DISCRETE


def test_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda(monkeypatch, name="x", is_integrated=1)
    assert probe_platform("cpu").kind is PlatformClass.CPU


def test_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert probe_platform().device == "cpu"
