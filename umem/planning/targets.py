"""Targets: what a model wants filled. Read off any `nn.Module` by its attributes; torch itself is not imported.

A target is one storage of the model. Names that share a parameter (tied weights) are one target with several names.
Buffers that are not persistent are no targets: their module makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

from umem._types import DType
from umem.errors import UnsupportedError

__all__ = ["DISK", "Target", "Targets", "targets_of_module"]

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


class _Module(Protocol):
    def named_modules(self, *, remove_duplicate: bool) -> Iterable[tuple[str, Any]]: ...


def targets_of_module(
    module: _Module, *, dtype: Callable[[str, DType], DType], device: Callable[[str, str], str]
) -> Targets:
    """The targets of `module`, in the order in which it lists them.

    Parameters
    ----------
    module
        A `torch.nn.Module`; its tensors may be on the meta device.
    dtype, device
        Given a name and what the module has there, the final dtype, and the device.

    Raises
    ------
    UnsupportedError
        A parameter is sharded (DTensor) or of another kind that is no plain storage.
    """
    found: dict[int, Target] = {}
    kept = []  # ids are unique only while their objects live
    for name, tensor, is_buffer in _named_tensors(module):
        if hasattr(tensor, "placements"):
            raise UnsupportedError(
                f"{name} is sharded over several devices (DTensor); load before distributing the model"
            )
        known = found.get(id(tensor))
        if known is not None:
            found[id(tensor)] = known._replace(aliases=(*known.aliases, name))
            continue
        kept.append(tensor)
        own_dtype = DType.from_torch(tensor.dtype)
        target = Target(name, dtype(name, own_dtype), tuple(tensor.shape), device(name, str(tensor.device)), is_buffer)
        found[id(tensor)] = target
    return Targets(found.values())


def _named_tensors(module: _Module) -> Iterator[tuple[str, Any, bool]]:
    """Every parameter and persistent buffer with its full name, shared ones under each of their names."""
    for prefix, submodule in module.named_modules(remove_duplicate=False):
        dotted = f"{prefix}." if prefix else ""
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                yield dotted + name, parameter, False
        for name, buffer in submodule._buffers.items():
            if buffer is not None and name not in submodule._non_persistent_buffers_set:
                yield dotted + name, buffer, True
