"""The base model's own tensors, told from an adapter's however modules are wrapped around them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from umem.planning import Targets, places_of, targets_of

__all__ = ["BaseTensors"]


class BaseTensors:
    """Parameters and buffers of a model, found again by where they lie in memory.

    Identity does not do: some of peft's layers register the weight that they wrap as a new parameter now and then.

    Attributes
    ----------
    targets
        The model's tensors as targets, under the model's own names.
    tensors
        The tensors by first name.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        places = places_of(model)
        self.targets: Targets = targets_of(places, dtype=lambda _name, own: own, device=lambda _name, device: device)
        named = {place.name: place.tensor for place in places}
        self.tensors = {name: named[name] for name in self.targets}
        self._names = {_place(tensor): name for name, tensor in named.items()}
        self._names.update({_place(tensor): name for name, tensor in self.tensors.items()})

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return _place(tensor) in self._names

    def name_of(self, tensor: torch.Tensor) -> str:
        """The first name of the tensor. `KeyError` where it is none of the model's."""
        return self._names[_place(tensor)]

    def names_in(self, named: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """The first names of the model's tensors, by those that they have in another module tree."""
        return {name: self.name_of(tensor) for name, tensor in named.items() if tensor in self}


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size, torch.dtype]:
    address = tensor.data_ptr() if tensor.numel() and not tensor.is_meta else id(tensor)
    return address, tensor.shape, tensor.dtype
