"""Drills: whatever takes the memory away, a load is whole or it stops in time, says why, and gives everything back.

These are the first ten; `scripts/drills.py` runs a hundred.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drills import MIB, Drill, drills, failures_of, prepare, run_drill
from tests.limits import swap_file

pytestmark = pytest.mark.root

COUNT = 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("drills"))


@pytest.fixture(scope="module")
def swap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with swap_file(tmp_path_factory.mktemp("swap"), 512 * MIB):
        yield


@pytest.mark.parametrize("drill", drills(COUNT), ids=lambda drill: f"{drill.seed}-{drill.disaster}")
def test_drill(drill: Drill, checkpoint: Path, request: pytest.FixtureRequest) -> None:
    if drill.swap:
        request.getfixturevalue("swap")
    outcome = run_drill(drill, checkpoint)
    assert failures_of(drill, outcome) == [], outcome
