"""Puts final tensors into a module, and tells which of its tensors are live. The only place that changes a module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from umem.planning.targets import Targets

__all__ = ["install", "live_tensors", "unfillable_buffers"]


def live_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers that are not on the meta device, by the first name of each."""
    live: dict[int, tuple[str, torch.Tensor]] = {}
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        for name, tensor in _own_tensors(submodule):
            if not tensor.is_meta:
                live.setdefault(id(tensor), (f"{prefix}.{name}" if prefix else name, tensor))
    return dict(live.values())


def unfillable_buffers(module: torch.nn.Module) -> list[str]:
    """Buffers on the meta device that no checkpoint holds, because they are not persistent."""
    names = []
    for prefix, submodule in module.named_modules():
        for name in submodule._non_persistent_buffers_set:
            buffer = submodule._buffers.get(name)
            if buffer is not None and buffer.is_meta:
                names.append(f"{prefix}.{name}" if prefix else name)
    return names


def install(module: torch.nn.Module, targets: Targets, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set each tensor under every name of its target; parameters keep their `requires_grad`."""
    owners = dict(module.named_modules(remove_duplicate=False))
    for name, tensor in tensors.items():
        target = targets[name]
        places = [alias.rpartition(".") for alias in (target.name, *target.aliases)]
        if target.is_buffer:
            for path, _, leaf in places:
                owners[path]._buffers[leaf] = tensor
            continue
        path, _, leaf = places[0]
        former = owners[path]._parameters[leaf]
        wants_gradient = former is not None and former.requires_grad
        parameter = torch.nn.Parameter(tensor, requires_grad=wants_gradient and tensor.is_floating_point())
        for path, _, leaf in places:
            owners[path]._parameters[leaf] = parameter


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
