"""umem: a unified-memory-aware checkpoint loader.

The public names load their parts when first used: `import umem` imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from umem.adapters.rules import Rule
    from umem.api import load, load_adapter, load_into, plan, probe
    from umem.errors import UmemError
    from umem.machine import MachineSnapshot
    from umem.planning import LoadPlan
    from umem.report import LoadReport
    from umem.report.progress import tqdm_progress
    from umem.settings import LoadSettings, Thresholds

__all__ = [
    "LoadPlan",
    "LoadReport",
    "LoadSettings",
    "MachineSnapshot",
    "Rule",
    "Thresholds",
    "UmemError",
    "load",
    "load_adapter",
    "load_into",
    "plan",
    "probe",
    "tqdm_progress",
]
__version__ = "0.1.0"

_PLACES = {
    "LoadSettings": "umem.settings",
    "LoadPlan": "umem.planning",
    "LoadReport": "umem.report",
    "MachineSnapshot": "umem.machine",
    "Rule": "umem.adapters.rules",
    "Thresholds": "umem.settings",
    "UmemError": "umem.errors",
    "load": "umem.api",
    "load_adapter": "umem.api",
    "load_into": "umem.api",
    "plan": "umem.api",
    "probe": "umem.api",
    "tqdm_progress": "umem.report.progress",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'umem' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
