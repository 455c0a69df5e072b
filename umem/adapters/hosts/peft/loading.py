"""One load of one adapter: injected by peft, planned, then filled as modules of its own or merged into the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from umem.adapters.hosts.peft.base_tensors import BaseTensors
from umem.adapters.hosts.peft.injection import ModuleTree, check_supported, device_of_targets, inject
from umem.adapters.hosts.peft.mapping import AdapterMapping, map_adapter, peft_names
from umem.adapters.hosts.peft.merge_plan import MergePlan
from umem.adapters.install import install, unfillable_buffers
from umem.checkpoint import Checkpoint
from umem.errors import KeyMismatchError, UnsupportedError
from umem.planning import LoadPlan, Place, Target, Targets, make_plan, places_of, targets_of
from umem.session import LoadSession
from umem.strategies.storage import torch_dtype

__all__ = ["AdapterLoad"]

_MERGED_KINDS = ("LORA", "TRAINABLE_TOKENS")


class AdapterLoad:
    """An adapter on its way into a model.

    Parameters
    ----------
    model
        The base model, with its weights. It stays what it was where a load fails before bytes move.
    config
        The adapter's config object, of peft.

    Raises
    ------
    UnsupportedError
        This kind of adapter, or this model, cannot be done.
    """

    def __init__(
        self,
        session: LoadSession,
        checkpoint: Checkpoint,
        model: torch.nn.Module,
        config: Any,
        *,
        adapter_name: str,
        autocast: bool,
        allow_unexpected: Sequence[str],
    ) -> None:
        check_supported(model, config)
        self._session, self._checkpoint, self._model, self._config = session, checkpoint, model, config
        self._adapter_name, self._autocast = adapter_name, autocast
        self._allow_unexpected = allow_unexpected
        self._base = BaseTensors(model)
        self._mapping = AdapterMapping()
        self._targets = Targets(())
        self._live: dict[str, torch.Tensor] = {}

    def load(self) -> Any:
        """The `PeftModel` around the model, with the adapter filled."""
        tree = ModuleTree(self._model)
        try:
            peft_model, plan = self._injected()
            filled = {target.name for target in plan.filled}
            live = {name: tensor for name, tensor in self._live.items() if name in filled}
            tensors = self._session.run(plan, convert=self._converter(peft_model), live=live)
            with self._session.phase("install"):
                install(
                    places_of(peft_model),
                    plan.targets,
                    {name: value for name, value in tensors.items() if name not in live},
                )
                if self._config.inference_mode:
                    peft_model.eval()
        except BaseException:
            tree.restore()
            raise
        return peft_model

    def merge(self) -> torch.nn.Module:
        """The model, with the adapter added to its weights."""
        kind = str(self._config.peft_type.value)
        if kind not in _MERGED_KINDS:
            raise UnsupportedError(
                f"umem merges LoRA, not {kind}; load it with merge=False and use peft's merge_and_unload"
            )
        if getattr(self._config, "layer_replication", None):
            raise UnsupportedError("the adapter replicates layers: there is no place in this model to merge it into")
        tree = ModuleTree(self._model)
        try:
            peft_model, filling = self._injected()
            with self._session.phase("plan"):
                merging = MergePlan(peft_model, self._adapter_name, filling, self._base)
                plan = merging.plan(self._session.settings)
            make = self._converter(peft_model)
            live = {target.name: self._base.tensors[target.name] for target in plan.filled}
            self._session.run(plan, convert=lambda name, tensors: merging.convert(name, tensors, make), live=live)
        finally:
            tree.restore()
        return self._model

    def _injected(self) -> tuple[Any, LoadPlan]:
        """The injected model, and the plan that fills its own tensors and the base weights that the file brings."""
        with self._session.phase("build"):
            peft_model = inject(self._model, self._config, self._adapter_name, autocast=self._autocast)
        with self._session.phase("plan"):
            places = places_of(peft_model)
            names = self._find_targets(peft_model, places)
            self._mapping = map_adapter(peft_model, self._adapter_name, self._checkpoint, self._targets, names)
            unfillable = [name for name in unfillable_buffers(places) if name not in names]
            if unfillable:
                raise KeyMismatchError(missing=unfillable)
            mentioned = self._targets.with_names(self._mapping.mentioned)
            wanted = [
                target
                for target in self._targets.values()
                if target.name not in self._base.targets or target.name in mentioned
            ]
            plan = make_plan(
                self._checkpoint,
                Targets(wanted),
                self._mapping.adaptation,
                window_bytes=self._session.settings.window_bytes,
                live=self._live.keys(),
                allow_unexpected=self._allow_unexpected,
            )
        return peft_model, self._within_the_window(plan)

    def _within_the_window(self, plan: LoadPlan) -> LoadPlan:
        """The plan with conversions that leave room in the window for their own reads."""
        settings = self._session.settings
        room = max(0, settings.window_bytes - 2 * settings.largest_block_bytes)
        groups = tuple(group._replace(scratch_bytes=min(group.scratch_bytes, room)) for group in plan.groups)
        return replace(plan, groups=groups)

    def _find_targets(self, peft_model: Any, places: Sequence[Place]) -> dict[str, str]:
        """Collect the adapter's targets beside the base model's; gives the latter's names by those in `peft_model`."""
        device = device_of_targets(peft_model)
        injected = targets_of(
            places,
            dtype=lambda _name, own: own,
            device=lambda name, own: device(name) if own == "meta" else own,
        )
        named = {place.name: place.tensor for place in places}
        own: list[Target] = [target for target in injected.values() if named[target.name] not in self._base]
        self._targets = Targets([*own, *self._base.targets.values()])
        self._live = {target.name: named[target.name] for target in own if not named[target.name].is_meta}
        self._live.update(self._base.tensors)
        return self._base.names_in(named)

    def _converter(self, peft_model: Any) -> Any:
        """Makes the tensors of one part by peft's own code, from whole stored ones."""

        def convert(name: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            part = self._mapping.parts[name]
            stored = {source: tensors[source] for source in part.sources}
            received, _ = peft_names(peft_model, self._adapter_name, stored)
            return {
                target: received[injected].to(self._targets[target].device, torch_dtype(self._targets[target].dtype))
                for injected, target in part.results.items()
            }

        return convert
