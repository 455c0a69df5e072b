"""Which file system a path lies on. Linux tells; elsewhere nobody is asked.

A descriptor knows its mount (`mnt_id` in `/proc/self/fdinfo`, proc(5)), which holds where a device number does not
(overlays, btrfs) and where the mounts' paths do not (a mount below another that hides it).
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["file_system_of"]

_PROC = Path("/proc/self")


def file_system_of(path: str | Path) -> str | None:
    """The type of the file system that holds an existing path, as `ext4` or `nfs4`; None where nobody tells."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (OSError, AttributeError):  # O_PATH is Linux's
        return None
    try:
        facts = (_PROC / "fdinfo" / str(descriptor)).read_text()
        mounts = (_PROC / "mountinfo").read_text()
    except OSError:
        return None
    finally:
        os.close(descriptor)
    mount = next((line.split()[1] for line in facts.splitlines() if line.startswith("mnt_id:")), None)
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[0] == mount:
            return after.split()[0]
    return None
