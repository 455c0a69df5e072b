"""Mutants: a layout operation with its order, dimension, offset or orientation changed is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.test_tracing import MOVES, compiled
from tests.writers import random_tensor, same_bytes
from umem.adapters import layout, tracing
from umem.adapters.layout import Layout, NotALayoutError
from umem.errors import CoverageError

Patch = Callable[[pytest.MonkeyPatch], None]


def method(name: str, changed: Callable[..., Layout]) -> Patch:
    real = getattr(Layout, name)
    return lambda patched: patched.setattr(Layout, name, lambda self, *a: changed(real, self, *a))


def function(name: str, changed: Callable[..., Layout]) -> Patch:
    real = getattr(layout, name)

    def apply(patched: pytest.MonkeyPatch) -> None:
        patched.setattr(tracing, name, lambda layouts, dim: changed(real, layouts, dim))

    return apply


def swapped(dims: Sequence[int]) -> list[int]:
    return [*dims[-1:], *dims[1:-1], *dims[:1]] if len(dims) > 1 else list(dims)


def half_turn(real: Any, self: Layout, dim: int, start: int, length: int, step: int = 1) -> Layout:
    """From the end instead of from the start."""
    result: Layout = real(self, dim, self.shape[dim] - start - (length - 1) * step - 1, length, step)
    return result


def unmoved(real: Any, self: Layout, order: Sequence[int]) -> Layout:
    """The shape of the permuted tensor over the order of the old one."""
    return self.reshape([self.shape[dim] for dim in order])


MUTANTS: dict[str, tuple[Patch, str]] = {
    "stack: sources in reverse": (function("stack", lambda real, ls, dim: real(list(ls)[::-1], dim)), "stack"),
    "stack: another dimension": (function("stack", lambda real, ls, dim: real(ls, len(ls[0].shape) - dim)), "stack"),
    "cat: sources in reverse": (function("concatenate", lambda real, ls, dim: real(list(ls)[::-1], dim)), "cat"),
    "cat: another dimension": (function("concatenate", lambda real, ls, dim: real(ls, 1 - dim)), "cat inner"),
    "narrow: from the other end": (method("narrow", half_turn), "chunk inner, uneven"),
    "narrow: one off": (
        method(
            "narrow", lambda real, s, dim, start, n, step=1: real(s, dim, (start + 1) % (s.shape[dim] - n + 1), n, step)
        ),
        "split",
    ),
    "narrow: another step": (
        method("narrow", lambda real, s, dim, start, n, step=1: real(s, dim, start, n, max(1, step - 1))),
        "slices",
    ),
    "select: the next": (
        method("select", lambda real, s, dim, index: real(s, dim, (index + 1) % s.shape[dim])),
        "select",
    ),
    "permute: elements stay": (method("permute", unmoved), "transpose"),
    "permute: another order": (method("permute", lambda real, s, order: real(s, swapped(order))), "permute of a stack"),
    "permute: elements stay when interleaving": (method("permute", unmoved), "interleave"),
    "permute: elements stay for rope": (method("permute", unmoved), "permute for rope"),
    "split: parts in reverse": (
        method("split", lambda real, s, sizes, dim: real(s, list(sizes)[::-1], dim)[::-1]),
        "chunk inner, uneven",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_changed_operation_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    patch, move = MUTANTS[mutant]
    tensors = [random_tensor((6, 8), torch.int16, seed) for seed in range(3)]
    expected = MOVES[move](tensors)
    assert same_bytes(compiled(tmp_path, tensors, MOVES[move]), expected)
    patch(monkeypatch)
    try:
        result = compiled(tmp_path, tensors, MOVES[move])
    except (CoverageError, NotALayoutError, ValueError, IndexError, RuntimeError):
        return
    assert not same_bytes(result, expected)


#: Moves that are written for a shape of their own.
OF_ANY_SHAPE = [name for name, (_, move) in MUTANTS.items() if "rope" not in move and "interleave" not in move]


@pytest.mark.parametrize("mutant", [name for name in OF_ANY_SHAPE if MUTANTS[name][1] not in ("split", "slices")])
def test_square_tensors_do_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    patch, move = MUTANTS[mutant]
    tensors = [random_tensor((6, 6), torch.int16, seed) for seed in range(6)]
    expected = MOVES[move](tensors)
    patch(monkeypatch)
    try:
        result = compiled(tmp_path, tensors, MOVES[move])
    except (CoverageError, NotALayoutError, ValueError, IndexError, RuntimeError):
        return
    assert not same_bytes(result, expected)
