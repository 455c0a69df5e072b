"""load, load_into, load_adapter, plan, probe: wires the parts, decides nothing."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from umem._types import DType
from umem.checkpoint import Checkpoint
from umem.checkpoint.stores import store_of
from umem.checkpoint.urls import plain_path
from umem.errors import KeyMismatchError, SettingsError
from umem.machine import MachineSnapshot
from umem.planning import Adaptation, LoadPlan, Target, Targets, make_plan, places_of, targets_of
from umem.planning.keys import without
from umem.report.model import LoadReport
from umem.session import LoadSession, ProgressCallback, probe
from umem.settings import LoadSettings

if TYPE_CHECKING:
    import torch

    from umem.adapters.rules import Rule

__all__ = ["load", "load_adapter", "load_into", "plan", "probe"]

_HOSTS = {"transformers": "umem.adapters.hosts.transformers"}
_ADAPTER_HOST = "umem.adapters.hosts.peft"


@overload
def load(
    path_or_id: str | os.PathLike[str], *, return_report: Literal[False] = ..., **settings: Any
) -> torch.nn.Module: ...
@overload
def load(
    path_or_id: str | os.PathLike[str], *, return_report: Literal[True], **settings: Any
) -> tuple[torch.nn.Module, LoadReport]: ...
def load(
    path_or_id: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    settings: LoadSettings | None = None,
    progress: ProgressCallback | None = None,
    return_report: bool = False,
    host: str = "transformers",
    **host_settings: Any,
) -> torch.nn.Module | tuple[torch.nn.Module, LoadReport]:
    """Build the model that a checkpoint belongs to and load it: what `from_pretrained` gives, bit for bit.

    Parameters
    ----------
    path_or_id
        A directory with `config.json` and weights, the URL of one (`s3://bucket/model`), or a hub id.
    device
        Where the model goes; `auto` is the best device there is.
    dtype
        `auto` for what the config says, or a torch dtype.
    allow_missing
        Patterns (`score.*`) of parameters that the checkpoint may lack; the framework initialises them.
    allow_unexpected
        Patterns of stored tensors that may be left out.
    settings
        Window, budget, threads; those of the environment where None.
    progress
        Called about ten times a second while bytes move; `umem.tqdm_progress()` shows a bar.
    return_report
        Give `(model, report)`.
    host
        The framework that builds the model.
    host_settings
        Handed to the framework: `model_class`, `attn_implementation`, `revision`, `key_mapping`, ...

        For a model that does not fit the device there are with transformers: `offload="cpu"`, which puts the rest into
        the processor's memory where that is another one, or `"disk"`, which puts what is then left on disk;
        `offload_folder`, where weights on disk are written that are not stored as they are used (in a folder of their
        own there, which goes with the model); `device_map`, modules to devices (also `cpu` and `disk`), instead of
        a plan of umem's. The forward pass is then that of accelerate's hooks, and its results are the same.

    Raises
    ------
    CheckpointError, KeyMismatchError, InsufficientMemoryError, InsufficientSpaceError
        Before a tensor byte is read.
    ReadError, MemoryOverrunError
        A read failed, or memory ran short, on the way; everything is freed.
    """
    _check_dtype(dtype)
    with LoadSession(device=str(device), settings=settings, progress=progress) as session:
        model = _host(host).load_model(
            session,
            os.fspath(path_or_id),
            dtype=dtype,
            allow_missing=allow_missing,
            allow_unexpected=allow_unexpected,
            **host_settings,
        )
        return (model, session.report()) if return_report else model


def plan(
    path_or_id: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    settings: LoadSettings | None = None,
    machine: MachineSnapshot | None = None,
    host: str = "transformers",
    **host_settings: Any,
) -> LoadPlan:
    """What `load` would do, without reading a tensor byte or allocating the model. Arguments as for `load`.

    A checkpoint without a `config.json` is planned as it is stored: every tensor is a target of its own.

    Parameters
    ----------
    machine
        Plan for this machine's device instead of one that is here: `umem.MachineSnapshot.load("spark.json")`. Whether
        the plan fits it says `umem.planning.check_budget(plan, machine.budget)`. A quantized checkpoint whose code asks
        for hardware still asks the machine that plans.
    """
    _check_dtype(dtype)
    with LoadSession(device=str(device), settings=settings, machine=machine) as session:
        if _has_model_config(path_or_id):
            planned: LoadPlan = _host(host).plan_model(
                session,
                os.fspath(path_or_id),
                dtype=dtype,
                allow_missing=allow_missing,
                allow_unexpected=allow_unexpected,
                **host_settings,
            )
            return planned
        from umem.adapters.families import by_name

        checkpoint = session.open(path_or_id)
        targets = Targets(
            Target(entry.name, entry.dtype, entry.shape, session.platform.device)
            for entry in checkpoint.entries.values()
        )
        return make_plan(
            checkpoint,
            targets,
            by_name(checkpoint, targets),
            window_bytes=session.settings.window_bytes,
            residency=session.settings.residency,
        )


def _check_dtype(dtype: str | torch.dtype) -> None:
    if dtype != "auto" and DType.from_torch(dtype).kind != "float":
        raise SettingsError(f"dtype={dtype}: a model is loaded as auto, bfloat16, float16, float32 or float64")


def _has_model_config(path_or_id: str | os.PathLike[str]) -> bool:
    path = plain_path(os.fspath(path_or_id))
    store = store_of(path)
    kind = store.kind(path)
    if kind is None:
        return True
    directory = path if kind == "directory" else store.parent(path)
    return store.kind(store.joined(directory, "config.json")) == "file"


def _host(name: str) -> Any:
    if name not in _HOSTS:
        raise SettingsError(f"no host framework is called {name!r}; there are: {', '.join(sorted(_HOSTS))}")
    return importlib.import_module(_HOSTS[name])


def load_into(
    module: torch.nn.Module,
    path_or_id: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
    key_mapping: Mapping[str, str] | None = None,
    rules: Sequence[Rule] = (),
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    settings: LoadSettings | None = None,
    progress: ProgressCallback | None = None,
) -> LoadReport:
    """Fill any module from a checkpoint: live tensors in place, tensors on the meta device with new storage.

    Parameters
    ----------
    path_or_id
        A directory, a file, a URL (`s3://bucket/model`, `https://host/model.safetensors`), or a hub id.
    device
        Where meta tensors go; live ones stay where they are.
    dtype
        None keeps the module's dtypes; `auto` takes the stored ones and a torch dtype that one, both for floating-point
        tensors on the meta device only.
    key_mapping
        Regular expression -> replacement, applied to stored names in order.
    rules
        How stored tensors make targets of another layout (`umem.Rule`); held against the names after `key_mapping`.
    allow_missing, allow_unexpected, settings, progress
        As for `load`.

    Raises
    ------
    CheckpointError, KeyMismatchError, InsufficientMemoryError
        Before a tensor byte is read; the module is as it was.
    ReadError, MemoryOverrunError
        A read failed, or memory ran short, on the way. Meta tensors are meta as before; live ones that were written to
        are named in a note of the error and in its `spoiled`.
    """
    from umem.adapters.families import by_name, renamed
    from umem.adapters.install import install, live_tensors, unfillable_buffers
    from umem.adapters.rules import apply_rules

    with LoadSession(device=str(device), settings=settings, progress=progress) as session:
        checkpoint = session.open(path_or_id)
        with session.phase("plan"):
            places = places_of(module)
            live = live_tensors(places)
            targets = targets_of(
                places,
                dtype=_dtype_rule(dtype, checkpoint, live, key_mapping),
                device=lambda _name, own: session.platform.device if own == "meta" else own,
            )
            unfillable = without(unfillable_buffers(places), allow_missing)
            if unfillable:
                raise KeyMismatchError(missing=unfillable)
            adaptation = Adaptation([], [], [], [])
            names = {name: renamed(name, key_mapping) for name in checkpoint.entries}
            taken = apply_rules(rules, checkpoint, names, targets, adaptation)
            load_plan = make_plan(
                checkpoint,
                targets,
                by_name(checkpoint, targets, key_mapping, taken=taken, adaptation=adaptation),
                window_bytes=session.settings.window_bytes,
                live=live.keys(),
                allow_missing=allow_missing,
                allow_unexpected=allow_unexpected,
                residency=session.settings.residency,
            )
        filled = {target.name for target in load_plan.filled}
        tensors = session.run(load_plan, live={name: tensor for name, tensor in live.items() if name in filled})
        with session.phase("install"):
            install(places, targets, {name: tensor for name, tensor in tensors.items() if name not in live})
        return session.report()


@overload
def load_adapter(
    model: torch.nn.Module,
    path_or_id: str | os.PathLike[str],
    *,
    merge: bool = ...,
    adapter_name: str = ...,
    is_trainable: bool = ...,
    autocast_adapter_dtype: bool = ...,
    allow_unexpected: Sequence[str] = ...,
    revision: str | None = ...,
    settings: LoadSettings | None = ...,
    progress: ProgressCallback | None = ...,
    return_report: Literal[False] = ...,
) -> torch.nn.Module: ...
@overload
def load_adapter(
    model: torch.nn.Module,
    path_or_id: str | os.PathLike[str],
    *,
    merge: bool = ...,
    adapter_name: str = ...,
    is_trainable: bool = ...,
    autocast_adapter_dtype: bool = ...,
    allow_unexpected: Sequence[str] = ...,
    revision: str | None = ...,
    settings: LoadSettings | None = ...,
    progress: ProgressCallback | None = ...,
    return_report: Literal[True],
) -> tuple[torch.nn.Module, LoadReport]: ...
def load_adapter(
    model: torch.nn.Module,
    path_or_id: str | os.PathLike[str],
    *,
    merge: bool = False,
    adapter_name: str = "default",
    is_trainable: bool = False,
    autocast_adapter_dtype: bool = True,
    allow_unexpected: Sequence[str] = (),
    revision: str | None = None,
    settings: LoadSettings | None = None,
    progress: ProgressCallback | None = None,
    return_report: bool = False,
) -> torch.nn.Module | tuple[torch.nn.Module, LoadReport]:
    """Load a peft adapter into a model: as modules of its own, or merged into the model's weights.

    With `merge=False` the result is what `peft.PeftModel.from_pretrained(model, path)` gives, bit for bit. With
    `merge=True` it is `model` itself, its module objects, parameters and gradient flags what they were, holding the
    numbers of peft's `merge_and_unload()`. Each weight is changed in place, tile by tile: B[rows] @ A, times scaling,
    is added to the rows of the weight, in the dtypes and the order of operations of peft 0.21 (the product in fp32
    where the adapter is; rounded to the weight's dtype once, by the addition, and before it for embeddings and
    experts). DoRA: (W + BA) times magnitude / norm, in tiles of whole rows. Where a weight fits into one tile
    (some MiB) the bits are peft's, and so they usually are in several. A matrix product of few rows, and on some
    processors one that peft does as a convolution, may be summed in another order, which moves an element by at most
    16 eps, in 16-bit dtypes 1 eps, of the weight's largest. Live
    besides the model are one weight's factors and a tile, within the window.

    Parameters
    ----------
    model
        A base model that has its weights and no adapter yet.
    path_or_id
        The directory of an adapter (`adapter_config.json` and `adapter_model.safetensors` or `.bin`), the URL of one,
        or a hub id.
    merge
        Add the adapter to the weights instead of keeping it beside them. LoRA with DoRA, rsLoRA, patterns, biases,
        `modules_to_save`, `trainable_token_indices` and `target_parameters`.
    adapter_name
        The name that peft keeps the adapter under.
    is_trainable, autocast_adapter_dtype
        As for peft: adapters for training keep their gradients; 16-bit adapters become fp32.
    allow_unexpected
        Patterns of stored tensors that may be left out.
    settings, progress, return_report
        As for `load`.

    Raises
    ------
    CheckpointError, KeyMismatchError, InsufficientMemoryError
        Before a tensor byte is read; the model is as it was.
    UnsupportedError
        This kind of adapter or model cannot be done; the message says why. The model is as it was.
    ReadError, MemoryOverrunError
        A read failed, or memory ran short, on the way. The model has its own modules; weights that have changed are
        named in a note of the error and in its `spoiled`.
    """
    place = next((tensor.device for tensor in model.parameters() if not tensor.is_meta), "cpu")
    with LoadSession(device=str(place), settings=settings, progress=progress) as session:
        loaded: torch.nn.Module = importlib.import_module(_ADAPTER_HOST).load_adapter(
            session,
            model,
            os.fspath(path_or_id),
            merge=merge,
            adapter_name=adapter_name,
            is_trainable=is_trainable,
            autocast_adapter_dtype=autocast_adapter_dtype,
            allow_unexpected=allow_unexpected,
            revision=revision,
        )
        return (loaded, session.report()) if return_report else loaded


def _dtype_rule(
    dtype: str | torch.dtype | None,
    checkpoint: Checkpoint,
    live: Mapping[str, Any],
    key_mapping: Mapping[str, str] | None,
) -> Callable[[str, DType], DType]:
    """Given a target's name and own dtype, its final dtype."""
    from umem.adapters.families import renamed

    if dtype is None:
        return lambda _name, own: own
    stored = (
        {renamed(name, key_mapping): entry.dtype for name, entry in checkpoint.entries.items()}
        if dtype == "auto"
        else {}
    )
    wanted = None if dtype == "auto" else DType.from_torch(dtype)

    def rule(name: str, own: DType) -> DType:
        if name in live or own.kind != "float":
            return own
        return wanted or stored.get(name, own)

    return rule
