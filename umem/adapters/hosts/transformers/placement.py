"""Where a model's modules go when one device does not hold them: the device map, and what is refused.

The map is planned by the library's own planner (`infer_auto_device_map`, with the model's no-split modules and ties),
to which umem gives its budgets as `max_memory`, or it is the caller's. Here it is checked before a tensor byte is read,
and looked up; the forward pass is the business of accelerate's hooks, which the library attaches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from accelerate.utils.modeling import get_max_layer_size
from transformers.integrations.accelerate import _get_device_map, compute_module_sizes

from umem._types import format_bytes
from umem.errors import InsufficientMemoryError, Remedy, SettingsError, UnsupportedError
from umem.planning import LoadPlan
from umem.planning.targets import DISK
from umem.probes import PlatformClass
from umem.session import LoadSession

__all__ = ["DeviceMap", "Offload", "Placement"]

_SHOWN = 5


class Offload(StrEnum):
    """Where what does not fit the device goes."""

    CPU = "cpu"
    DISK = "disk"


class DeviceMap:
    """A device map of the library's form, looked up as accelerate's hooks do: by the nearest module above.

    Parameters
    ----------
    devices
        Module or parameter -> device (`cpu`, `disk`, a number, a `torch.device`); `""` is the whole model.
    main_device
        What a device without a number means, like `cuda`.
    """

    def __init__(self, devices: Mapping[str, Any], main_device: str) -> None:
        self._main_device = main_device
        self._devices = {name: self._normal(device) for name, device in devices.items()}

    def device_of(self, name: str) -> str | None:
        """The device of a module or tensor; None where the map does not say."""
        return next((self._devices[parent] for parent in _parents(name) if parent in self._devices), None)

    @property
    def places(self) -> set[str]:
        """Every device that occurs."""
        return set(self._devices.values())

    def _normal(self, device: Any) -> str:
        if device == DISK:
            return DISK
        kind = torch.device(self._main_device).type
        try:
            found = torch.device(kind, device) if isinstance(device, int) else torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise SettingsError(f"device_map: {device!r} is no device; give 'cpu', 'disk' or a torch device") from error
        if found.type == "meta":
            raise SettingsError("device_map: meta holds no weights; give 'cpu', 'disk' or a torch device")
        return self._main_device if str(found) == kind else str(found)


def _parents(name: str) -> Iterator[str]:
    yield name
    while name:
        name = name.rpartition(".")[0]
        yield name


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What the caller says of where the model goes.

    Attributes
    ----------
    offload
        Where what does not fit the device goes; None: nowhere, the load is refused.
    offload_folder
        The folder for weights on disk that are not stored as they are used.
    device_map
        The caller's own map.
    """

    offload: Offload | None = None
    offload_folder: str | None = None
    device_map: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, offload: Any, offload_folder: Any, device_map: Any) -> Placement:
        """What these arguments say.

        Raises
        ------
        SettingsError
            One has no meaning, or two contradict each other.
        """
        if offload is not None and offload not in tuple(Offload):
            raise SettingsError(f"offload={offload!r}: {' or '.join(Offload)}")
        if device_map is not None and not isinstance(device_map, Mapping):
            raise SettingsError(
                f"device_map={device_map!r}: give a map of modules to devices, or say device=... for one device and"
                " offload='cpu' or 'disk' for what does not fit it"
            )
        if offload is not None and device_map is not None:
            raise SettingsError("offload plans a device map of its own; give offload or device_map")
        folder = None if offload_folder is None else os.fspath(offload_folder)
        return cls(offload=offload and Offload(offload), offload_folder=folder, device_map=device_map)

    def settings(self, session: LoadSession) -> dict[str, Any]:
        """What `from_pretrained` is told: a device map, or how to plan one.

        Raises
        ------
        UnsupportedError
            There is nothing to gain by offloading there.
        SettingsError
            The memory is not known.
        """
        device = session.platform.device
        if self.device_map is not None:
            return {"device_map": {name: _plain(device) for name, device in self.device_map.items()}}
        if self.offload is None:
            return {"device_map": None if device == "cpu" else {"": device}}
        if self.offload is Offload.CPU:
            _refuse_same_memory(session)
        room = session.room()
        unknown = [name for name, nbytes in room.items() if nbytes is None]
        if unknown:
            raise SettingsError(f"the machine does not tell how much memory {unknown[0]} has; set a memory budget")
        # With one device there is nothing to balance: `sequential` fills it, then the processor, then the disk.
        return {"device_map": "sequential", "max_memory": {_key_of(name): nbytes for name, nbytes in room.items()}}

    def alternatives(self) -> Iterator[Placement]:
        """The ways of offloading what does not fit, where the caller has said nothing of it."""
        if self.offload is None and self.device_map is None:
            yield from (replace(self, offload=offload) for offload in Offload)

    def planned_devices(self, model: Any, load_config: Any, session: LoadSession) -> dict[str, Any]:
        """The map that the library would plan of `model`; raises as `settings`."""
        settings = self.settings(session)
        devices: dict[str, Any] = _get_device_map(
            model, settings["device_map"], settings["max_memory"], load_config.hf_quantizer
        )
        return devices

    def as_remedy(self, plan: LoadPlan) -> Remedy:
        """What to do to load by such a plan, and what it takes of each memory."""
        sizes = {name: size for name, size in plan.forecast.final_bytes_by_device.items() if name != DISK}
        parts = ", ".join(f"{format_bytes(size)} on {name}" for name, size in sizes.items())
        where = "in the processor's memory" if self.offload is Offload.CPU else "on disk"
        folder = ", offload_folder=..." if self.offload is Offload.DISK else ""
        text = f"leave {where} what does not fit (offload='{self.offload}'{folder}): {parts}"
        return Remedy("offload", text, plan.forecast.peak_bytes)

    def check(self, model: Any, load_config: Any, session: LoadSession) -> None:
        """Return if the map that was planned or given can serve the model, which is on the meta device.

        Raises
        ------
        SettingsError
            The caller's map names what the model does not have, or leaves some of it out.
        UnsupportedError
            Tensors that are tied are not on disk together.
        InsufficientMemoryError
            A piece that stays whole does not fit the device that computes, or more than two memories are needed.
        """
        if load_config.device_map is None:
            return
        devices = DeviceMap(load_config.device_map, session.platform.device)
        if self.device_map is not None:
            _check_names(self.device_map, devices, model)
        _check_ties(devices, model)
        if self.offload is not None and devices.places != {session.platform.device}:
            self._check_room(model, load_config, devices, session)

    def _check_room(self, model: Any, load_config: Any, devices: DeviceMap, session: LoadSession) -> None:
        room = {name: nbytes or 0 for name, nbytes in session.room().items()}
        device = session.platform.device
        sizes, _ = compute_module_sizes(model, load_config.hf_quantizer, only_modules=False)
        whole = set(model._no_split_modules or ())
        largest, names = get_max_layer_size(list(model.named_children()), sizes, whole)
        if largest > room[device] or (device != "cpu" and device not in devices.places):
            pieces = 1 if device == "cpu" else 2
            raise InsufficientMemoryError(
                f"{names[0]} is computed as one piece of {format_bytes(largest)}; {device} has room for"
                f" {format_bytes(room[device])} and needs it for {pieces} of them, so offloading does not help. Nothing"
                " was read. Stop other processes, choose a smaller dtype, or allow more with a larger memory budget",
                needed_bytes=pieces * largest,
                available_bytes=room[device],
                source=f"the budget of {device}",
                largest=[(name, sizes[name]) for name in names[:_SHOWN]],
            )
        if self.offload is Offload.CPU and DISK in devices.places:
            total, available = sizes[""], sum(room.values())
            raise InsufficientMemoryError(
                f"the model needs {format_bytes(total)}; {device} and the processor's memory have room for"
                f" {format_bytes(available)} together, less what a piece on its way to {device} takes. Nothing was"
                " read. Use offload='disk' with an offload_folder, choose a smaller dtype, or allow more memory",
                needed_bytes=total,
                available_bytes=available,
                source=f"the budgets of {' and '.join(room)}",
            )

    def check_plan(self, plan: LoadPlan, model: Any) -> None:
        """Return if everything on disk comes from the checkpoint.

        Raises
        ------
        UnsupportedError
            A tensor that the model initialises would have to be on disk.
        """
        ties = _ties_of(model)
        filled = {name for target in plan.filled for name in (target.name, *target.aliases)}
        absent = [
            name
            for name in plan.left_to_owner
            if plan.targets[name].device == DISK and not filled & ties.get(name, {name})
        ]
        if absent:
            raise UnsupportedError(
                f"the checkpoint lacks {', '.join(absent[:_SHOWN])}, which the model initialises in memory, and which"
                " would be on disk; give a device_map that keeps them in memory"
            )


def _refuse_same_memory(session: LoadSession) -> None:
    platform = session.platform
    if platform.kind is PlatformClass.UNIFIED:
        raise UnsupportedError(
            f"offload='cpu' gains nothing here: {platform.device} and the processor share one memory"
            f" ({platform.evidence}). Use offload='disk' with an offload_folder, or a smaller dtype"
        )
    if platform.kind is PlatformClass.CPU:
        raise UnsupportedError(
            "offload='cpu' gains nothing here: the model goes to the processor's memory already. Use offload='disk'"
            " with an offload_folder, or a smaller dtype"
        )


def _plain(device: Any) -> Any:
    """As accelerate compares and opens devices: by name."""
    return str(device) if isinstance(device, torch.device) else device


def _key_of(device: str) -> int | str:
    """The device as the planner's `max_memory` calls it: accelerators by number."""
    found = torch.device(device)
    return found.type if found.type in ("cpu", "mps") else found.index or 0


def _check_names(given: Mapping[str, Any], devices: DeviceMap, model: Any) -> None:
    tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    known = {name for name, _ in model.named_modules()} | set(tensors)
    foreign = [name for name in given if name not in known]
    if foreign:
        raise SettingsError(f"device_map: the model has no module {', '.join(foreign[:_SHOWN])}")
    for name in given:
        above = next((parent for parent in _parents(name) if parent != name and parent in given), None)
        if above is not None and devices.device_of(above) != devices.device_of(name):
            whole = above or "the model"
            raise SettingsError(
                f"device_map: {name} lies in {whole}, which goes elsewhere; name the modules of {whole} one by one"
            )
    outside = getattr(model, "_no_placement_params", None) or ()
    left_out = [name for name in tensors if devices.device_of(name) is None and not name.endswith(tuple(outside))]
    if left_out:
        more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
        raise SettingsError(f"device_map: no device for {', '.join(left_out[:_SHOWN])}{more}; add their modules")


def _ties_of(model: Any) -> dict[str, set[str]]:
    """By name, all names that the model ties together."""
    groups: dict[str, set[str]] = {}
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        group = groups.setdefault(source, {source})
        group.add(name)
        groups[name] = group
    return groups


def _check_ties(devices: DeviceMap, model: Any) -> None:
    for name, group in _ties_of(model).items():
        places = {devices.device_of(member) for member in group}
        if len(places) > 1 and DISK in places:
            others = ", ".join(sorted(group - {name}))
            raise UnsupportedError(
                f"device_map: {name} is tied to {others}; tied tensors are on disk together or not at all"
            )
