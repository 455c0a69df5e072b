"""Targets: what a model wants filled. Read off any `nn.Module` by its attributes; torch itself is not imported.

A target is one storage of the model. Names that share a parameter (tied weights) are one target with several names.
Buffers that are not persistent are no targets: their module makes them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from umem._types import DType
from umem.errors import UnsupportedError

__all__ = ["DISK", "Place", "Target", "Targets", "places_of", "targets_of"]

#: The place of a target that lies in a file and is read from there whenever it is used.
DISK = "disk"


class Target(NamedTuple):
    """One parameter or persistent buffer to be filled.

    Attributes
    ----------
    name
        The name under which the model lists it first.
    dtype, shape
        Its final dtype, and its shape in storage items.
    device
        Where it will live, as torch writes it (`cpu`, `cuda:0`), or `disk`.
    is_buffer
        Whether it is a buffer rather than a parameter.
    aliases
        Further names of the same storage.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    device: str = "cpu"
    is_buffer: bool = False
    aliases: tuple[str, ...] = ()

    @property
    def items(self) -> int:
        """The number of storage items."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its storage."""
        return prod(self.shape) * self.dtype.itemsize


class Targets(Mapping[str, Target]):
    """Targets by every name that they have; iteration gives each target's first name once."""

    def __init__(self, targets: Iterable[Target]) -> None:
        self._targets = {target.name: target for target in targets}
        self._names = {name: target for target in self._targets.values() for name in (target.name, *target.aliases)}

    def __getitem__(self, name: str) -> Target:
        return self._names[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)

    def with_names(self, names: Iterable[str]) -> dict[str, Target]:
        """The targets that have any of these names, each once, by first name. `KeyError` for a name of none."""
        named = (self._names[name] for name in names)
        return {target.name: target for target in named}


class Place(NamedTuple):
    """Where a module keeps a tensor.

    Attributes
    ----------
    name
        The tensor's full name.
    siblings, leaf
        The mapping of its submodule that holds it, and its key there.
    tensor
        The tensor.
    is_buffer, is_persistent
        Whether it is a buffer, and one that checkpoints hold; all parameters are.
    """

    name: str
    siblings: dict[str, Any]
    leaf: str
    tensor: Any
    is_buffer: bool
    is_persistent: bool


def places_of(module: Any) -> list[Place]:
    """Every place of a `torch.nn.Module` that holds a tensor, in its order; what is shared comes under every name."""
    places: list[Place] = []
    _collect_places(module, "", places)
    return places


def _collect_places(module: Any, prefix: str, places: list[Place]) -> None:
    parameters, buffers = module._parameters, module._buffers
    for leaf, parameter in parameters.items():
        if parameter is not None:
            places.append(Place(prefix + leaf, parameters, leaf, parameter, is_buffer=False, is_persistent=True))
    for leaf, buffer in buffers.items():
        if buffer is not None:
            is_persistent = leaf not in module._non_persistent_buffers_set
            places.append(Place(prefix + leaf, buffers, leaf, buffer, is_buffer=True, is_persistent=is_persistent))
    for name, child in module._modules.items():
        if child is not None:
            _collect_places(child, f"{prefix}{name}.", places)


def targets_of(
    places: Iterable[Place], *, dtype: Callable[[str, DType], DType], device: Callable[[str, str], str]
) -> Targets:
    """The targets of a module, in the order in which it lists them.

    Parameters
    ----------
    places
        The module's; its tensors may be on the meta device.
    dtype, device
        Given a name and what the module has there, the final dtype, and the device.

    Raises
    ------
    UnsupportedError
        A parameter is sharded (DTensor) or of another kind that is no plain storage.
    """
    found: dict[int, Target] = {}  # by id: the places keep the tensors alive
    stored_dtype, name_of_device = functools.cache(DType.from_torch), functools.cache(str)
    for name, _, _, tensor, is_buffer, is_persistent in places:
        if not is_persistent:
            continue
        if hasattr(tensor, "placements"):
            raise UnsupportedError(
                f"{name} is sharded over several devices (DTensor); load before distributing the model"
            )
        known = found.get(id(tensor))
        if known is not None:
            found[id(tensor)] = known._replace(aliases=(*known.aliases, name))
            continue
        final_dtype = dtype(name, stored_dtype(tensor.dtype))
        final_device = device(name, name_of_device(tensor.device))
        found[id(tensor)] = Target(name, final_dtype, tuple(tensor.shape), final_device, is_buffer)
    return Targets(found.values())
