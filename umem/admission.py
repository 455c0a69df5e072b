"""Whether a load may begin: the plan held against the machine as it is now, waiting if that was asked for, and a claim.

Checking and claiming are one step among all of this user's loads, so that two do not count the same free memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple, Self

from umem.errors import ProcessMemory, Remedy
from umem.machine import MachineSnapshot, device_key, probe
from umem.planning import Circumstances, Limit, LoadPlan, Shortfall, check_budget
from umem.probes import PlatformClass, PlatformFacts, biggest_processes, device_processes, processes_in_group
from umem.reservations import Claim, Reservation, Reservations
from umem.settings import LoadSettings

__all__ = ["Admission", "Tried", "Waiting", "circumstances", "refuse_unless_fitting"]

#: Gives the remedies that whoever built the model has tried on such a machine; asked only before a refusal.
Tried = Callable[[MachineSnapshot], Iterable[Remedy]]

_POLL_S = 0.5


class Waiting(NamedTuple):
    """A load that waits for memory: what it needs, what there is and from which source, how long, and how long at most.

    Sizes in bytes, times in seconds.
    """

    needed_bytes: int
    available_bytes: int
    source: str
    waited_s: float
    wait_s: float


class Admission:
    """A load's permission to take memory; a context manager that ends its claim.

    Attributes
    ----------
    machine
        The machine as it was when the load was let in.
    """

    def __init__(self, plan: LoadPlan, machine: MachineSnapshot, reservation: Reservation | None) -> None:
        self.machine = machine
        self._plan = plan
        self._reservation = reservation

    @classmethod
    def of(
        cls,
        plan: LoadPlan,
        facts: PlatformFacts,
        settings: LoadSettings,
        *,
        waiting: Callable[[Waiting], None] | None = None,
        reservations: Reservations | None = None,
        tried: Tried = lambda _: (),
    ) -> Self:
        """Let the load in when it fits, for which it may wait `settings.wait_for_memory_s`.

        Parameters
        ----------
        waiting
            Called at each try that fails while there is time. What no waiting can change is refused at once.
        tried
            Gives further remedies for the refusal.

        Raises
        ------
        InsufficientMemoryError
            It does not fit, or still does not when the time is over. Nothing was read.
        """
        reservations = reservations or Reservations.of_this_user()
        started_s = time.monotonic()
        while True:
            with reservations.exclusive():
                machine = probe(facts=facts, settings=settings, reservations=reservations)
                shortfall = machine.budget.shortfall_of(machine.budget.needs_of(plan))
                if shortfall is None:
                    return cls(plan, machine, reservations.reserve(_claim(plan, machine, taken=0.0, placed=False)))
            waited_s = time.monotonic() - started_s
            if waited_s >= settings.wait_for_memory_s or not _may_change(shortfall, machine):
                refuse_unless_fitting(plan, machine, tried)
            if waiting is not None:
                allowance = shortfall.allowance
                sizes = shortfall.needed_bytes, allowance.available_bytes
                waiting(Waiting(*sizes, allowance.source, waited_s, settings.wait_for_memory_s))
            time.sleep(min(_POLL_S, max(0.0, settings.wait_for_memory_s - waited_s)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reservation is not None:
            self._reservation.release()

    def taken(self, fraction: float) -> None:
        """The load has filled that fraction of its final storage; it claims only the rest."""
        if self._reservation is not None:
            self._reservation.shrink(_claim(self._plan, self.machine, taken=fraction, placed=True))


def _may_change(shortfall: Shortfall, machine: MachineSnapshot) -> bool:
    """Whether it could fit once others have given back what they hold; a limit does not grow by waiting."""
    group = machine.memory.cgroup
    sizes = {
        Limit.SYSTEM: machine.memory.total_bytes,
        Limit.GROUP: group.limit_bytes if group else None,
        Limit.DEVICE: machine.platform.total_bytes,
        Limit.POOL: machine.device_memory.pool_bytes or machine.platform.total_bytes,
        Limit.USER: 0,
    }
    size = sizes[shortfall.allowance.limit]
    return size is None or shortfall.needed_bytes <= size


def _claim(plan: LoadPlan, machine: MachineSnapshot, *, taken: float, placed: bool) -> Claim:
    """What is still to be taken. The processor's storage is taken as it is filled, a device's when it is placed."""
    budget, forecast = machine.budget, plan.forecast
    on_processor = forecast.allocated_bytes_on("cpu")
    on_devices = 0 if placed else forecast.allocated_bytes - on_processor
    beside = forecast.window_bytes + forecast.scratch_bytes
    memory = int(on_processor * (1 - taken)) + beside
    group = machine.memory.cgroup
    path = group.path if group else None
    if budget.device is None:
        return Claim(memory_bytes=memory + on_devices, group=path)
    return Claim(memory_bytes=memory, group=path, device_bytes={device_key(machine.facts): on_devices})


def refuse_unless_fitting(plan: LoadPlan, machine: MachineSnapshot, tried: Tried = lambda _: ()) -> None:
    """Raise the error that says why `plan` does not fit this machine, which is the one that this process runs on."""

    def known(shortfall: Shortfall) -> Circumstances:
        return replace(circumstances(machine, shortfall), further=tuple(tried(machine)))

    check_budget(plan, machine.budget, known)


def circumstances(machine: MachineSnapshot, shortfall: Shortfall, *, here: bool = True) -> Circumstances:
    """What else bears on making a load fit; `here` is False for a machine that is only known from a snapshot."""
    pool = machine.memory.huge_page_pool_bytes or 0
    cache = machine.device_memory.node_active_cache_bytes or 0
    if not here:
        return Circumstances(huge_page_pool_bytes=pool, cache_on_device_bytes=cache)
    return Circumstances(
        processes=_processes(machine, shortfall),
        pids_in_group=processes_in_group() if machine.memory.cgroup else frozenset(),
        huge_page_pool_bytes=pool,
        cache_on_device_bytes=cache,
    )


def _processes(machine: MachineSnapshot, shortfall: Shortfall) -> tuple[ProcessMemory, ...]:
    """Who holds the memory that is short: on shared memory with what each has on both sides."""
    bus_id = machine.facts.driver.bus_id
    if shortfall.allowance in machine.budget.on_device:
        return device_processes(bus_id)
    in_memory = biggest_processes()
    if machine.platform.kind is not PlatformClass.UNIFIED:
        return in_memory
    on_device = {process.pid: process for process in device_processes(bus_id)}
    host = {process.pid: process for process in in_memory}
    merged = [
        (host.get(pid) or on_device[pid])._replace(
            nbytes=sum(side[pid].nbytes for side in (host, on_device) if pid in side)
        )
        for pid in {**host, **on_device}
    ]
    return tuple(sorted(merged, key=lambda process: -process.nbytes))
