"""The plan of a merge: which base weights are overwritten, which are updated from which stored tensors, in what memory.

It is made from the plan that fills the injected modules, so every check of names, shapes and coverage is that plan's.
Factors are read one weight at a time; what is live besides the model is one weight's factors and a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from peft.utils.other import ModulesToSaveWrapper

from umem.adapters.hosts.peft.base_tensors import BaseTensors
from umem.adapters.hosts.peft.merging import WeightUpdate, weight_updates
from umem.checkpoint import Entry
from umem.errors import UnsupportedError
from umem.planning import LoadPlan, Targets, make_plan
from umem.planning.writes import Adaptation, Group, Route, Write
from umem.settings import MIB, LoadSettings
from umem.strategies.storage import torch_dtype

__all__ = ["MakePart", "MergePlan"]

#: Given a conversion's name and its stored tensors, its results by target name.
MakePart = Callable[[str, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]

_SMALLEST_TILE_BYTES = 1 * MIB
_LARGEST_TILE_BYTES = 16 * MIB


class MergePlan:
    """A merge of the adapter that `filling` would fill.

    Parameters
    ----------
    filling
        The plan that fills the injected modules.

    Raises
    ------
    UnsupportedError
        A part of the adapter has no place in the base model's own tensors.
    """

    def __init__(self, peft_model: Any, adapter_name: str, filling: LoadPlan, base: BaseTensors) -> None:
        self._filling, self._base = filling, base
        self._writes: dict[str, list[Write]] = {}
        self._parts: dict[str, Group] = {}
        for group in filling.groups:
            for write in group.writes:
                self._writes.setdefault(filling.targets[write.target].name, []).append(write)
            if group.route is Route.MATERIALIZED:
                self._parts.update(dict.fromkeys((filling.targets[name].name for name in group.targets), group))
        self._replaced = self._replacements(peft_model, adapter_name)
        self._updates = self._named(list(weight_updates(peft_model, adapter_name)))
        self._tile_bytes = _SMALLEST_TILE_BYTES
        self._check_everything_has_a_place()

    def plan(self, settings: LoadSettings) -> LoadPlan:
        """The groups, with what they hold: first the tensors that are replaced whole, then the updates."""
        filling = self._filling
        written = make_plan(
            filling.checkpoint,
            Targets(self._base.targets[name] for name in self._base.targets if name in self._overwritten()),
            Adaptation(self._overwrites(), [], [], []),
            window_bytes=settings.window_bytes,
            live=self._base.tensors.keys(),
        )
        needs = {name: self._factor_bytes(update) for name, update in self._updates.items()}
        room = settings.window_bytes - max(needs.values(), default=0)
        self._tile_bytes = min(_LARGEST_TILE_BYTES, max(_SMALLEST_TILE_BYTES, room))
        blocks_bytes = 2 * settings.largest_block_bytes
        groups = [*written.groups]
        for name, update in self._updates.items():
            held = min(needs[name] + self._tile_bytes, max(0, settings.window_bytes - blocks_bytes))
            groups.append(self._group(name, update, held))
        beyond = max(needs.values(), default=0) + max(self._tile_bytes, blocks_bytes) - settings.window_bytes
        targets = {target: self._base.targets[target] for group in groups for target in group.targets}
        forecast = replace(
            written.forecast,
            final_bytes=sum(target.nbytes for target in targets.values()),
            scratch_bytes=max(0, beyond) if self._updates else 0,
            read_bytes=sum(group.read_bytes for group in groups),
            final_bytes_by_device=_by_device(targets.values()),
        )
        return LoadPlan(
            checkpoint=filling.checkpoint,
            targets=Targets(targets.values()),
            groups=tuple(groups),
            left_to_owner=(),
            ignored=filling.ignored,
            forecast=forecast,
        )

    def convert(self, name: str, tensors: Mapping[str, torch.Tensor], make: MakePart) -> dict[str, torch.Tensor]:
        """Run one update on its stored tensors; gives the weights that it changed."""
        update = self._updates[name]
        device = update.weights[0].device
        factors = {factor: self._factor(factor, tensors, make).to(device) for factor in update.factors}
        update.apply(factors, self._tile_bytes)
        return {self._base.name_of(weight): weight.data for weight in update.weights}

    # --- what the adapter is made of ---------------------------------------------------------------------------------

    def _replacements(self, peft_model: Any, adapter_name: str) -> dict[str, str]:
        """Target of the filling plan -> base tensor, for modules that the adapter replaces whole."""
        found: dict[str, str] = {}
        for name, module in peft_model.named_modules():
            if not isinstance(module, ModulesToSaveWrapper):
                continue
            for key, tensor in module.original_module.state_dict(keep_vars=True).items():
                own = f"{name}.modules_to_save.{adapter_name}.{key}"
                found[self._filling.targets[own].name] = self._base.name_of(tensor)
        self._check_ties(found)
        return found

    def _check_ties(self, replaced: Mapping[str, str]) -> None:
        for own, base in replaced.items():
            ways_in = len(self._filling.targets[own].aliases)
            others = self._base.targets[base].aliases
            if len(others) > ways_in:
                raise UnsupportedError(
                    f"{base}: the adapter replaces it whole, but it is tied to {', '.join(others)}, which would change"
                    " with it; untie them first, or load the adapter with merge=False"
                )

    def _named(self, updates: Sequence[WeightUpdate]) -> dict[str, WeightUpdate]:
        named: dict[str, WeightUpdate] = {}
        for update in updates:
            name = self._base.name_of(update.weights[0])
            while name in named:
                name += " again"
            named[name] = update
        return named

    def _check_everything_has_a_place(self) -> None:
        used = {self._filling.targets[name].name for update in self._updates.values() for name in update.factors}
        used |= self._replaced.keys() | set(self._base.targets)
        left = [target.name for target in self._filling.filled if target.name not in used]
        whole = [name for name in self._parts if name in self._replaced or name in self._base.targets]
        if left or whole:
            raise UnsupportedError(f"these tensors of the adapter cannot be merged: {', '.join([*left, *whole][:8])}")

    # --- what a plan is made of --------------------------------------------------------------------------------------

    def _overwrites(self) -> list[Write]:
        writes = []
        for name, filling in self._writes.items():
            base = self._replaced.get(name, name if name in self._base.targets else None)
            if base is not None:
                writes += [write._replace(target=base) for write in filling]
        return writes

    def _overwritten(self) -> set[str]:
        return {write.target for write in self._overwrites()}

    def _group(self, name: str, update: WeightUpdate, held_bytes: int) -> Group:
        return Group(
            name=name,
            route=Route.MATERIALIZED,
            reason="an adapter is added in place, tile by tile",
            entries=self._entries(update),
            targets=tuple(self._base.name_of(weight) for weight in update.weights),
            scratch_bytes=held_bytes,
        )

    def _entries(self, update: WeightUpdate) -> tuple[Entry, ...]:
        entries: dict[str, Entry] = {}
        for factor in update.factors:
            name = self._filling.targets[factor].name
            sources = self._parts[name].entries if name in self._parts else [w.entry for w in self._writes[name]]
            entries.update({entry.name: entry for entry in sources})
        return tuple(sorted(entries.values(), key=lambda entry: (entry.shard, entry.start)))

    def _factor_bytes(self, update: WeightUpdate) -> int:
        """The stored tensors, and the factors made of them, which are fp32 at least while they are multiplied."""
        stored = sum(entry.nbytes for entry in self._entries(update))
        targets = [self._filling.targets[name] for name in update.factors]
        return stored + sum(target.items * max(4, target.dtype.itemsize) for target in targets)

    def _factor(self, factor: str, tensors: Mapping[str, torch.Tensor], make: MakePart) -> torch.Tensor:
        """One of the adapter's tensors, in the dtype that peft loads it in."""
        target = self._filling.targets[factor]
        if target.name in self._parts:
            return make(self._parts[target.name].name, tensors)[target.name]
        writes = self._writes[target.name]
        dtype = torch_dtype(target.dtype)
        if len(writes) == 1 and writes[0].source.shape == target.shape:
            return _viewed(writes[0], tensors).to(dtype)
        whole = torch.empty(target.shape, dtype=dtype)
        for write in writes:
            view = write.destination
            whole.as_strided(view.shape, view.strides, view.offset).copy_(_viewed(write, tensors))
        return whole


def _viewed(write: Write, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return tensors[write.entry.name].as_strided(write.source.shape, write.source.strides, write.source.offset)


def _by_device(targets: Any) -> dict[str, int]:
    totals: dict[str, int] = {}
    for target in targets:
        totals[target.device] = totals.get(target.device, 0) + target.nbytes
    return totals
