"""Compiles transformers' declarations of how checkpoint names and layouts map to parameters into the writes of a plan.

Renaming is done by the library's own functions (`renaming`), so order, scopes and prefixes are theirs; its converters
are compiled to views (`converters`). A converter that does more than move elements, or any quantizer's operation, stays
the library's: a conversion that its own code runs on one group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import core_model_loading as library
from transformers.utils.loading_report import LoadStateDictInfo

from umem._types import DType
from umem.adapters.hosts.transformers.converters import (
    ConversionMismatchError,
    ConverterCompiler,
    Slot,
    orientation_is_open,
)
from umem.adapters.hosts.transformers.placement import DeviceMap
from umem.adapters.hosts.transformers.renaming import Renamer, in_library_order
from umem.adapters.layout import Layout, NotALayoutError, stored
from umem.checkpoint.entries import Checkpoint, Entry
from umem.errors import UnsupportedError
from umem.planning.targets import DISK, Targets, places_of, targets_of
from umem.planning.writes import Adaptation, Conversion
from umem.strategies.storage import torch_dtype

__all__ = ["CompiledMapping", "compile_mapping"]


@dataclass(frozen=True, slots=True)
class CompiledMapping:
    """A model's targets, what fills them, and the slots whose conversion stays with the library, by name."""

    targets: Targets
    adaptation: Adaptation
    materialized: dict[str, Slot]
    unexpected_names: frozenset[str]


def compile_mapping(model: Any, checkpoint: Checkpoint, load_config: Any, main_device: str) -> CompiledMapping:
    """Find what fills each parameter of `model`, which is on the meta device.

    Parameters
    ----------
    load_config
        The library's `LoadStateDictConfig`.
    main_device
        The device that computes.

    Raises
    ------
    UnsupportedError
        The model is to be distributed.
    """
    if load_config.device_mesh is not None:
        raise UnsupportedError("umem does not yet load distributed models (device_mesh)")
    return _Compiler(model, checkpoint, load_config, main_device).compile()


class _Compiler:
    def __init__(self, model: Any, checkpoint: Checkpoint, load_config: Any, main_device: str) -> None:
        self.model, self.checkpoint, self.load_config = model, checkpoint, load_config
        self._devices = DeviceMap(load_config.device_map or {"": "cpu"}, main_device)
        self._stay_in_memory = set() if load_config.offload_buffers else {name for name, _ in model.named_buffers()}
        self.parameters: dict[str, torch.Tensor] = model.state_dict()
        self.dtypes: dict[str, DType] = {}
        self.adaptation = Adaptation([], [], [], [])
        self.materialized: dict[str, Slot] = {}
        self.unexpected: dict[str, str] = {}
        self.remarks: list[tuple[str, str]] = []
        self.ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        self._converters = ConverterCompiler(model, self.parameters)

    def compile(self) -> CompiledMapping:
        slots = self._slots()
        doubles = self._take_out_tied_doubles(slots)
        for slot in slots.values():
            self._compile_slot(slot)
        may_lack, ignored = self._what_may_differ()
        ignored |= doubles
        self.adaptation.unexpected.extend(name for name in self.unexpected if name not in ignored)
        adaptation = self.adaptation._replace(
            may_lack=may_lack, ignored=tuple(sorted(ignored)), remarks=tuple(self.remarks)
        )
        targets = targets_of(places_of(self.model), dtype=self.dtypes.get, device=lambda name, _own: self._device(name))
        return CompiledMapping(targets, adaptation, self.materialized, frozenset(self.unexpected.values()))

    # --- names -------------------------------------------------------------------------------------------------------

    def _slots(self) -> dict[str, Slot]:
        """Every stored tensor in the slot of the parameter that the library would put it in."""
        mapping = self.load_config.weight_mapping or []
        renamings = [entry for entry in mapping if isinstance(entry, library.WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, library.WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        rename = Renamer(self.model, self.parameters, renamings, converters)
        dtype_of = self._dtype_rule()
        slots: dict[str, Slot] = {}
        for original in in_library_order(list(self.checkpoint.entries)):
            entry = self.checkpoint.entries[original]
            name, pattern = rename(original)
            if name not in self.parameters:
                self.unexpected[original] = name
                continue
            slot = slots.get(name)
            if slot is None:
                slot = slots[name] = Slot(name, None if pattern is None else by_pattern[pattern])
            if slot.is_converter is (pattern is None) or (pattern is None and slot.sources):
                self.unexpected[original] = name  # the library takes the first and drops the others
                continue
            dtype = dtype_of(slot, entry)
            slot.sources.setdefault(pattern or original, []).append((entry, dtype))
        return slots

    def _take_out_tied_doubles(self, slots: dict[str, Slot]) -> set[str]:
        """Stored names of tied tensors that lie in the very bytes of the tensor that they are tied to.

        Torch files hold both names of a tie. Where the bytes are different ones, both are loaded and the library
        compares them.
        """
        doubles = set()
        for target, source in self.ties.items():
            if target not in slots or source not in slots or slots[target].is_converter or slots[source].is_converter:
                continue
            (double,), (original,) = slots[target].entries, slots[source].entries
            if double[1:] == original[1:]:
                del slots[target]
                doubles.add(double.name)
        return doubles

    def _what_may_differ(self) -> tuple[frozenset[str], set[str]]:
        """Parameters that a checkpoint may lack and stored tensors to leave out, as the model family says."""
        written = {name for write in self.adaptation.writes for name in (write.target,)}
        written |= {name for conversion in self.adaptation.conversions for name in conversion.targets}
        absent = {name for name in self.parameters if name not in written}
        tied_by_source: dict[str, set[str]] = {}
        for target, source in self.ties.items():
            tied_by_source.setdefault(source, {source}).add(target)
        tied = {name for names in tied_by_source.values() if names - absent for name in names & absent}
        info = LoadStateDictInfo(absent - tied, set(self.unexpected.values()), set(), [], {}, set())
        self.model._adjust_missing_and_unexpected_keys(info)
        ignored = {original for original, name in self.unexpected.items() if name not in info.unexpected_keys}
        return frozenset(absent - info.missing_keys), ignored

    # --- dtypes and devices ------------------------------------------------------------------------------------------

    def _dtype_rule(self) -> Callable[[Slot, Entry], torch.dtype | None]:
        """The dtype that the library casts a stored tensor to before converting; None keeps the stored one."""
        plan = self.load_config.dtype_plan or {}
        planned = library.build_glob_alternation(list(plan)) if plan else None
        quantizer = self.load_config.hf_quantizer

        def rule(slot: Slot, entry: Entry) -> torch.dtype | None:
            parameter = self.parameters[slot.name]
            quantized_now = (
                quantizer and not quantizer.pre_quantized and quantizer.param_needs_quantization(self.model, slot.name)
            )
            if quantized_now:
                slot.quantization = quantizer.get_quantize_ops()
            dtype = self.load_config.dtype
            match = planned[0].search(slot.name) if planned else None
            if planned and match is not None:
                dtype = plan[planned[1][str(match.lastgroup)]]
            elif parameter.dtype != dtype and not quantized_now:
                dtype = parameter.dtype
            if quantizer and quantizer.pre_quantized:
                example = _example(entry.dtype)
                return quantizer.get_new_dtype(slot.transform, example, dtype)  # type: ignore[no-any-return]
            return dtype  # type: ignore[no-any-return]

        return rule

    def _device(self, name: str) -> str:
        device = self._devices.device_of(name) or "cpu"
        return "cpu" if device == DISK and name in self._stay_in_memory else device

    # --- tensors -----------------------------------------------------------------------------------------------------

    def _compile_slot(self, slot: Slot) -> None:
        if slot.quantization is not None:
            self._add_conversion(slot, f"{type(slot.quantization).__name__} quantizes on load")
            return
        try:
            self._add_writes(slot)
        except NotALayoutError as error:
            self._add_conversion(slot, str(error))

    def _add_writes(self, slot: Slot) -> None:
        try:
            results = self._converters.compiled(slot) if slot.is_converter else [self._as_stored(slot)]
        except ConversionMismatchError as error:
            expected = str(list(self.parameters[slot.name].shape))
            self.adaptation.mismatched.append((slot.name, f"parts that do not convert ({error})", expected))
            return
        if slot.is_converter and orientation_is_open(slot):
            self.remarks.append((slot.name, "square, so only the library's order says whether it is transposed"))
        for name, layout, dtype in results:
            parameter = self.parameters.get(name)
            if parameter is None:
                self.unexpected.update({entry.name: name for entry in slot.entries})
                continue
            if tuple(parameter.shape) != layout.shape:
                self.adaptation.mismatched.append((name, str(list(layout.shape)), str(list(parameter.shape))))
                continue
            self.dtypes[name] = dtype
            self.adaptation.writes.extend(layout.writes(name))

    def _as_stored(self, slot: Slot) -> tuple[str, Layout, DType]:
        ((entry, dtype),) = next(iter(slot.sources.values()))
        return slot.name, stored(entry), entry.dtype if dtype is None else DType.from_torch(dtype)

    def _add_conversion(self, slot: Slot, why: str) -> None:
        steps = [type(op).__name__ for op in getattr(slot.transform, "operations", ())]
        patterns = slot.transform.target_patterns
        targets = (
            [slot.name.replace(patterns[0], pattern) for pattern in patterns] if slot.is_converter else [slot.name]
        )
        known = tuple(name for name in targets if name in self.parameters)
        label = " > ".join(steps) or "as stored"
        self.adaptation.conversions.append(Conversion(slot.name, slot.entries, known, f"{label}: {why}"))
        self.materialized[slot.name] = slot


@functools.cache
def _example(dtype: DType) -> torch.Tensor:
    """An empty tensor of that dtype, for the questions that a quantizer asks of a stored tensor."""
    return torch.empty(0, dtype=torch_dtype(dtype))
