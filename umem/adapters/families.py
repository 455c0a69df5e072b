"""Names: which stored tensor belongs to which target, for modules whose checkpoints hold what they have.

Renaming is by regular expressions, as in `key_mapping` of the frameworks. Conversions between layouts are
`layout`'s and the hosts' business.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping

from umem.checkpoint.entries import Checkpoint
from umem.errors import SettingsError
from umem.planning.targets import Targets
from umem.planning.views import View
from umem.planning.writes import Adaptation, Write

__all__ = ["by_name", "renamed"]


def by_name(
    checkpoint: Checkpoint,
    targets: Targets,
    key_mapping: Mapping[str, str] | None = None,
    *,
    taken: Collection[str] = (),
    adaptation: Adaptation | None = None,
) -> Adaptation:
    """Every stored tensor fills the target of its name.

    Parameters
    ----------
    key_mapping
        Regular expression -> replacement; all are applied to each stored name, in order, as `re.sub` does.
    taken, adaptation
        Stored names that rules have used, and what they gave; the rest is added to it.

    Raises
    ------
    SettingsError
        An expression cannot be read.
    """
    adaptation = adaptation or Adaptation([], [], [], [])
    sources: dict[str, str] = {}
    for stored_name, entry in checkpoint.entries.items():
        if stored_name in taken:
            continue
        name = renamed(stored_name, key_mapping)
        if name not in targets:
            adaptation.unexpected.append(stored_name)
            continue
        other = sources.setdefault(name, stored_name)
        if other != stored_name:
            raise SettingsError(f"key_mapping gives {other} and {stored_name} the same name, {name}")
        if targets[name].shape != entry.shape:
            found, wanted = str(list(entry.shape)), str(list(targets[name].shape))
            adaptation.mismatched.append((name, found, wanted))
        else:
            adaptation.writes.append(
                Write(entry, View.whole(entry.shape, entry.strides), name, View.whole(entry.shape))
            )
    return adaptation


def renamed(name: str, key_mapping: Mapping[str, str] | None) -> str:
    """`name` after every expression of `key_mapping`, in order. `SettingsError` where one cannot be read."""
    for pattern, replacement in (key_mapping or {}).items():
        name = _compiled(pattern).sub(replacement, name)
    return name


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SettingsError(f"key_mapping: {pattern!r} is no regular expression: {error}") from None
