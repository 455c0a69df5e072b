"""Residency: whether the final tensors own their memory, are the file's own pages, mapped, or stay in the file.

A mapped model is there at once and takes no memory of its own: a page is read when it is first used, and the kernel may
drop it again. It needs every tensor to be stored as it is used, on the processor. What is decided here is which are;
the mapping itself is `strategies.mapped`. A target on disk that is stored as it is used need not move at all: whoever
uses it reads the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from umem._types import format_bytes
from umem.checkpoint.entries import Checkpoint
from umem.errors import UnsupportedError
from umem.planning.targets import DISK, Target, Targets
from umem.planning.views import View
from umem.planning.writes import Group, Route, Write

__all__ = ["as_kept", "as_mapped", "is_stored_as_used"]

_SHOWN = 3


def as_mapped(
    groups: Collection[Group], checkpoint: Checkpoint, targets: Targets, live: Collection[str]
) -> tuple[Group, ...]:
    """The groups, each on the mapped route.

    Raises
    ------
    UnsupportedError
        A tensor cannot be the file's own pages; the message says which and why.
    """
    obstacles: dict[str, str] = {}
    for group in groups:
        remote = checkpoint.shards[group.entries[0].shard].is_remote
        obstacle = "it lies behind a URL" if remote else _obstacle(group, targets, live)
        if obstacle:
            obstacles[group.name] = obstacle
    if obstacles:
        raise UnsupportedError(_refusal(obstacles, groups))
    return tuple(group._replace(route=Route.MAPPED, reason="the file's own pages") for group in groups)


def as_kept(groups: Collection[Group], checkpoint: Checkpoint, targets: Targets) -> tuple[Group, ...]:
    """The groups; those whose target on disk can be read from the checkpoint as it is are on the kept route."""
    return tuple(
        group._replace(route=Route.KEPT, reason="stays in the checkpoint's file")
        if _stays_in_file(group, checkpoint, targets)
        else group
        for group in groups
    )


def is_stored_as_used(group: Group, target: Target) -> bool:
    """Whether a target that the group writes to is one piece of the file, as it lies there and aligned."""
    return group.route is Route.DIRECT and len(group.writes) == 1 and _layout_obstacle(group.writes[0], target) is None


def _stays_in_file(group: Group, checkpoint: Checkpoint, targets: Targets) -> bool:
    if group.route is not Route.DIRECT:  # conversions may have no targets
        return False
    target = targets[group.targets[0]]
    if target.device != DISK or not is_stored_as_used(group, target):
        return False
    shard = checkpoint.shards[group.entries[0].shard]
    return not shard.is_remote and shard.path.endswith(".safetensors")


def _obstacle(group: Group, targets: Targets, live: Collection[str]) -> str | None:
    if group.route is not Route.DIRECT:
        return group.reason
    if len(group.writes) != 1:
        return "it fills several tensors"
    write = group.writes[0]
    target = targets[write.target]
    if target.name in live:
        return "it is there already, in memory of its own"
    if target.device.partition(":")[0] != "cpu":
        return f"it goes to {target.device}"
    return _layout_obstacle(write, target)


def _layout_obstacle(write: Write, target: Target) -> str | None:
    itemsize = write.entry.dtype.itemsize
    if not write.source.runs_row_major() or write.destination != View.whole(target.shape):
        return "it is stored in another layout than the model's"
    if write.source.items * itemsize != write.entry.nbytes:
        return "the model takes only a part of it"
    if write.entry.nbytes and write.entry.start % itemsize:
        return f"it lies at byte {write.entry.start} of its file, which is no multiple of its items' {itemsize}"
    return None


def _refusal(obstacles: Mapping[str, str], groups: Iterable[Group]) -> str:
    refused_bytes = sum(group.read_bytes for group in groups if group.name in obstacles)
    shown = "; ".join(f"{name}: {why}" for name, why in list(obstacles.items())[:_SHOWN])
    more = f"; and {len(obstacles) - _SHOWN} more" if len(obstacles) > _SHOWN else ""
    return (
        f"the model cannot stay mapped: {len(obstacles)} of its tensors ({format_bytes(refused_bytes)}) are not stored"
        f" as they are used ({shown}{more}); use residency='owned'"
    )
