"""What every test shares: no settings of the environment, no network, no time limit per example."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
for variable in [name for name in os.environ if name.startswith("UMEM_")]:
    del os.environ[variable]

settings.register_profile("umem", deadline=None, print_blob=True)
settings.load_profile("umem")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what the machine cannot do, with the reason."""
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs root")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
