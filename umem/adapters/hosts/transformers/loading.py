"""The weight-loading step of `from_pretrained`, as a plan that umem runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import core_model_loading as library
from transformers.utils.loading_report import LoadStateDictInfo

from umem.adapters.hosts.transformers.converters import Slot
from umem.adapters.hosts.transformers.mapping import CompiledMapping, compile_mapping
from umem.adapters.hosts.transformers.offload import DiskOffload, OffloadIndex
from umem.adapters.hosts.transformers.placement import Placement
from umem.checkpoint import Checkpoint, Entry
from umem.errors import IncompleteConversionError, KeyMismatchError, Remedy, ShapeMismatch, UmemError
from umem.planning import Budget, LoadPlan, make_plan
from umem.planning.targets import DISK
from umem.session import LoadSession, MachineSnapshot

__all__ = ["TransformersLoad"]


class TransformersLoad:
    """One load of one model."""

    def __init__(
        self,
        session: LoadSession,
        checkpoint: Checkpoint,
        allow_missing: Sequence[str],
        allow_unexpected: Sequence[str],
        placement: Placement,
    ) -> None:
        self._session, self._checkpoint = session, checkpoint
        self._allow_missing, self._allow_unexpected = allow_missing, allow_unexpected
        self._placement = placement
        self._offload: DiskOffload | None = None
        self._compiled: CompiledMapping | None = None
        self.finished = False

    def plan(self, model: Any, load_config: Any) -> LoadPlan:
        """The plan for `model`, which is on the meta device."""
        with self._session.phase("plan"):
            self._compiled, plan = self._planned(model, load_config, self._placement)
            return plan

    def _planned(self, model: Any, load_config: Any, placement: Placement) -> tuple[CompiledMapping, LoadPlan]:
        placement.check(model, load_config, self._session)
        compiled = compile_mapping(model, self._checkpoint, load_config, self._session.platform.device)
        plan = make_plan(
            self._checkpoint,
            compiled.targets,
            compiled.adaptation,
            window_bytes=self._session.settings.window_bytes,
            allow_missing=self._allow_missing,
            allow_unexpected=self._allow_unexpected,
            residency=self._session.settings.residency,
        )
        placement.check_plan(plan, model)
        return compiled, plan

    def run(self, model: Any, load_config: Any) -> tuple[LoadStateDictInfo, OffloadIndex | None]:
        """Plan, load, install; the library then learns which parameters are still missing, and which are on disk."""
        plan = self.plan(model, load_config)
        offload = self._offload = DiskOffload(plan, self._placement.offload_folder)
        info = LoadStateDictInfo(set(model.state_dict()), set(), set(), [], {}, set())

        def convert(name: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            return self._converted(self._mapping.materialized[name], tensors, model, load_config, info)

        def tried(machine: MachineSnapshot) -> Iterator[Remedy]:
            return self._remedies(model, load_config, machine.budget)

        tensors = self._session.run(plan, convert=convert, offload=offload.file, tried=tried)
        with self._session.phase("install"):
            offload.finish(model.all_tied_weights_keys)
            self._install(model, tensors, load_config, info)
        info.missing_keys.difference_update(offload.index)
        info.unexpected_keys.update(self._mapping.unexpected_names)
        self.finished = True
        model._weight_conversions = [
            transform for transform in load_config.weight_mapping or [] if transform.was_used()
        ]
        return info, offload.index if offload else None

    def _remedies(self, model: Any, load_config: Any, budget: Budget) -> Iterator[Remedy]:
        """The ways of offloading with which the model would fit, each planned whole."""
        for placement in self._placement.alternatives():
            try:
                devices = placement.planned_devices(model, load_config, self._session)
                _, plan = self._planned(model, replace(load_config, device_map=devices), placement)
            except UmemError:
                continue
            if budget.shortfall_of(budget.needs_of(plan)) is None:
                yield placement.as_remedy(plan)

    def discard(self) -> None:
        """Remove what the load wrote; for loads that fail."""
        if self._offload is not None:
            self._offload.discard()

    @property
    def _mapping(self) -> CompiledMapping:
        if self._compiled is None:
            raise ValueError("the load has no plan yet")
        return self._compiled

    def _converted(
        self,
        slot: Slot,
        tensors: Mapping[str, torch.Tensor],
        model: Any,
        load_config: Any,
        info: LoadStateDictInfo,
    ) -> Mapping[str, torch.Tensor]:
        """What the library's own code makes of whole tensors."""
        device = self._mapping.targets[slot.name].device
        if device == DISK or getattr(slot.transform, "force_cpu", False):
            device = "cpu"

        def cast(entry: Entry, dtype: torch.dtype | None) -> torch.Tensor:
            return tensors[entry.name].to(device=device, dtype=dtype)

        transform = slot.filled_transform(cast)
        try:
            results = transform.convert(
                slot.name, model=model, config=model.config, hf_quantizer=load_config.hf_quantizer, loading_info=info
            )
        except library.SkipParameters as error:
            message = info.conversion_errors.get(slot.name, "it failed").strip().splitlines()[-1]
            raise IncompleteConversionError(message, conversion=slot.name, targets=[slot.name]) from error
        whole = {name: result[0] if isinstance(result, list) else result for name, result in results.items()}
        return {name: self._placed(name, tensor) for name, tensor in whole.items()}

    def _placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._offload is not None and name in self._offload:
            return self._offload.store(name, tensor)
        return tensor

    def _install(
        self, model: Any, tensors: Mapping[str, torch.Tensor], load_config: Any, info: LoadStateDictInfo
    ) -> None:
        targets = self._mapping.targets
        for name, tensor in tensors.items():
            if tensor.is_meta:  # on disk, where the module's own parameter is a likeness already
                continue
            value = tensor
            target = targets.get(name)
            if target is not None and not target.is_buffer and not isinstance(tensor, torch.nn.Parameter):
                value = torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            for alias in (name,) if target is None else (target.name, *target.aliases):
                library.set_param_for_module(model, alias, value, info, load_config.hf_quantizer)
        if info.mismatched_keys:
            raise KeyMismatchError(
                mismatched=[
                    ShapeMismatch(name, str(list(found)), str(list(wanted)))
                    for name, found, wanted in info.mismatched_keys
                ]
            )
