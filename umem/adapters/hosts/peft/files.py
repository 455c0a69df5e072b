"""Finds an adapter: its config and the one file of weights, in a directory or on the hub. Reads no tensor byte."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME

from umem.checkpoint.hub import looks_like_hub_id, snapshot_directory
from umem.errors import CheckpointFormatError, CheckpointNotFoundError, UnsupportedError

__all__ = ["AdapterFiles", "find_adapter"]


class AdapterFiles(NamedTuple):
    """An adapter on this machine.

    Attributes
    ----------
    weights
        Path of `adapter_model.safetensors`, or of `adapter_model.bin` where there is no other.
    config
        The library's config object.
    """

    weights: str
    config: Any


def find_adapter(path_or_id: str, revision: str | None = None) -> AdapterFiles:
    """The adapter at a path or hub id.

    Raises
    ------
    CheckpointNotFoundError
        There is no `adapter_config.json` or no file of weights.
    CheckpointFormatError
        The config cannot be read.
    UnsupportedError
        The installed peft does not know this kind of adapter.
    """
    directory = path_or_id
    if not os.path.isdir(path_or_id) and looks_like_hub_id(path_or_id) and not os.path.exists(path_or_id):
        directory = snapshot_directory(path_or_id, revision, complete=_is_adapter)
    config = _config_in(directory)
    weights = _weights_in(directory)
    if weights is None:
        raise CheckpointNotFoundError(
            f"there is neither {SAFETENSORS_WEIGHTS_NAME} nor {WEIGHTS_NAME}; give the directory that peft's"
            " save_pretrained wrote",
            path=directory,
        )
    return AdapterFiles(weights, config)


def _is_adapter(directory: str) -> bool:
    return os.path.isfile(os.path.join(directory, CONFIG_NAME)) and _weights_in(directory) is not None


def _weights_in(directory: str) -> str | None:
    paths = (os.path.join(directory, name) for name in (SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME))
    return next((path for path in paths if os.path.isfile(path)), None)


def _config_in(directory: str) -> Any:
    path = os.path.join(directory, CONFIG_NAME)
    if not os.path.isfile(path):
        raise CheckpointNotFoundError(
            f"there is no {CONFIG_NAME}, so nothing says what kind of adapter this is; give the directory that peft's"
            " save_pretrained wrote",
            path=directory,
        )
    try:
        with open(path, encoding="utf-8") as file:
            declared = json.load(file)
        kind = declared["peft_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointFormatError(f"no adapter config: {type(error).__name__}: {error}", path=path) from None
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        known = ", ".join(sorted(str(name.value) for name in PEFT_TYPE_TO_CONFIG_MAPPING))
        raise UnsupportedError(f"{path}: the installed peft knows no adapter type {kind!r}; it knows {known}")
    try:
        return PEFT_TYPE_TO_CONFIG_MAPPING[kind].from_pretrained(directory)
    except (ValueError, TypeError) as error:
        raise CheckpointFormatError(f"peft cannot read the config: {error}", path=path) from error
