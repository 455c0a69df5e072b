"""The class of the machine on this machine, and what asking it imports."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from umem.probes import PlatformClass, probe_platform


def test_the_processor_is_asked_for_without_torch() -> None:
    code = (
        "import sys\nfrom umem.probes import probe_platform\nprint(probe_platform('cpu').kind, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["cpu", "False"]


def test_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (torch.cuda, torch.xpu, torch.backends.mps):
        monkeypatch.setattr(part, "is_available", lambda: False)
    platform = probe_platform()
    assert (platform.kind, platform.device) == (PlatformClass.CPU, "cpu")
    assert platform.evidence == "torch sees no accelerator"
