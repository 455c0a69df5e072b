"""Hub ids, resolved to a local directory by huggingface_hub: its cache first, then a download of the weights alone."""

from __future__ import annotations

import re
from collections.abc import Callable

from umem.errors import CheckpointNotFoundError, MissingDependencyError

__all__ = ["looks_like_hub_id", "snapshot_directory"]

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_SAFETENSORS_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json"]
_TORCH_FILES = ["pytorch_model*.bin", "pytorch_model*.bin.index.json"]


def looks_like_hub_id(text: str) -> bool:
    """Whether `text` has the form of a hub id, `name` or `org/name`."""
    return _HUB_ID.match(text) is not None


def snapshot_directory(identifier: str, revision: str | None, *, complete: Callable[[str], bool]) -> str:
    """The local directory of a hub snapshot.

    `complete` tells whether a directory holds weights. What the cache has is taken when it is complete; otherwise the
    weights are downloaded, unless huggingface_hub is set offline (`HF_HUB_OFFLINE`).

    Raises
    ------
    MissingDependencyError
        huggingface_hub is not installed.
    CheckpointNotFoundError
        Neither cache nor hub has it.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise MissingDependencyError(
            f"{identifier} is no local path; hub ids need huggingface_hub: pip install 'umem[transformers]'"
        ) from None
    try:
        cached = str(snapshot_download(identifier, revision=revision, local_files_only=True))
        if complete(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    cause: Exception | None = None
    for wanted in (_SAFETENSORS_FILES, _TORCH_FILES):
        try:
            directory = str(snapshot_download(identifier, revision=revision, allow_patterns=wanted))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            cause = error
            break
        if complete(directory):
            return directory
    why = f"the hub did not give it ({type(cause).__name__})" if cause else "what the hub gave holds no weights"
    raise CheckpointNotFoundError(
        f"no such path here, no weights in the hub's cache, and {why}."
        " Check the spelling, the network, HF_HUB_OFFLINE and, for gated models, HF_TOKEN",
        path=identifier,
    ) from cause
