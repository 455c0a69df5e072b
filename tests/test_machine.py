"""Snapshots of a machine: this one, saved and read again, and files that are none."""

from __future__ import annotations

import getpass
import json
import socket
from pathlib import Path
from typing import Any

import pytest

import umem
from umem.errors import SnapshotError
from umem.reservations import Claim, Reservations
from umem.settings import LoadSettings


def test_this_machine_saved_and_read_again(tmp_path: Path) -> None:
    machine = umem.probe(device="cpu")
    path = tmp_path / "here.json"
    machine.save(path)
    again = umem.MachineSnapshot.load(path)
    assert again.to_json() == machine.to_json()
    assert again.budget.available_bytes == machine.budget.available_bytes is not None


def test_a_saved_machine_names_nobody(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    umem.probe(device="cpu").save(path)
    text = path.read_text()
    groups = [group.path for group in umem.probe(device="cpu").memory.cgroups]
    for private in (socket.gethostname(), getpass.getuser(), str(Path.home()), *groups):
        assert f'"{private}' not in text


def test_the_claims_of_other_loads_are_part_of_it(tmp_path: Path) -> None:
    reservations = Reservations(tmp_path)
    held = reservations.reserve(Claim(memory_bytes=1 << 30))
    assert held is not None
    from umem.machine import probe

    machine = probe(device="cpu", reservations=reservations)
    free = probe(device="cpu", reservations=Reservations(None))
    assert machine.budget.available_bytes is not None
    assert free.budget.available_bytes is not None
    assert free.budget.available_bytes - machine.budget.available_bytes > 1 << 29
    machine.save(tmp_path / "x.json")
    saved = umem.MachineSnapshot.load(tmp_path / "x.json")
    assert saved.budget.available_bytes == machine.budget.available_bytes
    held.release()


def test_settings_change_the_budget_of_a_saved_machine(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    umem.probe(device="cpu").save(path)
    capped = umem.MachineSnapshot.load(path, LoadSettings(memory_budget_bytes=1000))
    assert (capped.budget.available_bytes, capped.budget.source) == (1000, "the memory budget that was set")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "no JSON"),
        ([], "not a snapshot"),
        ({"schema": "umem.plan", "version": 1}, "not a snapshot"),
        ({"schema": "umem.probe", "version": 2}, "version 2"),
        ({"schema": "umem.probe", "version": 1}, "facts"),
        ({"schema": "umem.probe", "version": 1, "facts": {"torch": 7}, "memory": {}}, "another form"),
    ],
)
def test_a_file_that_is_no_snapshot(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(SnapshotError, match=message) as caught:
        umem.MachineSnapshot.load(path)
    assert caught.value.path == str(path)
    assert "umem probe --save" in str(caught.value)
