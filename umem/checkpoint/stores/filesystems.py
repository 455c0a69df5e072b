"""The fsspec file system of a URL. fsspec's settings hold: `FSSPEC_*` variables, its config files, the drivers' own.

File systems that are asynchronous inside (http, s3, gs, az) are one object for all threads and take requests from all
of them; fsspec gives each thread its own object of the others.
"""

from __future__ import annotations

from typing import Any

from umem.checkpoint.urls import protocol_of, shown
from umem.errors import CheckpointNotFoundError, MissingDependencyError, UnsupportedError

__all__ = ["filesystem_of"]


def filesystem_of(url: str) -> tuple[Any, str]:
    """The file system and the path in it.

    Raises
    ------
    MissingDependencyError
        fsspec or the driver of this protocol is not installed; the message names the package.
    UnsupportedError
        fsspec knows no such protocol, or its settings for it are wrong.
    CheckpointNotFoundError
        A `hf://` URL: the hub's models are read from its cache, by their ids.
    """
    protocol = protocol_of(url)
    if protocol == "hf":
        raise CheckpointNotFoundError(
            "models of the hub go through its cache; give the id alone (org/name)", path=shown(url)
        )
    try:
        from fsspec.core import url_to_fs
        from fsspec.registry import known_implementations, registry
    except ImportError:
        raise MissingDependencyError(f"{shown(url)}: URLs need fsspec: pip install fsspec") from None
    if protocol not in known_implementations and protocol not in registry:
        raise UnsupportedError(
            f"{shown(url)}: fsspec knows no protocol {protocol!r}; fsspec.available_protocols() lists what it knows"
        )
    try:
        filesystem, path = url_to_fs(url)
    except ImportError as error:
        package = _package(error)
        raise MissingDependencyError(f"{shown(url)}: {protocol} URLs need {package}: pip install {package}") from error
    except (TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{shown(url)}: its file system cannot be made with the settings that fsspec has for it: {error}"
        ) from error
    return filesystem, path


def _package(error: ImportError) -> str:
    """The package whose absence is behind an error of fsspec's registry."""
    behind = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    return (behind.name or str(error)).partition(".")[0]
