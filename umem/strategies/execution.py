"""How to run a plan, and what running it gave. Data, and what is asked again and again while it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from umem.checkpoint.offload import OffloadFile
from umem.checkpoint.pagecache import CachePolicy
from umem.checkpoint.readers import Reader
from umem.probes.monitor import LoadWatch, Unwatched
from umem.probes.verdicts import Sample, Verdict
from umem.strategies.base import Converter

__all__ = ["Execution", "Outcome", "Progress"]


class Progress(NamedTuple):
    """How far a load is: bytes read, of how many, since when, and the bytes live in the window.

    `waiting` says what a load waits for before it reads anything; it is empty from then on. `sample` is memory now, and
    `verdicts` the changes of level so far, where the load is watched.
    """

    read_bytes: int
    total_bytes: int
    elapsed_s: float
    window_bytes: int
    waiting: str = ""
    sample: Sample | None = None
    verdicts: tuple[Verdict, ...] = ()


@dataclass(slots=True)
class Outcome:
    """What running a plan gave.

    Attributes
    ----------
    tensors
        Target name -> final tensor.
    seconds
        Wall time by phase: allocate, read, convert.
    thread_seconds
        Time summed over the threads: waiting for the drive, delivering.
    window_peak_bytes
        The most that was live in the window.
    huge_pages
        Whether final storage asked for huge pages; None where that was left to the system.
    touched
        Targets that have been written to, also by a load that failed.
    copier, copier_reason
        How blocks reached final storage, and why so, for people.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    thread_seconds: dict[str, float] = field(default_factory=lambda: {"read": 0.0, "deliver": 0.0})
    window_peak_bytes: int = 0
    huge_pages: bool | None = None
    touched: set[str] = field(default_factory=set)
    copier: str = "none"
    copier_reason: str = "no blocks were read"


@dataclass(frozen=True, slots=True)
class Execution:
    """How to run a plan.

    Attributes
    ----------
    window_bytes, block_bytes
        As in the settings.
    readers
        The reader of each shard.
    threads
        How many read; None for as many as the readers like.
    cache_policy
        What stays in the page cache of the files that are read.
    convert
        Runs the materialized groups' conversions; needed only where the plan has any.
    progress
        Called about ten times a second, from the calling thread.
    watch
        Says when to go on slower, and when to stop.
    offload
        The file that holds targets on disk which groups with writes fill; needed only where the plan has any.
    """

    window_bytes: int
    block_bytes: int
    readers: Sequence[Reader]
    threads: int | None = None
    cache_policy: CachePolicy = CachePolicy.RESTORE
    convert: Converter | None = None
    progress: Callable[[Progress], None] | None = None
    watch: LoadWatch = field(default_factory=Unwatched)
    offload: OffloadFile | None = None

    @property
    def wanted_threads(self) -> int:
        """How many threads should read, window permitting."""
        return self.threads or max((reader.pace.threads for reader in self.readers), default=1)

    @property
    def copies_in_flight(self) -> int:
        """How many more times a block in flight is held: by its reader, and as pages of the offload file."""
        return any(reader.holds_copy for reader in self.readers) + (self.offload is not None)
