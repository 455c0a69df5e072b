"""Small loads for tests: a checkpoint, writes and targets in, tensors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from umem._types import DType
from umem.checkpoint import Checkpoint
from umem.checkpoint.readers import READERS
from umem.planning import Adaptation, Conversion, LoadPlan, Target, Targets, Write, make_plan
from umem.strategies import Execution, Outcome, execute

MIB = 1 << 20

Spec = tuple[DType, tuple[int, ...]]


def execution(**changes: Any) -> Execution:
    """Two threads, small blocks."""
    reader = changes.pop("reader", READERS["buffered"])
    facts: dict[str, Any] = {"window_bytes": 16 * MIB, "block_bytes": MIB, "threads": 2, "readers": [reader] * 9}
    return Execution(**facts | changes)


def plan_writes(
    checkpoint: Checkpoint, writes: Sequence[Write], specs: Mapping[str, Spec], conversions: Sequence[Conversion] = ()
) -> LoadPlan:
    """The plan of these writes and conversions into targets of these dtypes and shapes."""
    targets = Targets(Target(name, dtype, shape) for name, (dtype, shape) in specs.items())
    return make_plan(checkpoint, targets, Adaptation(list(writes), list(conversions), [], []), window_bytes=16 * MIB)


def run_writes(
    checkpoint: Checkpoint, writes: Sequence[Write], specs: Mapping[str, Spec], **changes: Any
) -> dict[str, torch.Tensor]:
    """Plan, prove and run."""
    return run_plan(plan_writes(checkpoint, writes, specs), **changes).tensors


def run_plan(plan: LoadPlan, *, live: Mapping[str, torch.Tensor] | None = None, **changes: Any) -> Outcome:
    """Run a plan."""
    return execute(plan, execution(**changes), live=live)
