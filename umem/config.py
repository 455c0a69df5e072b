"""The settings of a load: one frozen record, and the one place that reads the environment.

What the settings mean for a machine is decided by planning and probes; nothing here samples anything.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from umem._types import format_bytes, parse_bytes, parse_seconds
from umem.errors import ConfigError

__all__ = ["MIB", "LoadConfig", "Residency", "config_from_environment"]

MIB = 1 << 20

#: A window must hold a block for each reader and the tiles of a conversion.
SMALLEST_WINDOW_BYTES = 16 * MIB

#: Environment variable -> field. Values are sizes (`512MiB`), times (`60s`) or whole numbers.
_VARIABLES = {
    "UMEM_WINDOW": "window_bytes",
    "UMEM_MEMORY_BUDGET": "memory_budget_bytes",
    "UMEM_RESERVE": "reserve_bytes",
    "UMEM_IO_THREADS": "io_threads",
    "UMEM_READER": "reader",
    "UMEM_WAIT_FOR_MEMORY": "wait_for_memory_s",
    "UMEM_RESIDENCY": "residency",
}


class Residency(StrEnum):
    """Where the final tensors live: in memory of their own, or in the files' own pages."""

    OWNED = "owned"
    MAPPED = "mapped"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """How to load. Every field has a default that suits most machines.

    Attributes
    ----------
    window_bytes
        The cap on everything live that is not final storage: staging, scratch, reads in flight.
    block_bytes
        The size of one read.
    io_threads
        Threads that read and scatter, no more than the window has room for. None: two to four, by the reader and the
        number of cores; sixteen for URLs.
    memory_budget_bytes
        What the load may take where the model goes: on shared memory and on the processor model and window together,
        on a device with memory of its own the device's. None: what the machine has available.
    reserve_bytes
        Memory that a load leaves free where the model goes. None: by the class of the machine. Shared memory: 4 % of it
        and 4 GiB at least, 10 % on machines below 64 GiB; a device's own memory: 256 MiB; elsewhere 64 MiB.
    wait_for_memory_s
        How long a load that does not fit waits for memory to become free, in seconds, before it is refused.
    reader
        The name of the reader, or `auto`.
    residency
        `owned`: the model has memory of its own. `mapped`: it is the files' own pages, read when they are used; for
        models on the processor that are stored as they are used.
    sample_interval_s
        Seconds between two memory samples of the report.
    """

    window_bytes: int = 64 * MIB
    block_bytes: int = 8 * MIB
    io_threads: int | None = None
    memory_budget_bytes: int | None = None
    reserve_bytes: int | None = None
    wait_for_memory_s: float = 0.0
    reader: str = "auto"
    residency: Residency = Residency.OWNED
    sample_interval_s: float = 0.05

    def __post_init__(self) -> None:
        if self.window_bytes < SMALLEST_WINDOW_BYTES:
            smallest = format_bytes(SMALLEST_WINDOW_BYTES)
            raise ConfigError(f"window_bytes={self.window_bytes}: the window needs at least {smallest}")
        if not 64 * 1024 <= self.block_bytes <= self.window_bytes // 2:
            raise ConfigError(f"block_bytes={self.block_bytes}: a block has 64 KiB at least and half a window at most")
        if self.io_threads is not None and not 1 <= self.io_threads <= 64:
            raise ConfigError(f"io_threads={self.io_threads}: between 1 and 64")
        for name in ("memory_budget_bytes", "reserve_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name}={value}: a size in bytes is not negative")
        if not 0 <= self.wait_for_memory_s < math.inf:
            raise ConfigError(f"wait_for_memory_s={self.wait_for_memory_s}: a time in seconds, 0 for no waiting")
        if self.residency not in tuple(Residency):
            raise ConfigError(f"residency={self.residency!r}: {' or '.join(Residency)}")
        if self.sample_interval_s <= 0:
            raise ConfigError(f"sample_interval_s={self.sample_interval_s}: must be positive")

    def with_changes(self, **changes: Any) -> LoadConfig:
        """A copy with some fields replaced; fields given as None keep their value."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def config_from_environment(environment: Mapping[str, str] = os.environ) -> LoadConfig:
    """The default settings, changed by the `UMEM_*` variables.

    Raises
    ------
    ConfigError
        A value cannot be read, or a variable starts with `UMEM_` and is none that umem knows.
    """
    values: dict[str, object] = {}
    for variable, text in environment.items():
        if not variable.startswith("UMEM_"):
            continue
        if variable not in _VARIABLES:
            raise ConfigError(f"{variable} is no setting of umem; known: {', '.join(sorted(_VARIABLES))}")
        values[_VARIABLES[variable]] = _parsed(variable, text)
    return LoadConfig(**values)  # type: ignore[arg-type]


def _parsed(variable: str, text: str) -> object:
    field = _VARIABLES[variable]
    try:
        if field.endswith("_bytes"):
            return parse_bytes(text)
        if field.endswith("_s"):
            return parse_seconds(text)
        return int(text) if field == "io_threads" else text
    except ValueError as error:
        raise ConfigError(f"{variable}={text!r}: {error}") from None
