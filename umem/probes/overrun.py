"""Why a load was stopped: what the watch saw, what the load and others took, and the error that says so. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from umem._types import format_bytes
from umem.errors import MemoryOverrunError, ProcessMemory
from umem.probes.policy import Policy
from umem.probes.verdicts import Rule, Sample, Verdict
from umem.settings import MIB

__all__ = ["Cause", "overrun_error"]

_WORTH_NAMING_BYTES = 16 * MIB
_SHARE_OF_TAKEN = 4


class Cause(StrEnum):
    """Who or what was to blame."""

    OWN = "own"
    OTHER_PROCESS = "other_process"
    SWAP = "swap"
    THRASH = "thrash"
    FRAGMENTATION = "fragmentation"
    PRESSURE = "pressure"


_CAUSE_OF_RATE = {
    Rule.SWAP_OUT: Cause.SWAP,
    Rule.SWAP_IN: Cause.SWAP,
    Rule.REFAULTS: Cause.THRASH,
    Rule.MAJOR_FAULTS: Cause.THRASH,
    Rule.COMPACTION_STALLS: Cause.FRAGMENTATION,
    Rule.ALLOCATION_STALLS: Cause.PRESSURE,
    Rule.PRESSURE: Cause.PRESSURE,
}
_ADVICE = {
    Cause.OWN: "Leave a larger reserve (reserve_bytes) or load less at once",
    Cause.OTHER_PROCESS: "Load again when it has finished (wait_for_memory_s waits for memory), or stop it",
    Cause.SWAP: "Stop what else needs memory, or load with a smaller memory_budget_bytes so that it is refused before",
    Cause.THRASH: "Stop what else reads and needs memory, and load again",
    Cause.FRAGMENTATION: "Free memory lies in small pieces: echo 1 > /proc/sys/vm/compact_memory as root, or restart",
    Cause.PRESSURE: "Stop what else needs memory, and load again",
}


class _Taken(NamedTuple):
    """What the load took and what all others took while it ran, in bytes."""

    own: int
    others: int


def overrun_error(
    verdict: Verdict,
    policy: Policy,
    samples: Sequence[Sample],
    verdicts: Sequence[Verdict],
    grown: Mapping[int, int],
    name_of: Callable[[int], str],
) -> MemoryOverrunError:
    """The error of a load that `verdict` stopped.

    Parameters
    ----------
    policy
        The policy that gave it.
    samples, verdicts
        All of them; times count from the first sample.
    grown
        Other processes that hold more than when the load began: number -> bytes.
    name_of
        The name of a process.
    """
    end = next((sample for sample in samples if sample.memory.time_s == verdict.time_s), samples[-1])
    taken = _taken(verdict, policy, end)
    process = _culprit(taken, grown, name_of)
    cause = _cause(verdict, taken)
    started_s = samples[0].memory.time_s
    return MemoryOverrunError(
        f"memory ran short and the load was stopped: {verdict.words}. {_blame(taken, process)} "
        f"What the load had taken is given back. {_ADVICE[cause]}.",
        cause=str(cause),
        rule=str(verdict.rule),
        value=verdict.value,
        threshold=verdict.threshold,
        process=process,
        series=[sample.to_json(samples[0]) for sample in samples],
        verdicts=[said.to_json(started_s) for said in verdicts],
    )


def _taken(verdict: Verdict, policy: Policy, end: Sample) -> _Taken:
    own = max(0, policy.grown_bytes(end))
    falls = [
        then.left_bytes - now.left_bytes
        for then, now in policy.rooms_since_start(end)
        if verdict.where in (now.where, "", "the load's own memory")
    ]
    return _Taken(own, max(0, max(falls, default=0) - own))


def _culprit(taken: _Taken, grown: Mapping[int, int], name_of: Callable[[int], str]) -> ProcessMemory | None:
    """The process that grew most, if others took memory worth naming and it took a good share of that."""
    pid = max(grown, key=lambda pid: grown[pid], default=None)
    if pid is None or min(taken.others, grown[pid]) < max(_WORTH_NAMING_BYTES, taken.others // _SHARE_OF_TAKEN):
        return None
    return ProcessMemory(pid, name_of(pid), grown[pid])


def _cause(verdict: Verdict, taken: _Taken) -> Cause:
    if verdict.rule in _CAUSE_OF_RATE:
        return _CAUSE_OF_RATE[verdict.rule]
    if verdict.rule is Rule.OWN or taken.others < _WORTH_NAMING_BYTES:
        return Cause.OWN
    return Cause.OTHER_PROCESS


def _blame(taken: _Taken, process: ProcessMemory | None) -> str:
    own = f"Since it began it had taken {format_bytes(taken.own)} itself"
    if process is not None:
        return f"{own}, and {process.name} (pid {process.pid}) {format_bytes(process.nbytes)}."
    if taken.others >= _WORTH_NAMING_BYTES:
        return f"{own}; {format_bytes(taken.others)} went elsewhere, to no process that can be looked into."
    return f"{own}, and hardly anything went elsewhere."
