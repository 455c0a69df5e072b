"""One measured run: in a fresh process of a memory cgroup of its own, from a page cache counted to be cold or warm.

The parent's side: it prepares the page cache, starts the process, and judges whether the run began as wanted. The
process runs a program that takes `--child REQUEST` (JSON) and prints its figures as the last line; in it counts
`meter`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from umem.errors import RunFailedError
from umem.measurement.cgroups import MemoryGroup, new_memory_group
from umem.measurement.page_cache import is_as_wanted, prepare_cache

__all__ = ["CheckedRun", "Facts", "Watch", "run_checked", "run_fresh", "shuffled"]

_TRIES = 3
_Item = TypeVar("_Item")
Facts = dict[str, Any]

#: Given a process's number and when it was started (`time.monotonic()`), watches it while the context is open.
Watch = Callable[[int, float], AbstractContextManager[object]]


class CheckedRun(NamedTuple):
    """A run whose page cache was as wanted at its start, and the cached fractions of runs that were not.

    `facts` is None if no try began as wanted.
    """

    facts: Facts | None
    rejected: list[float]


def shuffled(items: Sequence[_Item], number: int) -> list[_Item]:
    """The items in the order of round `number`: another one every other time, and that backwards in between.

    What ran just before decides how much memory lies ready, so no item should always come after the same one. Rounds
    of the same number have the same order everywhere.
    """
    order = list(items)
    random.Random(number // 2).shuffle(order)  # noqa: S311 - an order, no secret
    return order[::-1] if number % 2 else order


def run_checked(
    program: Sequence[str],
    request: Mapping[str, Any],
    *,
    files: Sequence[Path],
    cache: str,
    environment: Mapping[str, str] | None = None,
    limit_bytes: int | None = None,
    timeout_s: float | None = None,
    watch: Watch | None = None,
) -> CheckedRun:
    """`run_fresh` with `files` evicted from the page cache or read into it; done anew if the child finds otherwise.

    Where the system cannot count cached pages (before Linux 6.5), a run is taken as it is.
    """
    rejected: list[float] = []
    while len(rejected) < _TRIES:
        prepare_cache(files, cache)
        whole = {**request, "files": [str(path) for path in files]}
        facts = run_fresh(
            program, whole, environment=environment, limit_bytes=limit_bytes, timeout_s=timeout_s, watch=watch
        )
        fraction = facts["cached_fraction"]
        if is_as_wanted(fraction, cache):
            return CheckedRun(facts, rejected)
        rejected.append(fraction)
    return CheckedRun(None, rejected)


def run_fresh(
    program: Sequence[str],
    request: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    limit_bytes: int | None = None,
    timeout_s: float | None = None,
    watch: Watch | None = None,
) -> Facts:
    """What `python PROGRAM --child REQUEST` prints as its last line, run in a fresh process of a fresh memory cgroup.

    Parameters
    ----------
    program
        A script's path, or `-m` and a module.

    Raises
    ------
    RunFailedError
        It was killed, failed or took longer than `timeout_s`; or a limit is asked for and no cgroup can be made.
    """
    with new_memory_group(f"umem-measure-{os.getpid()}") as group:
        if limit_bytes is not None:
            if group is None:
                raise RunFailedError("no memory cgroup can be made to limit it; that needs root")
            group.limit(limit_bytes)
        place = None if group is None else [str(group.path), group.version]
        started_s = time.monotonic()
        whole = json.dumps({**request, "group": place, "started_s": started_s})
        with _started([sys.executable, *program, "--child", whole], group, environment or {}) as process:
            try:
                with watch(process.pid, started_s) if watch is not None else contextlib.nullcontext():
                    output, complaints = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise RunFailedError(f"not done after {timeout_s:.0f} s") from None
    if process.returncode == -signal.SIGKILL:
        raise RunFailedError("killed, as the kernel does when memory is out")
    if process.returncode != 0:
        raise RunFailedError(_last_words(complaints) or f"exit status {process.returncode}")
    facts: Facts = json.loads(output.splitlines()[-1])
    return facts


def _last_words(complaints: str) -> str:
    """The last line that is no continuation of another: of a traceback, the error and the first line of its message."""
    lines = [line for line in complaints.splitlines() if line.strip() and not line[0].isspace()]
    return lines[-1] if lines else complaints.strip()


@contextlib.contextmanager
def _started(
    command: Sequence[str], group: MemoryGroup | None, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process of the group that ends with the block. Interrupts wait until there is something to end."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

    def enter() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if group is not None:
            group.join()

    try:
        process = subprocess.Popen(  # noqa: S603 - this interpreter, and a program of umem's own
            command,
            preexec_fn=enter,  # noqa: PLW1509 - this process has one thread
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is this process's to handle
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(environment),
        )
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            yield process
        finally:
            with process, contextlib.suppress(ProcessLookupError):  # closes its pipes, and waits for it
                os.killpg(process.pid, signal.SIGKILL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
