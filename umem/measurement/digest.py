"""A digest that tells the end states of loads apart: names, dtypes, shapes and bytes of tensors."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["digest", "tensors_of"]


def digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of names, dtypes, shapes and bytes, whatever the order of the tensors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = sorted(pool.map(_digest_of_one, named))
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def _digest_of_one(item: tuple[str, torch.Tensor]) -> bytes:
    import torch

    name, tensor = item
    one = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    raw: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    one.update(memoryview(raw))
    return one.digest()


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a mapping, or of a module's state, by name."""
    return dict(state if isinstance(state, Mapping) else state.state_dict())
