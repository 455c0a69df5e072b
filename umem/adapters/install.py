"""Puts final tensors into a module, and tells which of its tensors are live. The only place that changes a module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from umem.planning.targets import Place, Targets

__all__ = ["install", "live_tensors", "unfillable_buffers"]


def live_tensors(places: Iterable[Place]) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers that are not on the meta device, by the first name of each."""
    live: dict[int, tuple[str, torch.Tensor]] = {}
    for place in places:
        if place.is_persistent and not place.tensor.is_meta:
            live.setdefault(id(place.tensor), (place.name, place.tensor))
    return dict(live.values())


def unfillable_buffers(places: Iterable[Place]) -> list[str]:
    """Buffers on the meta device that no checkpoint holds, since they are not persistent: the first name of each."""
    unfillable: dict[tuple[int, str], str] = {}
    for place in places:
        if not place.is_persistent and place.tensor.is_meta:
            unfillable.setdefault((id(place.siblings), place.leaf), place.name)
    return list(unfillable.values())


def install(places: Iterable[Place], targets: Targets, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set each tensor at every place of its target; parameters keep their `requires_grad`."""
    by_name = {place.name: place for place in places}
    for name, tensor in tensors.items():
        target = targets[name]
        value = tensor
        if not target.is_buffer:
            wants_gradient = by_name[target.name].tensor.requires_grad
            value = torch.nn.Parameter(tensor, wants_gradient and tensor.is_floating_point())
        for alias in (target.name, *target.aliases):
            place = by_name[alias]
            place.siblings[place.leaf] = value
