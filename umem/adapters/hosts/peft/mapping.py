"""Which stored tensor of an adapter fills which tensor of the model: learned by running peft's own loading on shapes.

Names are peft's business (adapter names, wrappers, old formats, the per-expert layouts of models whose experts are now
one parameter). Its code runs on tensors that have a shape and know where they come from; what reaches
`load_state_dict` is the mapping. Results that only move elements become views; others (block diagonals) are made by the
same code when the tensors are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from peft import set_peft_model_state_dict
from peft.utils.other import AuxiliaryTrainingWrapper
from torch.utils._pytree import tree_leaves, tree_map

from umem.adapters.layout import Layout, NotALayoutError, stored
from umem.adapters.tracing import TracedTensor
from umem.checkpoint import Checkpoint, Entry
from umem.errors import UnsupportedError
from umem.planning import Targets
from umem.planning.writes import Adaptation, Conversion, Write
from umem.strategies.storage import torch_dtype

__all__ = ["AdapterMapping", "Part", "map_adapter", "peft_names"]

_FAILURES = (KeyError, ValueError, IndexError, TypeError, AttributeError, RuntimeError, NotImplementedError)


class Part(NamedTuple):
    """Tensors of a model that peft makes together.

    Attributes
    ----------
    sources
        The stored tensors that it makes them of.
    results
        Name in the injected model -> name of the target.
    """

    sources: tuple[str, ...]
    results: dict[str, str]


@dataclass(slots=True)
class AdapterMapping:
    """What fills the model.

    Attributes
    ----------
    writes, conversions, mismatched, unexpected, ignored
        As in `Adaptation`.
    parts
        What peft's code has to make from whole tensors, by the name of its conversion.
    """

    writes: list[Write] = field(default_factory=list)
    conversions: list[Conversion] = field(default_factory=list)
    mismatched: list[tuple[str, str, str]] = field(default_factory=list)
    unexpected: set[str] = field(default_factory=set)
    ignored: set[str] = field(default_factory=set)
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def adaptation(self) -> Adaptation:
        """As planning takes it."""
        unexpected, ignored = sorted(self.unexpected), tuple(sorted(self.ignored))
        return Adaptation(self.writes, self.conversions, unexpected, self.mismatched, ignored=ignored)

    @property
    def mentioned(self) -> set[str]:
        """Every target that the stored tensors have to do with."""
        names = {write.target for write in self.writes}
        names |= {name for conversion in self.conversions for name in conversion.targets}
        return names | {name for name, _, _ in self.mismatched}


def peft_names(
    peft_model: Any, adapter_name: str, tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
    """What peft would hand to `load_state_dict` for these stored tensors, and which of it stands for a missing one.

    Raises
    ------
    UnsupportedError
        peft cannot bring the stored tensors into the form of the model.
    """
    received: dict[str, torch.Tensor] = {}

    def receive(state: Mapping[str, torch.Tensor], **_options: Any) -> Any:
        received.update(state)
        return torch.nn.modules.module._IncompatibleKeys([], [])

    stand_ins = {name: torch.empty(0, device="meta") for name in _wrapper_names(peft_model, adapter_name, tensors)}
    peft_model.__dict__["load_state_dict"] = receive
    try:
        set_peft_model_state_dict(peft_model, {**tensors, **stand_ins}, adapter_name=adapter_name)
    except NotALayoutError:
        raise
    except _FAILURES as error:
        raise UnsupportedError(
            f"peft cannot bring the stored tensors of this adapter into the form of the model:"
            f" {type(error).__name__}: {error}"
        ) from error
    finally:
        del peft_model.__dict__["load_state_dict"]
    missing = frozenset(name for name, tensor in received.items() if any(tensor is one for one in stand_ins.values()))
    return received, missing


def _wrapper_names(peft_model: Any, adapter_name: str, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Stored names that peft takes for granted (`modules_to_save`, trainable tokens) and that are not there."""
    return [
        f"{name}.{key}"
        for name, module in peft_model.named_modules()
        if isinstance(module, AuxiliaryTrainingWrapper)
        for key in module.adapter_state_dict_load_map(adapter_name)
        if f"{name}.{key}" not in tensors
    ]


def map_adapter(
    peft_model: Any, adapter_name: str, checkpoint: Checkpoint, targets: Targets, names: Mapping[str, str]
) -> AdapterMapping:
    """Find what fills each tensor of the injected adapter, and each base weight that the file brings along.

    Parameters
    ----------
    targets
        Everything that may be filled.
    names
        Name in the injected model -> name of its target, where they differ.

    Raises
    ------
    UnsupportedError
        As for `peft_names`.
    """
    entries = checkpoint.entries
    tagged = {name: _Tagged.of(entry) for name, entry in entries.items()}
    received, missing = peft_names(peft_model, adapter_name, tagged)
    mapping = AdapterMapping()
    outdone = _outdone(received, names)
    made: dict[str, frozenset[str]] = {}
    for name, tensor in received.items():
        if name in missing:
            continue
        target = names.get(name, name)
        origin: frozenset[str] = getattr(tensor, "origin", frozenset())
        if target not in targets:
            mapping.unexpected.update(origin)
        elif name in outdone:
            mapping.ignored.update(origin)
        elif len(origin) == 1 and tensor is tagged[next(iter(origin))]:
            _add_layout(mapping, targets, target, stored(entries[next(iter(origin))]))
        else:
            made[name] = origin
    for sources, results in _connected(made):
        part = Part(sources, {name: names.get(name, name) for name in results})
        _add_part(peft_model, adapter_name, mapping, part, entries, targets)
    return mapping


def _outdone(received: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> set[str]:
    """Names of tied base tensors that the file holds under several names, but for the last: that one is loaded last."""
    by_target: dict[str, list[str]] = {}
    for name, target in names.items():
        if name in received:
            by_target.setdefault(target, []).append(name)
    return {name for tied in by_target.values() for name in tied[:-1]}


def _add_layout(mapping: AdapterMapping, targets: Targets, target: str, layout: Layout) -> None:
    if layout.shape != targets[target].shape:
        mapping.mismatched.append((target, str(list(layout.shape)), str(list(targets[target].shape))))
    else:
        mapping.writes.extend(layout.writes(target))


def _add_part(
    peft_model: Any,
    adapter_name: str,
    mapping: AdapterMapping,
    part: Part,
    entries: Mapping[str, Entry],
    targets: Targets,
) -> None:
    if not part.sources:
        raise UnsupportedError(f"peft makes {', '.join(list(part.results)[:4])} from no stored tensor")
    chosen = {name: entries[name] for name in part.sources}
    traced = {name: TracedTensor(stored(entry), torch_dtype(entry.dtype)) for name, entry in chosen.items()}
    try:
        received, _ = peft_names(peft_model, adapter_name, traced)
        layouts = [_layout_of(received[name]) for name in part.results]
    except NotALayoutError as error:
        filled = tuple(part.results.values())
        mapping.conversions.append(
            Conversion(filled[0], tuple(chosen.values()), filled, f"peft converts old names: {error}")
        )
        mapping.parts[filled[0]] = part
    else:
        for target, layout in zip(part.results.values(), layouts, strict=True):
            _add_layout(mapping, targets, target, layout)


def _layout_of(tensor: torch.Tensor) -> Layout:
    if not isinstance(tensor, TracedTensor):
        raise NotALayoutError("it makes tensors of its own")
    return tensor.layout_of_elements


def _connected(sources: Mapping[str, frozenset[str]]) -> list[tuple[tuple[str, ...], list[str]]]:
    """Results that share a source, together with all of their sources."""
    parts: list[tuple[frozenset[str], list[str]]] = []
    for name, origin in sources.items():
        apart = [part for part in parts if not part[0] & origin]
        touching = [part for part in parts if part[0] & origin]
        results = [result for part in touching for result in part[1]]
        parts = [*apart, (origin.union(*(part[0] for part in touching)), [*results, name])]
    return [(tuple(sorted(origin)), results) for origin, results in parts]


class _Tagged(torch.Tensor):
    """A tensor on the meta device that knows which stored tensors it is made of."""

    origin: frozenset[str]

    @classmethod
    def of(cls, entry: Entry) -> _Tagged:
        """The stand-in for a stored tensor."""
        return _tagged(torch.empty(entry.shape, dtype=torch_dtype(entry.dtype), device="meta"), frozenset({entry.name}))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`; tensors that it gives come from all that it took."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        taken = [value for value in tree_leaves((list(args), kwargs)) if isinstance(value, _Tagged)]
        origin = frozenset[str]().union(*(value.origin for value in taken))
        return tree_map(lambda value: _tagged(value, origin) if isinstance(value, torch.Tensor) else value, result)


def _tagged(tensor: torch.Tensor, origin: frozenset[str]) -> _Tagged:
    tagged: _Tagged = tensor.detach().as_subclass(_Tagged)
    tagged.origin = origin
    return tagged
