"""Plans: groups with routes and reasons, all differences in one error, the forecast."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.writers import Holder, random_tensor, write_safetensors
from umem._types import DType
from umem.adapters.families import by_name
from umem.adapters.layout import concatenate, stack, stored
from umem.checkpoint import Checkpoint, open_checkpoint
from umem.errors import CoverageError, KeyMismatchError
from umem.planning import (
    Adaptation,
    Conversion,
    LoadPlan,
    Route,
    Target,
    Targets,
    make_plan,
    places_of,
    targets_of,
)

MIB = 1 << 20


def checkpoint_of(directory: Path, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    return open_checkpoint(write_safetensors(directory / "model.safetensors", tensors))


def targets_like(tensors: Mapping[str, torch.Tensor]) -> Targets:
    return Targets(Target(name, DType.from_torch(t.dtype), tuple(t.shape)) for name, t in tensors.items())


def plan_of(checkpoint: Checkpoint, targets: Targets, adaptation: Adaptation | None = None) -> LoadPlan:
    return make_plan(checkpoint, targets, adaptation or by_name(checkpoint, targets), window_bytes=16 * MIB)


def test_routes_and_reasons(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(
        tmp_path,
        {
            "plain": random_tensor((4, 2)),
            "cast": random_tensor((3,), torch.float16),
            "e0": random_tensor((2, 5)),
            "e1": random_tensor((2, 5)),
            "odd": random_tensor((6,)),
        },
    )
    entries = checkpoint.entries
    targets = Targets(
        [
            Target("plain", DType.F32, (4, 2)),
            Target("cast", DType.F32, (3,)),
            Target("experts", DType.F32, (2, 2, 5)),
            Target("odd", DType.F32, (6,)),
        ]
    )
    adaptation = Adaptation([], [], [], [])
    for name in ("plain", "cast"):
        adaptation.writes.extend(stored(entries[name]).writes(name))
    adaptation.writes.extend(stack([stored(entries["e0"]), stored(entries["e1"])], 0).writes("experts"))
    adaptation.conversions.append(Conversion("odd", (entries["odd"],), ("odd",), "Scale: no move of elements"))
    plan = plan_of(checkpoint, targets, adaptation)
    assert {group.name: (str(group.route), group.reason) for group in plan.groups} == {
        "plain": ("direct", "stored as it is used"),
        "cast": ("streaming", "cast F16 to F32"),
        "experts": ("direct", "stored bytes fill a view"),
        "odd": ("materialized", "Scale: no move of elements"),
    }
    assert plan.bytes_by_route()[Route.DIRECT, "stored bytes fill a view"] == 80
    forecast = plan.forecast
    assert forecast.final_bytes == 32 + 12 + 80 + 24
    assert forecast.read_bytes == 32 + 6 + 80 + 24
    assert forecast.scratch_bytes == 24 + 24
    assert forecast.peak_bytes == forecast.final_bytes + 16 * MIB + 48
    described = json.loads(json.dumps(plan.to_json()))
    assert described["version"] == 1
    assert [group["name"] for group in described["groups"]] == [group.name for group in plan.groups]


def test_one_stored_tensor_that_fills_several_targets_is_one_group(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {"qkv": random_tensor((12, 4))})
    targets = Targets(Target(name, DType.F32, (4, 4)) for name in "qkv")
    adaptation = Adaptation([], [], [], [])
    for name, part in zip("qkv", stored(checkpoint.entries["qkv"]).split([4, 4, 4], 0), strict=True):
        adaptation.writes.extend(part.writes(name))
    (group,) = plan_of(checkpoint, targets, adaptation).groups
    assert group.targets == ("q", "k", "v")
    assert group.read_bytes == 192


def test_every_difference_is_in_one_error_with_near_names(tmp_path: Path) -> None:
    have = {
        "layers.0.attn.q_proj.weight": random_tensor((2, 2)),
        "layers.0.mlp.weight": random_tensor((3, 2)),
        "head.weight": random_tensor((2,), torch.int32),
    }
    want = {
        "layers.0.self_attn.q_proj.weight": random_tensor((2, 2)),
        "layers.0.mlp.weight": random_tensor((2, 3)),
        "head.weight": random_tensor((2,)),
        "norm.bias": random_tensor((2,)),
    }
    with pytest.raises(KeyMismatchError) as caught:
        plan_of(checkpoint_of(tmp_path, have), targets_like(want))
    error = caught.value
    assert error.missing == ("layers.0.self_attn.q_proj.weight", "norm.bias")
    assert error.unexpected == ("layers.0.attn.q_proj.weight",)
    assert error.near["layers.0.self_attn.q_proj.weight"] == ("layers.0.attn.q_proj.weight",)
    assert {str(mismatch) for mismatch in error.mismatched} == {
        "layers.0.mlp.weight: stored [3, 2], model has [2, 3]",
        "head.weight: stored I32, model has F32",
    }
    assert "allow_missing" in str(error)
    assert isinstance(error, ValueError)


def test_what_the_caller_allows_to_differ(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {"body": random_tensor((2,)), "old.x": random_tensor((2,))})
    targets = Targets([Target("body", DType.F32, (2,)), Target("head.w", DType.F32, (2,))])
    plan = make_plan(
        checkpoint,
        targets,
        by_name(checkpoint, targets),
        window_bytes=16 * MIB,
        allow_missing=["head.*"],
        allow_unexpected=["old.*"],
    )
    assert plan.left_to_owner == ("head.w",)
    assert plan.ignored == ("old.x",)
    assert [target.name for target in plan.filled] == ["body"]


@pytest.mark.parametrize(
    ("have", "want", "allowed"),
    [
        (torch.float16, torch.float32, True),
        (torch.float64, torch.bfloat16, True),
        (torch.complex64, torch.complex128, True),
        (torch.int32, torch.int64, False),
        (torch.int64, torch.float32, False),
        (torch.bool, torch.uint8, False),
        (torch.float32, torch.int32, False),
        (torch.float8_e4m3fn, torch.bfloat16, False),
        (torch.uint8, torch.float8_e8m0fnu, False),
    ],
)
def test_casts_that_change_only_precision(tmp_path: Path, have: torch.dtype, want: torch.dtype, allowed: bool) -> None:
    checkpoint = checkpoint_of(tmp_path, {"x": random_tensor((4,), have)})
    targets = Targets([Target("x", DType.from_torch(want), (4,))])
    if allowed:
        assert plan_of(checkpoint, targets).groups[0].route is Route.STREAMING
    else:
        with pytest.raises(KeyMismatchError, match="x: stored"):
            plan_of(checkpoint, targets)


def test_tied_names_share_a_target_and_a_double_is_not_read(tmp_path: Path) -> None:
    module = Holder({"embed.weight": torch.empty(3, 2), "norm": torch.empty(2)})
    module.head = torch.nn.Module()
    module.head.register_parameter("weight", module.get_parameter("embed.weight"))
    targets = targets_of(places_of(module), dtype=lambda _name, own: own, device=lambda _name, _own: "cpu")
    assert targets["head.weight"] is targets["embed.weight"]
    assert list(targets) == ["norm", "embed.weight"]
    weight, norm = random_tensor((3, 2)), random_tensor((2,))
    for names in (["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]):
        directory = tmp_path / "-".join(names)
        directory.mkdir()
        plan = plan_of(checkpoint_of(directory, {**dict.fromkeys(names, weight), "norm": norm}), targets)
        assert plan.forecast.read_bytes == plan.forecast.final_bytes == 32
        assert plan.ignored == tuple(names[1:])


def test_places_are_those_that_torch_lists_shared_ones_under_each_name() -> None:
    shared = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module = torch.nn.ModuleDict({"a": shared, "b": torch.nn.Sequential(torch.nn.Linear(2, 3, bias=False), shared)})
    module.register_module("absent", None)
    places = places_of(module)
    parameters = [(place.name, place.tensor) for place in places if not place.is_buffer]
    buffers = [(place.name, place.tensor) for place in places if place.is_buffer]
    assert parameters == list(module.named_parameters(remove_duplicate=False))
    assert buffers == list(module.named_buffers(remove_duplicate=False))
    assert all(place.siblings[place.leaf] is place.tensor for place in places)
    targets = targets_of(places, dtype=lambda _name, own: own, device=lambda _name, _own: "cpu")
    assert list(targets) == [name for name in module.state_dict() if not name.startswith("b.1.")]


def test_buffers_that_are_not_persistent_are_no_targets() -> None:
    module = torch.nn.BatchNorm1d(3)
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    targets = targets_of(places_of(module), dtype=lambda _name, own: own, device=lambda _name, _own: "cpu")
    assert set(targets) == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
    assert targets["running_mean"].is_buffer
    assert not targets["weight"].is_buffer


def test_a_conversion_that_fills_nothing_is_planned(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {"a": random_tensor((2,))})
    adaptation = Adaptation([], [Conversion("c", (checkpoint.entries["a"],), (), "its owner does")], [], [])
    (group,) = plan_of(checkpoint, Targets([]), adaptation).groups
    assert (group.route, group.targets) == (Route.MATERIALIZED, ())


def test_elements_left_out_by_an_adapter(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {"a": random_tensor((2, 3)), "b": random_tensor((2, 3))})
    parts = [stored(checkpoint.entries[name]) for name in "ab"]
    targets = Targets([Target("t", DType.F32, (5, 3))])
    adaptation = Adaptation(list(concatenate(parts, 0).writes("t")), [], [], [])
    with pytest.raises(CoverageError, match="left out"):
        plan_of(checkpoint, targets, adaptation)


def test_a_target_filled_by_writes_and_by_a_conversion(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, {"a": random_tensor((2,)), "b": random_tensor((2,))})
    targets = Targets([Target("a", DType.F32, (2,))])
    adaptation = Adaptation([], [Conversion("b", (checkpoint.entries["b"],), ("a",), "why")], [], [])
    adaptation.writes.extend(stored(checkpoint.entries["a"]).writes("a"))
    with pytest.raises(CoverageError, match="both fill it"):
        plan_of(checkpoint, targets, adaptation)


def test_two_hundred_thousand_entries_plan_without_torch_storage(tmp_path: Path) -> None:
    header = {
        f"layers.{i // 1000}.experts.{i % 1000}.w": {
            "dtype": "BF16",
            "shape": [1, 2],
            "data_offsets": [4 * i, 4 * i + 4],
        }
        for i in range(200_000)
    }
    raw = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(800_000))
    checkpoint = open_checkpoint(path)
    targets = Targets(Target(f"layers.{layer}.experts", DType.BF16, (1000, 1, 2)) for layer in range(200))
    adaptation = Adaptation([], [], [], [])
    for layer in range(200):
        parts = [stored(checkpoint.entries[f"layers.{layer}.experts.{expert}.w"]) for expert in range(1000)]
        adaptation.writes.extend(stack(parts, 0).writes(f"layers.{layer}.experts"))
    assert plan_of(checkpoint, targets, adaptation).forecast.final_bytes == 800_000
