"""peft: adapters injected by its own code, filled or merged by umem. Tested with peft 0.21."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from umem.errors import MissingDependencyError
from umem.session import LoadSession

try:
    import peft  # noqa: F401
except ImportError as error:
    raise MissingDependencyError("loading an adapter needs peft: pip install 'umem[peft]'") from error

from umem.adapters.hosts.peft.files import find_adapter
from umem.adapters.hosts.peft.loading import AdapterLoad

__all__ = ["load_adapter"]


def load_adapter(
    session: LoadSession,
    model: Any,
    path_or_id: str,
    *,
    merge: bool,
    adapter_name: str,
    is_trainable: bool,
    autocast_adapter_dtype: bool,
    allow_unexpected: Sequence[str],
    revision: str | None,
) -> Any:
    """The `PeftModel` around `model`, or `model` itself with the adapter merged into it."""
    files = find_adapter(path_or_id, revision)
    files.config.inference_mode = not is_trainable
    checkpoint = session.open(files.weights)
    job = AdapterLoad(
        session,
        checkpoint,
        model,
        files.config,
        adapter_name=adapter_name,
        autocast=autocast_adapter_dtype,
        allow_unexpected=allow_unexpected,
    )
    return job.merge() if merge else job.load()
