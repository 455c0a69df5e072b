"""What a load has ended in: whether the process owns the memory of all tensors, and a digest that tells them apart."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def digest(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of names, dtypes, shapes and bytes, whatever the order of the tensors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        digests = sorted(pool.map(_digest_of_one, named))
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def _digest_of_one(item: tuple[str, torch.Tensor]) -> bytes:
    import torch

    name, tensor = item
    one = hashlib.blake2b(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    raw: Any = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
    one.update(memoryview(raw))
    return one.digest()


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    """The tensors of a mapping, or of a module's state, by name."""
    return dict(state if isinstance(state, Mapping) else state.state_dict())


class MappedFiles:
    """Where files are mapped into this process, at the moment when it is made."""

    def __init__(self, files: Sequence[Path], maps: Path = Path("/proc/self/maps")) -> None:
        paths = {os.path.realpath(path) for path in files}
        lines = (line.split(maxsplit=5) for line in maps.read_text().splitlines())
        ranges = (fields[0].split("-") for fields in lines if len(fields) > 5 and fields[5] in paths)
        self._ranges = sorted((int(start, 16), int(end, 16)) for start, end in ranges)

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's bytes are a file's, not memory that the process owns."""
        address = tensor.data_ptr()
        place = bisect_right(self._ranges, (address, float("inf")))
        return place > 0 and address < self._ranges[place - 1][1]

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of those tensors that the files hold."""
        return sum(tensor.nbytes for tensor in tensors if self.hold(tensor))


def own_all(model: torch.nn.Module, files: Sequence[Path]) -> torch.nn.Module:
    """Copy what the model still has in mapped files into memory of its own."""
    mapped = MappedFiles(files)
    for tensor in [*model.parameters(), *model.buffers()]:
        if mapped.hold(tensor):
            tensor.data = tensor.data.clone()
    return model
