"""What a load has ended in: whether the process owns the memory of all tensors, or a file does that it has mapped."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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
