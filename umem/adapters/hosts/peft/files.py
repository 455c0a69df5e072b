"""Finds an adapter: its config and the one file of weights, in a directory, at a URL, on the hub. Reads no tensors."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

from umem.checkpoint.hub import looks_like_hub_id, snapshot_directory
from umem.checkpoint.stores import LocalStore, Store, store_of
from umem.checkpoint.urls import is_url, plain_path, shown
from umem.errors import CheckpointFormatError, CheckpointNotFoundError, UnsupportedError

__all__ = ["AdapterFiles", "find_adapter"]


class AdapterFiles(NamedTuple):
    """An adapter's parts.

    Attributes
    ----------
    weights
        Path or URL of `adapter_model.safetensors`, or of `adapter_model.bin` where there is no other.
    config
        The library's config object.
    """

    weights: str
    config: Any


def find_adapter(path_or_id: str, revision: str | None = None) -> AdapterFiles:
    """The adapter at a path, URL or hub id.

    Raises
    ------
    CheckpointNotFoundError
        There is no `adapter_config.json` or no file of weights.
    CheckpointFormatError
        The config cannot be read.
    UnsupportedError
        The installed peft does not know this kind of adapter.
    """
    directory = plain_path(path_or_id)
    if not os.path.exists(directory) and looks_like_hub_id(directory):
        directory = snapshot_directory(directory, revision, complete=_is_adapter)
    if is_url(directory):
        from umem.checkpoint.stores.remote import local_copies

        with local_copies(directory, [CONFIG_NAME]) as copies:
            config = _config_in(copies, shown(directory))
    else:
        config = _config_in(directory, directory)
    weights = _weights_in(store_of(directory), directory)
    if weights is None:
        raise CheckpointNotFoundError(
            f"there is neither {SAFETENSORS_WEIGHTS_NAME} nor {WEIGHTS_NAME}; give the directory that peft's"
            " save_pretrained wrote",
            path=shown(directory),
        )
    return AdapterFiles(weights, config)


def _is_adapter(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, CONFIG_NAME)) and _weights_in(LocalStore(), directory) is not None


def _weights_in(store: Store, directory: str) -> str | None:
    paths = (store.joined(directory, name) for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME))
    return next((path for path in paths if store.kind(path) == "file"), None)


def _config_in(directory: str, called: str) -> Any:
    """The config in a local directory, which errors call `called`."""
    path = os.path.join(directory, CONFIG_NAME)
    if not os.path.isfile(path):
        raise CheckpointNotFoundError(
            f"there is no {CONFIG_NAME}, so nothing says what kind of adapter this is; give the directory that peft's"
            " save_pretrained wrote",
            path=called,
        )
    try:
        with open(path, encoding="utf-8") as file:
            declared = json.load(file)
        kind = declared["peft_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointFormatError(f"no adapter config: {type(error).__name__}: {error}", path=called) from None
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        known = ", ".join(sorted(str(name.value) for name in PEFT_TYPE_TO_CONFIG_MAPPING))
        raise UnsupportedError(f"{called}: the installed peft knows no adapter type {kind!r}; it knows {known}")
    try:
        return PEFT_TYPE_TO_CONFIG_MAPPING[kind].from_pretrained(directory)
    except (ValueError, TypeError) as error:
        raise CheckpointFormatError(f"peft cannot read the config: {error}", path=called) from error
