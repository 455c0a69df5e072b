"""What merging an adapter means for each weight: read off the modules that peft injected, before anything is touched.

Covered are peft's plain LoRA layers (linear, Conv1D, embedding, convolution), DoRA on them, LoRA on parameters
(experts) and trainable tokens. Everything else is refused with the reason; peft's own `merge_and_unload` may do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import layer as lora
from peft.tuners.lora.variants import (
    DoraConv1dVariant,
    DoraConv2dVariant,
    DoraConv3dVariant,
    DoraEmbeddingVariant,
    DoraLinearVariant,
)
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer

from umem.adapters.hosts.peft.arithmetic import Product, add_product, scale_rows
from umem.errors import UnsupportedError

__all__ = ["WeightUpdate", "weight_updates"]

_LAYERS = (lora.Linear, lora.Embedding, lora.Conv1d, lora.Conv2d, lora.Conv3d, lora.ParamWrapper)
_DORA = (DoraLinearVariant, DoraEmbeddingVariant, DoraConv1dVariant, DoraConv2dVariant, DoraConv3dVariant)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LOW = (torch.float16, torch.bfloat16)

#: The adapter's tensors by name, on the device of the weight, in the dtypes that peft loads them in.
Factors = Mapping[str, torch.Tensor]


class WeightUpdate(NamedTuple):
    """One weight to be changed in place.

    Attributes
    ----------
    weights
        The tensors that change; the first is the one that the update is about.
    factors
        Names, in the injected model, of the adapter's tensors that it takes.
    apply
        Changes the weights, given the factors and the bytes that a tile may take.
    """

    weights: tuple[torch.Tensor, ...]
    factors: tuple[str, ...]
    apply: Callable[[Factors, int], None]


def weight_updates(peft_model: Any, adapter_name: str) -> Iterator[WeightUpdate]:
    """The updates, in the order in which peft merges.

    Raises
    ------
    UnsupportedError
        A layer is of a kind that cannot be merged here.
    """
    for name, layer in peft_model.named_modules():
        if isinstance(layer, TrainableTokensLayer):
            yield from _token_rows(name, layer, adapter_name)
        elif isinstance(layer, BaseTunerLayer):
            _check_layer(name, layer, adapter_name)
            yield _lora_update(name, layer, adapter_name)


def _check_layer(name: str, layer: Any, adapter_name: str) -> None:
    why = None
    base = layer.get_base_layer()
    variant = getattr(layer, "lora_variant", {}).get(adapter_name)
    weight = layer.get_param() if type(layer) is lora.ParamWrapper else getattr(base, "weight", None)
    if type(layer) not in _LAYERS:
        why = f"{type(layer).__module__}.{type(layer).__name__} is no plain LoRA layer"
    elif variant is not None and type(variant) not in _DORA:
        why = f"{type(variant).__name__} has no plain sum of products"
    elif type(weight) is not torch.nn.Parameter or weight.dtype not in _FLOATS:
        why = f"its weight is quantized ({type(weight).__name__}, {getattr(weight, 'dtype', None)})"
    elif getattr(base, "groups", 1) > 1:
        why = "peft does not merge convolutions with groups"
    elif layer.lora_bias.get(adapter_name) and getattr(base, "bias", None) is None:
        why = "the adapter has a bias (lora_bias) and the layer has none"
    elif isinstance(layer, lora.ParamWrapper) and weight.ndim == 3 and not layer._did_swap_in_out_features:
        why = "the experts lie in transposed order and there is one of them" if layer.num_experts == 1 else None
    if why is not None:
        raise UnsupportedError(
            f"{name.removeprefix('base_model.model.')}: cannot be merged: {why}. Load the adapter with merge=False, or"
            " use peft's merge_and_unload"
        )


def _lora_update(name: str, layer: Any, adapter_name: str) -> WeightUpdate:
    if isinstance(layer, lora.Embedding):
        left, right = f"{name}.lora_embedding_B.{adapter_name}", f"{name}.lora_embedding_A.{adapter_name}"
    else:
        left, right = f"{name}.lora_B.{adapter_name}.weight", f"{name}.lora_A.{adapter_name}.weight"
    scaling = float(layer.scaling[adapter_name])
    if isinstance(layer, lora.ParamWrapper):
        return _parameter_update(layer, scaling, left, right)
    base = layer.get_base_layer()
    weight: torch.Tensor = base.weight.data
    turned = isinstance(layer, lora.Embedding) or getattr(layer, "fan_in_fan_out", False)
    matrix = weight.t() if turned else weight.flatten(1) if weight.is_contiguous() else _as_matrix(name, weight)
    dora = adapter_name in layer.lora_variant
    magnitude = f"{name}.lora_magnitude_vector.{adapter_name}.weight"
    bias = f"{name}.lora_B.{adapter_name}.bias" if layer.lora_bias.get(adapter_name) else None
    last = (weight.dtype,) if isinstance(layer, lora.Embedding) and not dora else ()

    def apply(factors: Factors, tile_bytes: int) -> None:
        product = _product(factors[left].flatten(1), factors[right].flatten(1), scaling, last)
        if dora:
            scale_rows(matrix, product, factors[magnitude].flatten(), tile_bytes=tile_bytes)
        else:
            add_product(matrix, product, tile_bytes=tile_bytes)
        if bias is not None:
            base.bias.data += factors[bias] * scaling

    needs = (left, right, *([magnitude] if dora else []), *([bias] if bias else []))
    return WeightUpdate((base.weight, *([base.bias] if bias else [])), needs, apply)


def _as_matrix(name: str, weight: torch.Tensor) -> torch.Tensor:
    if weight.ndim == 2:
        return weight
    raise UnsupportedError(f"{name}: a convolution's weight that does not lie in row-major order cannot be merged")


def _parameter_update(layer: Any, scaling: float, left: str, right: str) -> WeightUpdate:
    """LoRA on a parameter: a matrix, or one matrix for each expert, with B of (out, rank x experts)."""
    parameter = layer.get_param()
    weight: torch.Tensor = parameter.data
    experts: int = layer.num_experts
    swapped: bool = layer._did_swap_in_out_features

    def apply(factors: Factors, tile_bytes: int) -> None:
        b, a = factors[left], factors[right]
        if experts == 1:
            add_product(
                weight.view(-1, weight.shape[-1]), _product(b, a, scaling, (weight.dtype,)), tile_bytes=tile_bytes
            )
            return
        a = a.reshape(experts, -1, a.shape[-1])
        b = b.reshape(b.shape[0], -1, experts)
        for expert in range(experts):
            matrix = weight[expert] if swapped else weight[expert].t()
            product = Product(b[:, :, expert], a[expert], scaling, (weight.dtype,))
            add_product(matrix, product, tile_bytes=tile_bytes)

    return WeightUpdate((parameter,), (left, right), apply)


def _product(left: torch.Tensor, right: torch.Tensor, scaling: float, last: tuple[torch.dtype, ...]) -> Product:
    """The product as peft computes it: 16-bit factors on the processor are multiplied in fp32, then rounded back."""
    if left.device.type == "cpu" and left.dtype in _LOW:
        return Product(left.float(), right.float(), scaling, (left.dtype, *last))
    return Product(left, right, scaling, last)


def _token_rows(name: str, layer: Any, adapter_name: str) -> Iterator[WeightUpdate]:
    """Rows that replace rows. A layer that is tied to another one of the same weight has none of its own."""
    weight = layer.get_base_layer().weight
    if layer.tied_adapter is not None:
        if layer.tied_adapter.get_base_layer().weight is weight:
            return
        raise UnsupportedError(f"{name}: its tokens are tied to another layer's, but its weight is not")
    delta = f"{name}.trainable_tokens_delta.{adapter_name}"
    indices = layer.token_indices[adapter_name]

    def apply(factors: Factors, _tile_bytes: int) -> None:
        index = torch.tensor(indices, device=weight.device)
        weight.data.index_copy_(0, index, factors[delta].to(weight))

    yield WeightUpdate((weight,), (delta,), apply)
