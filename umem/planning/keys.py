"""Names that differ: what may differ, and which names look alike."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import translate

__all__ = ["near_names", "without"]

_CANDIDATES = 2000
_SHOWN = 10


def without(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that none of the shell-style patterns matches (`score.*`)."""
    if not patterns:
        return list(names)
    allowed = re.compile("|".join(translate(pattern) for pattern in patterns))
    return [name for name in names if allowed.match(name) is None]


def near_names(names: Sequence[str], others: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """For each of the first few names, at most two of `others` that look like it.

    Names of equal numbering and ending are looked at first, so the cost stays bounded for checkpoints of any size.
    """
    by_ending: dict[str, list[str]] = {}
    for other in others:
        by_ending.setdefault(_ending(other), []).append(other)
    everything = [other for group in by_ending.values() for other in group[:_CANDIDATES]][:_CANDIDATES]
    near = {}
    for name in names[:_SHOWN]:
        candidates = by_ending.get(_ending(name), everything)[:_CANDIDATES]
        numbers = re.findall(r"\d+", name)
        numbered = [other for other in candidates if re.findall(r"\d+", other) == numbers]
        close = difflib.get_close_matches(name, numbered or candidates, n=2, cutoff=0.6)
        if close:
            near[name] = tuple(close)
    return near


def _ending(name: str) -> str:
    return name.rpartition(".")[2]
