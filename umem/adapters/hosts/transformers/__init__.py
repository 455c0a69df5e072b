"""transformers: models built by its own `from_pretrained`, filled by umem.

Everything that `from_pretrained` does besides loading weights (config, meta construction, ties, missing heads, buffers,
generation config, eval mode) is the library's own code. Tested with transformers 5.24.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from umem.checkpoint import Checkpoint
from umem.checkpoint.stores import store_of
from umem.checkpoint.urls import is_url, parent, path_of, plain_path, shown
from umem.errors import CheckpointNotFoundError, MissingDependencyError, UnsupportedError
from umem.planning import LoadPlan
from umem.session import LoadSession
from umem.strategies.storage import torch_dtype

try:
    import transformers
except ImportError as error:
    raise MissingDependencyError("loading a model needs transformers 5: pip install 'umem[transformers]'") from error

from umem.adapters.hosts.transformers.loading import TransformersLoad
from umem.adapters.hosts.transformers.placement import Placement
from umem.adapters.hosts.transformers.seam import LoadStep, replaced_loading

__all__ = ["load_model", "plan_model"]

#: In the order in which a checkpoint of a type that has several kinds of models is taken for one.
_AUTO_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSeq2SeqLM",
    "AutoModelForObjectDetection",
    "AutoModelForPreTraining",
    "AutoModel",
)


#: What the library reads to build a model, besides the weights.
_CONFIGS = ("config.json", "generation_config.json")


class _PlannedError(Exception):
    """Carries a plan out of the library, which stops there."""

    def __init__(self, plan: LoadPlan) -> None:
        self.plan = plan


def load_model(
    session: LoadSession,
    path_or_id: str,
    *,
    dtype: Any,
    allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
    model_class: Any = None,
    offload: Any = None,
    offload_folder: Any = None,
    device_map: Any = None,
    **settings: Any,
) -> Any:
    """The model of the checkpoint, loaded. `model_class` is a model or Auto class; None takes what the config names.

    `offload`, `offload_folder` and `device_map` are as for `umem.load`.
    """
    placement = Placement.of(offload, offload_folder, device_map)
    where = placement.settings(session)
    path_or_id = plain_path(path_or_id)
    checkpoint = _opened(session, path_or_id, settings)
    job = TransformersLoad(session, checkpoint, allow_missing, allow_unexpected, placement)
    try:
        model = _from_pretrained(session, path_or_id, checkpoint, job.run, dtype, model_class, settings | where)
    except BaseException:
        job.discard()
        raise
    if not job.finished:
        raise UnsupportedError(f"{path_or_id}: the library did not come to load these weights, but others")
    if is_url(path_or_id):
        model.name_or_path = model.config._name_or_path = shown(path_or_id)
    return model


def plan_model(
    session: LoadSession,
    path_or_id: str,
    *,
    dtype: Any,
    allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
    model_class: Any = None,
    offload: Any = None,
    offload_folder: Any = None,
    device_map: Any = None,
    **settings: Any,
) -> LoadPlan:
    """The plan of the same load. The library runs up to its weight-loading step, with the model on the meta device."""
    placement = Placement.of(offload, offload_folder, device_map)
    where = placement.settings(session)
    path_or_id = plain_path(path_or_id)
    checkpoint = _opened(session, path_or_id, settings)
    job = TransformersLoad(session, checkpoint, allow_missing, allow_unexpected, placement)

    def stop_with_plan(model: Any, load_config: Any) -> Any:
        raise _PlannedError(job.plan(model, load_config))

    try:
        _from_pretrained(session, path_or_id, checkpoint, stop_with_plan, dtype, model_class, settings | where)
    except _PlannedError as planned:
        return planned.plan
    raise UnsupportedError(f"{path_or_id}: the library did not come to load any weights")


def _opened(session: LoadSession, path_or_id: str, settings: Mapping[str, Any]) -> Checkpoint:
    subfolder = settings.get("subfolder") or ""
    if subfolder and not os.path.isdir(path_or_id):
        raise UnsupportedError("subfolder is for local directories; give the folder's own path or URL")
    if settings.get("trust_remote_code") and is_url(path_or_id):
        raise UnsupportedError("model code is not taken from URLs; download the directory and give its path")
    path = os.path.join(path_or_id, subfolder) if subfolder else path_or_id
    checkpoint = session.open(path, revision=settings.get("revision"))
    if all(os.path.basename(path_of(shard.path)).startswith("adapter_model") for shard in checkpoint.shards):
        raise UnsupportedError(f"{path}: this is an adapter; load its base model, then umem.load_adapter(model, path)")
    return checkpoint


def _from_pretrained(
    session: LoadSession,
    path_or_id: str,
    checkpoint: Checkpoint,
    step: LoadStep,
    dtype: Any,
    model_class: Any,
    settings: dict[str, Any],
) -> Any:
    files = [shard.path for shard in checkpoint.shards]
    with session.phase("build"), _build_files(path_or_id, settings) as source, replaced_loading(source, files, step):
        chosen = model_class or _class_of(source, settings)
        if dtype == "auto" and is_url(path_or_id):
            dtype = _dtype_of(source, checkpoint)
        return chosen.from_pretrained(source, dtype=dtype, **settings)


@contextlib.contextmanager
def _build_files(path_or_id: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """What the library builds the model from: a local directory, a hub id, or copies of the configs behind a URL."""
    if is_url(path_or_id):
        from umem.checkpoint.stores.remote import local_copies

        directory = path_or_id if store_of(path_or_id).kind(path_or_id) == "directory" else parent(path_or_id)
        with local_copies(directory, _CONFIGS) as copies:
            _check_config(copies, shown(directory))
            yield copies
        return
    source = os.path.dirname(path_or_id) or "." if os.path.isfile(path_or_id) else path_or_id
    if os.path.isdir(source):
        _check_config(os.path.join(source, settings.get("subfolder") or ""), source)
    yield source


def _check_config(directory: str, called: str) -> None:
    if not os.path.exists(os.path.join(directory, "config.json")):
        raise CheckpointNotFoundError(
            "there is no config.json, so nothing says which model this is; fill a module of your own by umem.load_into",
            path=called,
        )


def _dtype_of(source: str, checkpoint: Checkpoint) -> Any:
    """`auto`, or what it means where no config says it: the library would look into the first file itself."""
    if getattr(transformers.AutoConfig.from_pretrained(source), "dtype", None) is not None:
        return "auto"
    entries = [entry for entry in checkpoint.entries.values() if entry.shard == 0 and entry.dtype.kind == "float"]
    if not path_of(checkpoint.shards[0].path).endswith(".safetensors"):
        return torch_dtype(entries[0].dtype) if entries else "auto"
    first = min(entries, key=lambda entry: entry.name, default=None)
    return torch_dtype(first.dtype) if first is not None else "auto"


def _class_of(source: str, settings: Mapping[str, Any]) -> Any:
    """The class to load: what the config names if its own config class fits, else the first Auto class for the type.

    Some model types borrow another type's class, which would read the config as its own; the Auto classes do not.
    Remote code is loaded by the Auto class that it is registered for.
    """
    names = ("trust_remote_code", "revision", "subfolder", "token", "cache_dir", "local_files_only")
    config = transformers.AutoConfig.from_pretrained(
        source, **{name: settings[name] for name in names if settings.get(name) is not None}
    )
    remote = getattr(config, "auto_map", None) or {}
    if settings.get("trust_remote_code"):
        registered = [name for name in _AUTO_CLASSES if name in remote]
        if registered:
            return getattr(transformers, registered[0])
    architecture = (getattr(config, "architectures", None) or [""])[0]
    named = getattr(transformers, architecture, None)
    if named is not None and isinstance(config, getattr(named, "config_class", None) or ()):
        return named
    loaders = (getattr(transformers, name) for name in _AUTO_CLASSES)
    return next((loader for loader in loaders if type(config) in loader._model_mapping), transformers.AutoModel)
