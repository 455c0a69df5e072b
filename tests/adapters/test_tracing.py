"""Traced tensors against torch: any chain of moves compiles to writes that give what torch gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.strategies.loads import run_writes
from tests.writers import random_tensor, same_bytes, same_numbers, write_safetensors
from umem._types import DType
from umem.adapters.layout import NotALayoutError, stored
from umem.adapters.tracing import TracedTensor
from umem.checkpoint import Checkpoint, open_checkpoint

Tensors = list[torch.Tensor]


def traced(checkpoint: Checkpoint) -> Tensors:
    return [
        TracedTensor(stored(entry), getattr(torch, str(entry.dtype.torch_name)))
        for entry in checkpoint.entries.values()
    ]


def compiled(directory: Path, tensors: Tensors, code: Callable[[Tensors], torch.Tensor]) -> torch.Tensor:
    """What umem loads for the result of `code`, which only sees traced tensors."""
    path = write_safetensors(directory / "m.safetensors", {f"t{i}": tensor for i, tensor in enumerate(tensors)})
    checkpoint = open_checkpoint(path)
    result = code(traced(checkpoint))
    assert isinstance(result, TracedTensor)
    writes = list(result.layout_of_elements.writes("out"))
    return run_writes(checkpoint, writes, {"out": (DType.from_torch(result.dtype), tuple(result.shape))})["out"]


MOVES: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "stack": torch.stack,
    "stack last": lambda t: torch.stack(t, dim=-1),
    "cat": lambda t: torch.cat(t, dim=0),
    "cat inner": lambda t: torch.cat(t, dim=1),
    "stack, cat": lambda t: torch.cat([torch.stack(t[:2]), torch.stack(t[1:])], dim=1),
    "transpose": lambda t: t[0].transpose(0, 1).contiguous(),
    "T": lambda t: t[0].T,
    "permute of a stack": lambda t: torch.stack(t).permute(2, 0, 1),
    "chunk": lambda t: torch.chunk(t[0], 3, dim=0)[1],
    "chunk inner, uneven": lambda t: torch.chunk(t[0], 3, dim=1)[-1].contiguous(),
    "split": lambda t: torch.split(t[1], [1, 4, 1])[1],
    "unbind": lambda t: torch.unbind(torch.stack(t), dim=1)[2],
    "interleave": lambda t: t[0].reshape(3, 2, 8).transpose(0, 1).reshape(6, 8),
    "interleave inner": lambda t: t[0].reshape(6, 4, 2).transpose(1, 2).reshape(6, 8),
    "permute for rope": lambda t: t[0].view(1, 3, 2, 8).transpose(1, 2).reshape(6, 8),
    "interleave, chunk": lambda t: torch.chunk(t[0].reshape(3, 2, 8).transpose(0, 1).reshape(6, 8), 2)[1],
    "interleave of a stack, chunk": lambda t: torch.chunk(
        torch.stack(t).reshape(3, 3, 2, 8).transpose(1, 2).reshape(3, 6, 8), 2, dim=1
    )[0],
    "flatten": lambda t: torch.stack(t).flatten(0, 1),
    "unflatten": lambda t: t[0].unflatten(0, (3, -1)),
    "slices": lambda t: t[0][1:5, ::2],
    "every third row": lambda t: t[0][::3],
    "select": lambda t: t[0][2],
    "negative index": lambda t: t[0][-1],
    "squeeze, unsqueeze": lambda t: t[0].unsqueeze(0).squeeze(0).unsqueeze(1),
    "narrow": lambda t: t[0].narrow(1, 2, 3),
    "clone, detach": lambda t: t[0].clone().detach(),
    "parameter's t": lambda t: t[0].t().contiguous().view(2, 4, 6),
    "messages": lambda t: torch.cat([t[0].unflatten(0, (-1, 2))[:, :1], t[1].unflatten(0, (-1, 2))], dim=1),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
def test_moves_compile_to_what_torch_gives(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    tensors = [random_tensor((6, 8), dtype, seed) for seed in range(3)]
    assert same_bytes(compiled(tmp_path, tensors, MOVES[name]), MOVES[name](tensors))


def step(draw: st.DrawFn) -> Callable[[torch.Tensor], torch.Tensor]:
    kind = draw(st.sampled_from(["transpose", "narrow", "chunk", "interleave", "flatten", "unsqueeze", "stride"]))
    pick = draw(st.floats(0, 0.999))

    def apply(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 or 0 in tensor.shape:
            return tensor
        dim = int(pick * tensor.ndim)
        size = tensor.shape[dim]
        if kind == "transpose":
            return tensor.transpose(dim, -1)
        if kind == "narrow":
            return tensor.narrow(dim, int(pick * size), max(1, size - int(pick * size) - 1))
        if kind == "chunk":
            return torch.chunk(tensor, 2, dim=dim)[-1]
        if kind == "interleave" and size % 2 == 0:
            shape = list(tensor.shape)
            shape[dim : dim + 1] = [size // 2, 2]
            return tensor.reshape(shape).transpose(dim, dim + 1).reshape(tensor.shape)
        if kind == "flatten":
            return tensor.flatten(0, dim)
        if kind == "stride":
            return tensor[::2]
        return tensor.unsqueeze(dim)

    return apply


@st.composite
def programs(draw: st.DrawFn) -> Callable[[Tensors], torch.Tensor]:
    """Some steps on each tensor, a join, some steps on the result."""
    before = [step(draw) for _ in range(draw(st.integers(0, 3)))]
    after = [step(draw) for _ in range(draw(st.integers(0, 4)))]
    join = draw(st.sampled_from(["stack", "cat", "first"]))
    dim = draw(st.integers(0, 1))

    def run(tensors: Tensors) -> torch.Tensor:
        for apply in before:
            tensors = [apply(tensor) for tensor in tensors]
        at = min(dim, max(0, tensors[0].ndim - 1))
        result = tensors[0]
        if join == "stack":
            result = torch.stack(tensors, dim=at)
        elif join == "cat" and tensors[0].ndim:
            result = torch.cat(tensors, dim=at)
        for apply in after:
            result = apply(result)
        return result

    return run


@st.composite
def programs_around_a_product(draw: st.DrawFn) -> Callable[[Tensors], torch.Tensor]:
    """Some steps on both tensors, their product, some steps on that."""
    before, after = ([step(draw) for _ in range(draw(st.integers(0, 3)))] for _ in range(2))
    small = draw(st.booleans())

    def run(tensors: Tensors) -> torch.Tensor:
        left, right = tensors
        for apply in before:
            left, right = apply(left), apply(right)
        result = left * (right[:1] if small and right.ndim else right)
        for apply in after:
            result = apply(result)
        return result

    return run


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs(), shape=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
def test_random_programs(tmp_path: Path, program: Callable[[Tensors], torch.Tensor], shape: list[int]) -> None:
    tensors = [random_tensor(shape, torch.int16, seed) for seed in range(2)]
    expected = program(tensors)
    try:
        result = compiled(tmp_path, tensors, program)
    except NotALayoutError:
        return  # refused is allowed, wrong is not; how often is bounded below
    assert same_bytes(result, expected.contiguous())


def blocks(t: Tensors) -> torch.Tensor:
    """A product with the first two columns of the other, each for a block of 2 x 4."""
    tiled = t[0].reshape(3, 2, 2, 4) * t[1][:3, :2].reshape(3, 1, 2, 1)
    return tiled.reshape(6, 8)


PRODUCTS: dict[str, Callable[[Tensors], torch.Tensor]] = {
    "item by item": lambda t: t[0] * t[1],
    "the larger second": lambda t: t[1][:, :1] * t[0],
    "a row": lambda t: t[0] * t[1][2],
    "a column": lambda t: t[0] * t[1][:, 3:4],
    "one number": lambda t: t[0] * t[1][2, 3],
    "transposed factor": lambda t: t[0][:, :6] * t[1][:, :6].t(),
    "transposed after": lambda t: (t[0] * t[1][:, :1]).t(),
    "blocks": blocks,
    "blocks, transposed": lambda t: blocks(t).t().contiguous(),
    "blocks, cut across": lambda t: blocks(t)[1:5, 3:],
    "blocks, every third row": lambda t: blocks(t)[::3],
    "blocks, interleaved": lambda t: blocks(t).reshape(3, 2, 8).transpose(0, 1).reshape(6, 8),
    "blocks of a stack": lambda t: torch.stack([blocks(t), blocks(t[::-1])], dim=1).flatten(0, 1),
    "beside what is no product": lambda t: torch.cat([t[2], t[0] * t[1]], dim=1),
    "in higher precision": lambda t: (t[0].double() * t[1].double()).float(),
    "of casts": lambda t: t[0].half() * t[1].half(),
    "rounded": lambda t: (t[0] * t[1]).bfloat16(),
    "a part of a join": lambda t: torch.cat([t[0], t[2]]) * t[1][:1],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products(tmp_path: Path, name: str) -> None:
    tensors = [random_tensor((6, 8), torch.float32, seed) for seed in range(3)]
    expected = PRODUCTS[name](tensors)
    assert same_numbers(compiled(tmp_path, tensors, PRODUCTS[name]), expected.contiguous())


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=programs_around_a_product(), shape=st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=3))
def test_random_products(tmp_path: Path, program: Callable[[Tensors], torch.Tensor], shape: list[int]) -> None:
    tensors = [random_tensor(shape, torch.float32, seed) for seed in range(2)]
    expected = program(tensors)
    try:
        result = compiled(tmp_path, tensors, program)
    except NotALayoutError:
        return
    assert same_numbers(result, expected.contiguous())


def in_half(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, TracedTensor)
    return TracedTensor(tensor.layout_of_elements, torch.float16)


NO_MOVES: dict[str, Callable[[Tensors], Any]] = {
    "arithmetic": lambda t: t[0] * 2,
    "a product of three": lambda t: (t[0] * t[1]) * t[0],
    "a product of a product and a part": lambda t: t[0] * (t[1] * t[0])[:1],
    "products of the sum": lambda t: t[0] * t[1] + t[0],
    "a product of two joins": lambda t: torch.cat([t[0], t[1]]) * torch.cat([t[1], t[0]]),
    "a cast to whole numbers": lambda t: t[0].to(torch.int32),
    "two casts that round": lambda t: t[0].to(torch.float16).to(torch.bfloat16),
    "a cast of a rounded product": lambda t: (t[0] * t[1]).to(torch.float16).to(torch.float32),
    "a value": lambda t: t[0].sum().item(),
    "a flip": lambda t: t[0].flip(0),
    "padding": lambda t: torch.cat([t[0], torch.zeros(2, 8)]),
    "a copy into new memory": lambda t: torch.empty(6, 8).copy_(t[0]),
    "a gather": lambda t: t[0][torch.tensor([1, 0])],
    "a comparison": lambda t: bool((t[0] == t[1]).all()),
    "mixed dtypes": lambda t: torch.cat([t[0], in_half(t[1])]),
}


@pytest.mark.parametrize("name", NO_MOVES)
def test_what_is_no_move_is_noticed(tmp_path: Path, name: str) -> None:
    tensors = {f"t{seed}": random_tensor((6, 8), torch.float32, seed) for seed in range(2)}
    checkpoint = open_checkpoint(write_safetensors(tmp_path / "m.safetensors", tensors))
    with pytest.raises(NotALayoutError):
        NO_MOVES[name](traced(checkpoint))


def test_packed_numbers_are_not_cast_as_if_each_had_an_item(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"t": random_tensor((6, 8), torch.uint8)})
    entry = open_checkpoint(path).entries["t"]._replace(dtype=DType.F4)
    with pytest.raises(NotALayoutError, match="a cast from"):
        TracedTensor(stored(entry), torch.float4_e2m1fn_x2).to(torch.float32)


def test_shapes_that_do_not_fit_are_the_usual_errors(tmp_path: Path) -> None:
    tensors = {"a": random_tensor((6, 8)), "b": random_tensor((4, 7))}
    a, b = traced(open_checkpoint(write_safetensors(tmp_path / "m.safetensors", tensors)))
    programs: list[Callable[[], torch.Tensor]] = [
        lambda: torch.stack([a, b]),
        lambda: torch.cat([a, b]),
        lambda: a.reshape(5, 5),
    ]
    for code in programs:
        with pytest.raises((ValueError, RuntimeError)):
            code()
