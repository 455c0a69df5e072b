"""transformers' weight converters, compiled to layouts by running their operations on traced tensors.

Layers are alike, so most converters do the same thing many times over. Where every operation is one that the library
itself defines, and so depends only on shapes, dtypes and the config, the first result serves for all slots of one kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import core_model_loading as library

from umem._types import DType
from umem.adapters.hosts.transformers.quantized import take_declared_blocks
from umem.adapters.layout import Layout, NotALayoutError, Piece, stored
from umem.adapters.tracing import TracedTensor
from umem.checkpoint.entries import Entry
from umem.strategies.storage import torch_dtype

__all__ = ["ConversionMismatchError", "ConverterCompiler", "Slot", "orientation_is_open"]

#: A result of a converter: the parameter's name, where its elements come from, its dtype.
Result = tuple[str, Layout, DType]


class ConversionMismatchError(Exception):
    """The stored tensors do not have the shapes that the converter needs."""


@dataclass(slots=True)
class Slot:
    """All that fills one parameter (or, for converters with several results, the parameters that start with it).

    Attributes
    ----------
    name
        The parameter's name in the model.
    transform
        The library's converter, as declared and not used up by compiling; None where the name alone changes.
    sources
        Source pattern -> stored tensors in the library's order, each with the dtype that it is cast to first (None: as
        stored).
    quantization
        The quantizer's operation on the result, if any.
    """

    name: str
    transform: Any
    sources: dict[str, list[tuple[Entry, torch.dtype | None]]] = field(default_factory=dict)
    quantization: Any = None

    @property
    def is_converter(self) -> bool:
        """Whether operations run on the tensors."""
        return self.transform is not None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every stored tensor, in the library's order."""
        return tuple(entry for sources in self.sources.values() for entry, _ in sources)

    @property
    def targets(self) -> list[str]:
        """The parameters that it fills, in the order of the converter's target patterns."""
        if self.transform is None:
            return [self.name]
        patterns = self.transform.target_patterns
        return [self.name.replace(patterns[0], pattern) for pattern in patterns]

    def filled_transform(self, tensor_of: Callable[[Entry, torch.dtype | None], Any]) -> Any:
        """A fresh transform that holds a tensor for each source, ready to convert."""
        if self.transform is None:
            transform = library.WeightRenaming(next(iter(self.sources)), self.name)
        else:
            transform = deepcopy(self.transform)
        transform.quantization_operation = self.quantization
        for pattern, sources in self.sources.items():
            for entry, dtype in sources:
                transform.add_tensor(self.name, entry.name, pattern, tensor_of(entry, dtype))
        return transform


class ConverterCompiler:
    """Compiles the converters of one model."""

    def __init__(self, model: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        self._model, self._parameters = model, parameters
        self._known: dict[object, list[Result]] = {}
        self._refused: dict[object, str] = {}

    def compiled(self, slot: Slot) -> list[Result]:
        """What the slot's converter gives.

        Raises
        ------
        NotALayoutError
            It does more than move elements.
        ConversionMismatchError
            The stored tensors do not fit it.
        """
        kind = self._kind(slot)
        if kind is None:
            return self._traced(slot)
        if kind in self._refused:
            raise NotALayoutError(self._refused[kind])
        if kind in self._known:
            return self._follow(slot, self._known[kind])
        try:
            results = self._traced(slot)
        except NotALayoutError as error:
            self._refused[kind] = str(error)
            raise
        if [name for name, _, _ in results] == slot.targets:
            self._known[kind] = self._with_positions(slot, results)
        return results

    def _traced(self, slot: Slot) -> list[Result]:
        transform = slot.filled_transform(
            lambda entry, dtype: TracedTensor(stored(entry), dtype or torch_dtype(entry.dtype))
        )
        take_declared_blocks(transform.operations)
        try:
            given = transform.convert(slot.name, model=self._model, config=self._model.config)
        except (ValueError, IndexError) as error:
            raise ConversionMismatchError(str(error)) from error
        except (TypeError, AttributeError, RuntimeError) as error:
            raise NotALayoutError(f"{type(error).__name__}: {error}") from error
        results = []
        for name, value in given.items():
            tensor = value[0] if isinstance(value, list) else value
            if not isinstance(tensor, TracedTensor):
                raise NotALayoutError("it makes tensors of its own")
            results.append((name, tensor.layout_of_elements, DType.from_torch(tensor.dtype)))
        return results

    def _kind(self, slot: Slot) -> object:
        """What the result depends on; None where an operation is not the library's and may depend on anything."""
        if any(type(op).__module__.partition(".")[0] != "transformers" for op in slot.transform.operations):
            return None
        sources = tuple(
            (pattern, tuple((entry.shape, entry.strides, entry.dtype, dtype) for entry, dtype in sources))
            for pattern, sources in slot.sources.items()
        )
        fills = tuple(_kind_of_parameter(self._parameters.get(name)) for name in slot.targets)
        return id(slot.transform), sources, fills

    def _with_positions(self, slot: Slot, results: list[Result]) -> list[Result]:
        """The results with each entry's position among the slot's in place of its name."""
        positions = {entry.name: str(position) for position, entry in enumerate(slot.entries)}
        placed = []
        for name, layout, dtype in results:
            pieces = tuple(_with_entries(piece, lambda entry: _named(entry, positions)) for piece in layout.pieces)
            placed.append((name, Layout(layout.shape, pieces), dtype))
        return placed

    def _follow(self, slot: Slot, known: list[Result]) -> list[Result]:
        """The results of another slot of the same kind, with this slot's entries."""
        entries = slot.entries
        results = []
        for name, (_, layout, dtype) in zip(slot.targets, known, strict=True):
            pieces = tuple(_with_entries(piece, lambda at: entries[int(at.name)]) for piece in layout.pieces)
            results.append((name, Layout(layout.shape, pieces), dtype))
        return results


def _named(entry: Entry, names: Mapping[str, str]) -> Entry:
    return entry._replace(name=names[entry.name])


def _with_entries(piece: Piece, other: Callable[[Entry], Entry]) -> Piece:
    factor = None if piece.factor is None else piece.factor._replace(entry=other(piece.factor.entry))
    return piece._replace(entry=other(piece.entry), factor=factor)


def _kind_of_parameter(parameter: torch.Tensor | None) -> object:
    return None if parameter is None else (parameter.shape, parameter.dtype)


def orientation_is_open(slot: Slot) -> bool:
    """Whether the library decides a transposition by shapes (`check_dims`) that are the same either way."""
    decides = [op for op in slot.transform.operations if isinstance(op, library.Transpose) and op.check_dims]
    return any(entry.shape[op.dim0] == entry.shape[op.dim1] for op in decides for entry in slot.entries)
