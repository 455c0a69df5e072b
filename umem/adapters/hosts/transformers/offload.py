"""Weights on disk: where accelerate's hooks find each of them, and the files that are written for some.

A weight that is stored as it is used is read from the checkpoint whenever its module runs. The others are written once,
into a folder of this load: by umem's engine into one file, or, where the library's own code converts them, by that into
files of their own. The folder goes with the last reference to its index, which the model's hooks hold, or at exit.
"""

from __future__ import annotations

import os
import weakref

import torch
from transformers.integrations.accelerate import offload_weight

from umem._types import format_bytes
from umem.checkpoint.offload import OffloadFile, OffloadFolder, Weight, check_space, settle_file
from umem.errors import SettingsError
from umem.planning import Group, LoadPlan, Route, Target
from umem.planning.targets import DISK
from umem.strategies.storage import torch_dtype

__all__ = ["DiskOffload", "OffloadIndex"]

_FILE_NAME = "weights.safetensors"


class OffloadIndex(dict[str, dict[str, str]]):
    """Parameter name -> file, stored name and dtype, as accelerate reads them."""


class DiskOffload:
    """The weights on disk of one load.

    Parameters
    ----------
    plan
        The plan of the load.
    folder
        Where files may be written; None where none need to be.

    Attributes
    ----------
    index
        For the hooks, complete when the load has run.
    file
        For the engine to write to; None where nothing needs to be written by it.

    Raises
    ------
    SettingsError
        Files have to be written, and no folder was given.
    InsufficientSpaceError, UnsupportedError
        The folder has no room, or is in memory.
    """

    def __init__(self, plan: LoadPlan, folder: str | None) -> None:
        self._plan = plan
        self._on_disk = {target.name: target for target in plan.filled if target.device == DISK}
        self._folder: OffloadFolder | None = None
        self.file: OffloadFile | None = None
        self.index = OffloadIndex()
        needed_bytes = plan.forecast.offloaded_bytes
        if needed_bytes and folder is None:
            raise SettingsError(
                f"{format_bytes(needed_bytes)} of the weights on disk are not stored as they are used and have to be"
                " written; say where with offload_folder"
            )
        if needed_bytes and folder is not None:
            check_space(folder, needed_bytes)
            self._folder = OffloadFolder(folder)
            weakref.finalize(self.index, self._folder.remove)
            self.file = self._new_file(self._folder)

    def _new_file(self, folder: OffloadFolder) -> OffloadFile | None:
        groups = (group for group in self._plan.groups if group.writes and group.route is not Route.KEPT)
        written = self._plan.targets.with_names(name for group in groups for name in group.targets)
        weights = [
            Weight(name, target.dtype, target.shape) for name, target in self._on_disk.items() if name in written
        ]
        try:
            return OffloadFile(os.path.join(folder.path, _FILE_NAME), weights) if weights else None
        except BaseException:
            folder.remove()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._plan.targets and self._plan.targets[name].name in self._on_disk

    def store(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Write what the library's code made of a weight, and give its likeness on the meta device."""
        if self._folder is None:
            raise ValueError(f"{name} is not to be written")
        offload_weight(tensor.contiguous(), name, self._folder.path, self.index)
        settle_file(self.index[name]["safetensors_file"])
        return tensor.to("meta")

    def finish(self, ties: dict[str, str]) -> None:
        """Complete the index when everything is written; `ties` are the model's, target -> source.

        Raises
        ------
        ChangedFileError, TruncatedFileError
            A file that weights stay in is not the one that was planned.
        """
        if self.file is not None:
            self.file.settle()
            self.file.close()
        self._check_kept_files()
        groups_of = {self._plan.targets[name].name: group for group in self._plan.groups for name in group.targets}
        for target in self._on_disk.values():
            place = self._place(groups_of[target.name], target)
            self.index.update(dict.fromkeys((target.name, *target.aliases), place))
        for name, source in ties.items():
            for one, other in ((name, source), (source, name)):
                if one not in self.index and other in self.index:
                    self.index[one] = self.index[other]

    def _check_kept_files(self) -> None:
        kept = {group.entries[0].shard for group in self._plan.groups if group.route is Route.KEPT}
        for number in kept:
            shard = self._plan.checkpoint.shards[number]
            shard.check_unchanged(os.stat(shard.path))

    def _place(self, group: Group, target: Target) -> dict[str, str]:
        if group.route is Route.KEPT:
            entry = group.writes[0].entry
            path, name = self._plan.checkpoint.shards[entry.shard].path, entry.name
        elif self.file is not None and group.writes:
            path, name = self.file.path, target.name
        else:
            return self.index[target.name]
        dtype = str(torch_dtype(target.dtype)).removeprefix("torch.")
        return {"safetensors_file": os.path.abspath(path), "weight_name": name, "dtype": dtype}

    def __bool__(self) -> bool:
        return bool(self._on_disk)

    def discard(self) -> None:
        """Remove what was written; for loads that fail."""
        if self.file is not None:
            self.file.close()
        if self._folder is not None:
            self._folder.remove()
