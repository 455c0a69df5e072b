"""Where umem steps into transformers: `from_pretrained` runs as it is, with its weight-loading step replaced.

Two functions of the library are replaced while at least one umem load runs: the one that finds a checkpoint's
files, and the one that loads them into a model. Both look at the calling context first: threads and tasks that do
not load through umem get the library's own, and so do models that a load builds on the way from another path.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from transformers import modeling_utils

from umem.errors import UnsupportedError

__all__ = ["LoadStep", "replaced_loading"]

#: Given the model on the meta device and the library's `LoadStateDictConfig`, fills the model and gives what the
#: library expects of this step: a `LoadStateDictInfo`, and where to find the weights that are on disk, or None.
LoadStep = Callable[[modeling_utils.PreTrainedModel, Any], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class _Request:
    source: str
    files: Sequence[str]
    step: LoadStep


_request: ContextVar[_Request | None] = ContextVar("umem_transformers_request", default=None)
_lock = threading.Lock()
_users: list[object] = []
_find_files = modeling_utils._get_resolved_checkpoint_files
_load_weights = modeling_utils.PreTrainedModel._load_pretrained_model


@contextlib.contextmanager
def replaced_loading(source: str, files: Sequence[str], step: LoadStep) -> Iterator[None]:
    """Within: a `from_pretrained(source)` of this context loads `files` by `step`."""
    token = _request.set(_Request(source, files, step))
    with _lock:
        _users.append(token)
        _put(_files_of_request, _load_by_request)
    try:
        yield
    finally:
        with _lock:
            _users.remove(token)
            if not _users:
                _put(_find_files, _load_weights)
        _request.reset(token)


def _put(find_files: Callable[..., Any], load_weights: Callable[..., Any]) -> None:
    modeling_utils._get_resolved_checkpoint_files = find_files
    modeling_utils.PreTrainedModel._load_pretrained_model = staticmethod(load_weights)  # type: ignore[method-assign]


def _files_of_request(*args: Any, **kwargs: Any) -> Any:
    request = _request.get()
    asked = kwargs.get("pretrained_model_name_or_path", args[0] if args else None)
    if request is None or str(asked) != request.source:
        return _find_files(*args, **kwargs)
    return list(request.files), None


def _load_by_request(
    model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
) -> tuple[Any, Any]:
    request = _request.get()
    if request is None or str(load_config.pretrained_model_name_or_path) != request.source:
        return _load_weights(model, state_dict, checkpoint_files, load_config, expected_keys)
    if list(checkpoint_files) != list(request.files):
        extra = sorted(set(checkpoint_files) - set(request.files))
        raise UnsupportedError(
            f"{type(model).__name__} wants weights from further files, {extra}, which umem does not load"
        )
    return request.step(model, load_config)
