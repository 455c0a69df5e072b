"""Which models can stay mapped, and what is said of those that cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.writers import random_tensor, write_safetensors
from umem._types import DType
from umem.adapters.families import by_name
from umem.checkpoint import open_checkpoint
from umem.errors import SettingsError, UnsupportedError
from umem.planning import Adaptation, LoadPlan, Target, Targets, Write, make_plan
from umem.planning.views import View
from umem.planning.writes import Conversion, Route
from umem.settings import LoadSettings, Residency


def planned(path: Path, *, target: Target | None = None, live: tuple[str, ...] = ()) -> LoadPlan:
    checkpoint = open_checkpoint(path)
    entry = checkpoint.entries["w"]
    targets = Targets([target or Target("w", entry.dtype, entry.shape)])
    return make_plan(
        checkpoint, targets, by_name(checkpoint, targets), window_bytes=1 << 24, live=live, residency=Residency.MAPPED
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_safetensors(tmp_path / "m.safetensors", {"w": random_tensor((4, 6), torch.bfloat16)})


def test_a_model_stored_as_it_is_used_takes_nothing(path: Path) -> None:
    plan = planned(path)
    assert {group.route for group in plan.groups} == {Route.MAPPED}
    forecast = plan.forecast
    assert (forecast.final_bytes, forecast.peak_bytes, forecast.read_bytes) == (48, 0, 0)


def test_refusals_name_the_tensor_and_the_reason(path: Path) -> None:
    entry = open_checkpoint(path).entries["w"]
    with pytest.raises(UnsupportedError, match=r"w: cast BF16 to F32.*use residency='owned'"):
        planned(path, target=Target("w", entry.dtype.from_torch(torch.float32), entry.shape))
    with pytest.raises(UnsupportedError, match="w: it goes to cuda:0"):
        planned(path, target=Target("w", entry.dtype, entry.shape, "cuda:0"))
    with pytest.raises(UnsupportedError, match="w: it is there already"):
        planned(path, live=("w",))


def test_views_of_parts_are_refused(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    entry = checkpoint.entries["w"]
    transposed = Write(entry, View.whole((4, 6)), "w", View(0, (4, 6), (1, 4)))
    with pytest.raises(UnsupportedError, match="another layout"):
        make_plan(
            checkpoint,
            Targets([Target("w", entry.dtype, (6, 4))]),
            Adaptation([transposed], [], [], []),
            window_bytes=1 << 24,
            residency=Residency.MAPPED,
        )


def test_the_setting_has_two_values() -> None:
    assert LoadSettings(residency=Residency("mapped")).residency is Residency.MAPPED
    with pytest.raises(SettingsError, match="owned or mapped"):
        LoadSettings().with_changes(residency="lazy")


def on_disk(path: Path, dtype: DType | None = None) -> LoadPlan:
    checkpoint = open_checkpoint(path)
    targets = Targets(
        Target(entry.name, dtype or entry.dtype, entry.shape, "disk") for entry in checkpoint.entries.values()
    )
    return make_plan(checkpoint, targets, by_name(checkpoint, targets), window_bytes=1 << 24)


def test_what_is_on_disk_as_it_is_used_stays_there(path: Path) -> None:
    plan = on_disk(path)
    assert {group.route for group in plan.groups} == {Route.KEPT}
    forecast = plan.forecast
    assert forecast.final_bytes_by_device == {"disk": 48}
    assert (forecast.allocated_bytes, forecast.peak_bytes, forecast.read_bytes, forecast.offloaded_bytes) == (0,) * 4


def test_what_is_used_in_another_form_is_written(path: Path, tmp_path: Path) -> None:
    plan = on_disk(path, DType.F32)
    assert {group.route for group in plan.groups} == {Route.STREAMING}
    forecast = plan.forecast
    assert (forecast.allocated_bytes, forecast.read_bytes, forecast.offloaded_bytes) == (0, 48, 96)
    askew = write_safetensors(tmp_path / "askew.safetensors", {"a": torch.ones(3).byte(), "b": torch.ones(2)})
    routes = {group.name: group.route for group in on_disk(askew).groups}
    assert routes == {"a": Route.KEPT, "b": Route.DIRECT}


def test_a_conversion_to_disk_holds_its_result_too(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    entry = checkpoint.entries["w"]
    converted = Adaptation([], [Conversion("c", (entry,), ("w",), "why")], [], [])

    def peak_bytes(device: str) -> int:
        targets = Targets([Target("w", DType.F32, (4, 6), device)])
        return make_plan(checkpoint, targets, converted, window_bytes=1 << 24).forecast.peak_bytes

    assert peak_bytes("disk") == peak_bytes("cpu")
