"""Machines of the field from their snapshots: class, budget, reader, and whether a model of 60 GiB fits.

`tests/platforms/README.md` says where the values are from and which are to be verified on hardware.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.writers import write_sparse
from umem._types import DType
from umem.adapters.families import by_name
from umem.admission import circumstances
from umem.checkpoint import open_checkpoint
from umem.errors import InsufficientMemoryError
from umem.machine import MachineSnapshot
from umem.planning import LoadPlan, Target, Targets, check_budget, make_plan
from umem.settings import LoadSettings

PLATFORMS = Path(__file__).parents[1] / "platforms"
EXPECTED: dict[str, dict[str, Any]] = json.loads((PLATFORMS / "expected.json").read_text())
GIB = 1 << 30


@pytest.fixture(scope="module")
def sixty_gib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 60 GiB in F32 that takes no room on the disk."""
    return write_sparse(tmp_path_factory.mktemp("large") / "model.safetensors", 60 * GIB)


def plan_for(path: Path, device: str) -> LoadPlan:
    checkpoint = open_checkpoint(path)
    targets = Targets(Target(entry.name, DType.F32, entry.shape, device) for entry in checkpoint.entries.values())
    return make_plan(checkpoint, targets, by_name(checkpoint, targets), window_bytes=64 << 20)


def test_every_snapshot_has_an_expectation() -> None:
    assert {path.stem for path in PLATFORMS.glob("*.json")} == {*EXPECTED, "expected"}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_machine_of_the_field(name: str, sixty_gib: Path) -> None:
    expected = EXPECTED[name]
    machine = MachineSnapshot.load(PLATFORMS / f"{name}.json", LoadSettings())
    platform, budget = machine.platform, machine.budget
    assert (str(platform.kind), platform.device) == (expected["kind"], expected["device"])
    assert budget.tightest is not None
    assert (budget.available_bytes, str(budget.tightest.limit)) == (expected["available_bytes"], expected["limit"])
    beside = budget.tightest_in_memory if budget.device else None
    assert (beside and beside.available_bytes) == expected.get("memory_available_bytes")
    assert machine.reading == (expected["reader"], expected["page_cache"])
    plan = plan_for(sixty_gib, platform.device)
    if expected["fits"]:
        check_budget(plan, budget)
        return
    with pytest.raises(InsufficientMemoryError) as caught:
        check_budget(plan, budget, lambda shortfall: circumstances(machine, shortfall, here=False))
    assert [remedy.action for remedy in caught.value.remedies] == expected["remedies"]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_snapshot_stays_what_it_is_when_it_is_saved_again(name: str, tmp_path: Path) -> None:
    machine = MachineSnapshot.load(PLATFORMS / f"{name}.json", LoadSettings())
    machine.save(tmp_path / "again.json")
    again = MachineSnapshot.load(tmp_path / "again.json", LoadSettings())
    assert again.to_json() == machine.to_json()


def test_a_budget_that_is_set_caps_every_class() -> None:
    for name in EXPECTED:
        machine = MachineSnapshot.load(PLATFORMS / f"{name}.json", LoadSettings(memory_budget_bytes=GIB))
        assert machine.budget.available_bytes == min(GIB, EXPECTED[name]["available_bytes"]), name
