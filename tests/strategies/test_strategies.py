"""The contract of strategies: each route gives what torch gives on whole tensors, for every dtype that it serves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.strategies.loads import Spec, plan_writes, run_plan, run_writes
from tests.writers import random_tensor, same_bytes, same_numbers, write_safetensors
from umem._types import DType
from umem.adapters.layout import Layout, concatenate, stack, stored
from umem.checkpoint import Checkpoint, open_checkpoint
from umem.errors import IncompleteConversionError
from umem.planning import Conversion, Route, Write
from umem.strategies.registry import BLOCK_STRATEGIES, GROUP_STRATEGIES

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES = [
    *FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip
CASTS = [(stored, final) for stored in FLOATS for final in FLOATS if stored is not final]
PLACES = ["whole", "stacked", "concatenated", "transposed", "interleaved"]


def placed(parts: list[Layout], place: str) -> Layout:
    if place == "stacked":
        return stack(parts, 0)
    if place == "concatenated":
        return concatenate(parts, 1)
    first = parts[0]
    if place == "transposed":
        return first.transpose(0, 1)
    if place == "interleaved":
        return first.reshape((first.shape[0], first.shape[1] // 2, 2)).transpose(1, 2).reshape(first.shape)
    return first


def expected(tensors: list[torch.Tensor], place: str) -> torch.Tensor:
    first = tensors[0]
    if place == "stacked":
        return torch.stack(tensors)
    if place == "concatenated":
        return torch.cat(tensors, dim=1)
    if place == "transposed":
        return first.t().contiguous()
    if place == "interleaved":
        return first.reshape(first.shape[0], -1, 2).transpose(1, 2).reshape(first.shape)
    return first


def loaded(
    directory: Path, tensors: list[torch.Tensor], place: str, final: torch.dtype, block_bytes: int
) -> torch.Tensor:
    named = {f"t{i}": tensor for i, tensor in enumerate(tensors)}
    checkpoint = open_checkpoint(write_safetensors(directory / "m.safetensors", named, padding=3))
    layout = placed([stored(entry) for entry in checkpoint.entries.values()], place)
    spec = DType.from_torch(final), layout.shape
    return run_writes(checkpoint, list(layout.writes("out")), {"out": spec}, block_bytes=block_bytes)["out"]


@pytest.mark.parametrize("block_bytes", [64, 1000, 1 << 20])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_direct_moves_bytes_unchanged(tmp_path: Path, dtype: torch.dtype, place: str, block_bytes: int) -> None:
    tensors = [random_tensor((14, 6), dtype, seed) for seed in range(3 if place in ("stacked", "concatenated") else 1)]
    result = loaded(tmp_path, tensors, place, dtype, block_bytes)
    assert result.is_contiguous()
    assert same_bytes(result, expected(tensors, place))


@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("dtype", "final"), CASTS, ids=str)
def test_streaming_casts_as_torch_does(
    tmp_path: Path, dtype: torch.dtype, final: torch.dtype, place: str, block_bytes: int
) -> None:
    tensors = [random_tensor((14, 6), dtype, seed) for seed in range(3 if place in ("stacked", "concatenated") else 1)]
    result = loaded(tmp_path, tensors, place, final, block_bytes)
    assert same_numbers(result, expected([tensor.to(final) for tensor in tensors], place))


def conversion_plan(
    directory: Path, tensors: Mapping[str, torch.Tensor], targets: Mapping[str, Spec]
) -> tuple[Checkpoint, Conversion]:
    checkpoint = open_checkpoint(write_safetensors(directory / "m.safetensors", tensors))
    entries = tuple(checkpoint.entries.values())
    return checkpoint, Conversion("scaled", entries, tuple(targets), "Scale: no move of elements")


def test_materialized_gives_the_owner_whole_tensors(tmp_path: Path) -> None:
    tensors = {"w": random_tensor((300, 7), torch.int32), "s": random_tensor((300,), torch.int32, 1)}
    specs: dict[str, Spec] = {"out": (DType.I32, (300, 7))}
    checkpoint, conversion = conversion_plan(tmp_path, tensors, specs)
    plan = plan_writes(checkpoint, [], specs, [conversion])

    def convert(name: str, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert name == "scaled"
        assert all(same_bytes(given[key], tensors[key]) for key in tensors)
        return {"out": given["w"] * given["s"][:, None]}

    outcome = run_plan(plan, convert=convert, block_bytes=1000)
    assert same_bytes(outcome.tensors["out"], tensors["w"] * tensors["s"][:, None])
    assert outcome.window_peak_bytes >= plan.groups[0].scratch_bytes


def test_materialized_fills_live_tensors_in_place(tmp_path: Path) -> None:
    tensors = {"w": random_tensor((5, 7))}
    specs: dict[str, Spec] = {"out": (DType.F32, (7, 5))}
    checkpoint, conversion = conversion_plan(tmp_path, tensors, specs)
    live = torch.zeros(7, 5)
    plan = plan_writes(checkpoint, [], specs, [conversion])
    run_plan(plan, live={"out": live}, convert=lambda _name, given: {"out": given["w"].t()})
    assert same_bytes(live, tensors["w"].t())


def test_a_conversion_larger_than_the_window(tmp_path: Path) -> None:
    tensors = {"w": random_tensor((5 << 20,), torch.int32)}
    specs: dict[str, Spec] = {"out": (DType.I32, (5 << 20,))}
    checkpoint, conversion = conversion_plan(tmp_path, tensors, specs)
    plan = plan_writes(checkpoint, [], specs, [conversion])
    assert plan.groups[0].scratch_bytes > plan.forecast.window_bytes
    outcome = run_plan(plan, convert=lambda _name, given: {"out": given["w"] + 1})
    assert torch.equal(outcome.tensors["out"], tensors["w"] + 1)


@pytest.mark.parametrize("given", [{}, {"out": torch.zeros(3)}], ids=["nothing", "another shape"])
def test_a_conversion_that_breaks_its_promise(tmp_path: Path, given: dict[str, torch.Tensor]) -> None:
    specs: dict[str, Spec] = {"out": (DType.F32, (5, 7))}
    checkpoint, conversion = conversion_plan(tmp_path, {"w": random_tensor((5, 7))}, specs)
    plan = plan_writes(checkpoint, [], specs, [conversion])
    with pytest.raises(IncompleteConversionError) as caught:
        run_plan(plan, live={"out": torch.zeros(5, 7)}, convert=lambda _n, _t: given)
    assert (caught.value.conversion, caught.value.targets) == ("scaled", ("out",))


def test_every_route_that_moves_bytes_has_one_strategy() -> None:
    assert {*BLOCK_STRATEGIES, *GROUP_STRATEGIES, Route.MAPPED, Route.KEPT} == set(Route)
    assert all(strategy.route is route for route, strategy in BLOCK_STRATEGIES.items())
    assert all(strategy.route is route for route, strategy in GROUP_STRATEGIES.items())


def test_parts_of_one_tensor_go_to_several_targets(tmp_path: Path) -> None:
    qkv = random_tensor((12, 5), torch.float16)
    checkpoint = open_checkpoint(write_safetensors(tmp_path / "m.safetensors", {"qkv": qkv}))
    parts = stored(checkpoint.entries["qkv"]).split([6, 3, 3], 0)
    writes: list[Write] = [write for name, part in zip("qkv", parts, strict=True) for write in part.writes(name)]
    specs = {"q": (DType.F16, (6, 5)), "k": (DType.F16, (3, 5)), "v": (DType.F16, (3, 5))}
    result = run_writes(checkpoint, writes, specs, block_bytes=70)
    assert all(same_bytes(result[name], part) for name, part in zip("qkv", qkv.split([6, 3, 3]), strict=True))
