"""Puts peft's modules into a model, without weights of their own; and takes them out again, leaving no trace.

peft injects by its own code on the meta device. What that way leaves undone is done here: the dtypes that the adapter's
tensors have when peft makes them with storage, their devices, and no copy of a module that an adapter replaces whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftModel
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch.overrides import TorchFunctionMode

from umem.errors import UnsupportedError

__all__ = ["ModuleTree", "check_supported", "device_of_targets", "inject"]

#: These start from a decomposition of the base weights and write back what is left of them.
_INITS_THAT_CHANGE_WEIGHTS = ("pissa", "corda", "olora", "loftq")

_SHARES = "they share tensors among layers, which injection without storage takes apart"

#: Kinds that need numbers besides those of their file, or more than modules in a model.
_REFUSED_KINDS = {
    "ADALORA": "they keep tensors that their files do not hold",
    "FROD": _SHARES,
    "PVERA": _SHARES,
    "TINYLORA": _SHARES,
    "UNILORA": _SHARES,
    "VBLORA": _SHARES,
    "VERA": _SHARES,
    "XLORA": "they are made of several adapters",
}


class ModuleTree:
    """What a model is made of, to be put back: submodules, parameters, attributes, hooks, gradient flags.

    The tensors themselves are not copied.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._attributes = [(module, dict(module.__dict__)) for module in model.modules()]
        self._contents = [
            (value, value.copy())
            for _, attributes in self._attributes
            for name, value in attributes.items()
            if name.startswith("_") and isinstance(value, dict | set)
        ]
        self._flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore(self) -> None:
        """Make the model what it was. Containers stay the objects that they are, for hooks are removed through them."""
        for module, attributes in self._attributes:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for container, contents in self._contents:
            container.clear()
            container.update(contents)
        for parameter, requires_grad in self._flags:
            parameter.requires_grad_(requires_grad)


def check_supported(model: torch.nn.Module, config: Any) -> None:
    """Return if umem can load this kind of adapter into this model.

    Raises
    ------
    UnsupportedError
        It cannot; the message says why and what to do.
    """
    kind = str(config.peft_type.value)
    if isinstance(model, PeftModel) or getattr(model, "peft_config", None):
        raise UnsupportedError("the model has an adapter already; load into the base model, or merge the first one")
    if any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()]):
        raise UnsupportedError("the model has tensors on the meta device; load its own weights before an adapter")
    places = set((getattr(model, "hf_device_map", None) or {}).values())
    if "disk" in places or ("cpu" in places and len(places) > 1):
        raise UnsupportedError("the model is partly offloaded; load adapters into models that lie in memory whole")
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise UnsupportedError(f"{kind} adapters are prompts, not weights of modules; load them with peft")
    if kind in _REFUSED_KINDS:
        raise UnsupportedError(f"umem does not load {kind} adapters: {_REFUSED_KINDS[kind]}; load them with peft")
    if getattr(config, "ensure_weight_tying", False):
        raise UnsupportedError(f"umem does not load adapters with ensure_weight_tying: {_SHARES}; load them with peft")
    start = str(getattr(config, "init_lora_weights", "")).lower()
    if start.startswith(_INITS_THAT_CHANGE_WEIGHTS) or getattr(config, "kasa_config", None) is not None:
        raise UnsupportedError(
            f"this adapter ({'KaSA' if not start.startswith(_INITS_THAT_CHANGE_WEIGHTS) else start}) changes the base"
            " weights when it is set up, by a decomposition of them; convert it to plain LoRA with peft"
            " (save_pretrained with path_initial_model_for_weight_conversion), or load them with peft"
        )


def inject(model: torch.nn.Module, config: Any, adapter_name: str, *, autocast: bool) -> Any:
    """The `PeftModel` around `model`, its adapter on the meta device with the dtypes that peft gives it otherwise.

    Raises
    ------
    UnsupportedError
        peft refuses this adapter for this model.
    """
    kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type, PeftModel)
    own = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    try:
        with _WithoutCopies(own):
            peft_model = kind(model, config, adapter_name, autocast_adapter_dtype=autocast, low_cpu_mem_usage=True)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(f"peft does not set this adapter up on {type(model).__name__}: {error}") from error
    for layer, dtype, _ in _tuner_layers(peft_model):
        for tensor in _adapter_tensors(layer, adapter_name):
            if tensor.is_meta and tensor.is_floating_point() and dtype is not None:
                tensor.data = tensor.data.to(dtype)
    tuner: Any = peft_model.base_model
    if hasattr(tuner, "_cast_adapter_dtype"):
        tuner._cast_adapter_dtype(adapter_name=adapter_name, autocast_adapter_dtype=autocast)
    return peft_model


def device_of_targets(peft_model: Any) -> Callable[[str], str]:
    """Given the name of one of the adapter's tensors, the device of what it adapts."""
    first = next(iter(peft_model.parameters()), torch.empty(0))
    fallback = next((tensor.device for tensor in peft_model.parameters() if not tensor.is_meta), first.device)
    named = {id(module): name for name, module in peft_model.named_modules()}
    devices = {named[id(layer)]: device for layer, _, device in _tuner_layers(peft_model) if device is not None}
    for name, module in peft_model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            wrapped = next(module.original_module.parameters(), None)
            if wrapped is not None:
                devices[name] = wrapped.device

    def device(name: str) -> str:
        while name:
            if name in devices:
                return str(devices[name])
            name = name.rpartition(".")[0]
        return str(fallback)

    return device


class _WithoutCopies(TorchFunctionMode):
    """Within: a copy of one of the model's own tensors has no storage."""

    def __init__(self, addresses: set[int]) -> None:
        super().__init__()
        self._addresses = addresses

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.clone and self._is_own(args[0]):
            return torch.empty_like(args[0], device="meta")
        return func(*args, **(kwargs or {}))

    def _is_own(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in self._addresses


def _tuner_layers(peft_model: Any) -> Iterator[tuple[Any, torch.dtype | None, torch.device | None]]:
    """Every tuner layer, with the floating-point dtype (None for a quantized one) and the device of what it adapts."""
    layers: list[Any] = [module for module in peft_model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        base: Any = layer.get_base_layer()
        if hasattr(layer, "get_param"):
            device, dtype = layer.get_param().device, layer.get_param().dtype
        else:
            base = base.out_proj if isinstance(base, torch.nn.MultiheadAttention) else base
            device, dtype = layer._get_base_layer_device_and_dtype(base)
        yield layer, dtype if dtype is not None and dtype.is_floating_point else None, device


def _adapter_tensors(layer: Any, adapter_name: str) -> Iterator[torch.Tensor]:
    """The tensors that peft moves to the dtype of the base layer."""
    for attribute in dict.fromkeys((*layer.adapter_layer_names, *layer.other_param_names)):
        container: Any = getattr(layer, attribute, None)
        if not isinstance(container, (torch.nn.ModuleDict, torch.nn.ParameterDict, BufferDict)):
            continue
        if adapter_name not in container:
            continue
        held = container[adapter_name]
        if isinstance(held, torch.Tensor):
            yield held
        elif isinstance(held, torch.nn.Module):
            yield from held.parameters()
            yield from held.buffers()
