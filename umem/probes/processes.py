"""Other processes and the memory they hold, for a load that is refused or stopped. Slow beside a memory sample.

A census counts all processes quickly (about 5 microseconds each), so that growth between two of them can be told.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from umem.errors import ProcessMemory
from umem.probes.kernel_files import CounterFile

__all__ = ["Census", "biggest_processes", "census", "device_processes", "process_name", "processes_in_group"]

_LEAST_BYTES = 64 << 20
_WORTH_A_LOOK_BYTES = 16 << 20
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")

#: Process number -> anonymous and shared memory in bytes.
Census = dict[int, int]


def census(*, proc: Path = Path("/proc")) -> Census:
    """The memory of the processes besides this one, in bytes; those below 16 MiB are left out."""
    found: Census = {}
    own = str(os.getpid())
    directory = os.open(proc, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in os.listdir(proc):
            if name.isdigit() and name != own and _resident_bytes(name, directory) >= _WORTH_A_LOOK_BYTES:
                found[int(name)] = _held_bytes(proc / name)
    finally:
        os.close(directory)
    return found


def _resident_bytes(name: str, directory: int) -> int:
    """What a process has in memory, of whatever kind; 0 where that is not to be had. One census asks this of all."""
    try:
        file = os.open(f"{name}/statm", os.O_RDONLY, dir_fd=directory)
    except OSError:
        return 0
    try:
        return int(os.read(file, 256).split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0
    finally:
        os.close(file)


def _held_bytes(directory: Path) -> int:
    file = CounterFile(directory / "status", ("RssAnon", "RssShmem"))
    nbytes = sum(file.values().values()) * 1024
    file.close()
    return nbytes


def biggest_processes(count: int = 10, *, proc: Path = Path("/proc")) -> tuple[ProcessMemory, ...]:
    """The processes besides this one that would free most of the system's memory, largest first.

    What counts is anonymous and shared memory, which is where pinned memory is too; files would stay as page cache.
    Processes that may not be looked at are left out, and so are those below 64 MiB.
    """
    found = [_memory(process, proc) for process in psutil.process_iter(["pid", "name"])]
    large = [process for process in found if process.nbytes >= _LEAST_BYTES and process.pid != os.getpid()]
    return tuple(sorted(large, key=lambda process: -process.nbytes)[:count])


def _memory(process: psutil.Process, proc: Path) -> ProcessMemory:
    return ProcessMemory(process.pid, process.info["name"] or "?", _held_bytes(proc / str(process.pid)))


def processes_in_group(*, proc: Path = Path("/proc")) -> frozenset[int]:
    """The processes in this process's control groups, by number."""
    own = _membership(proc / "self")
    pids = (int(name) for name in os.listdir(proc) if name.isdigit()) if own else ()
    return frozenset(pid for pid in pids if _membership(proc / str(pid)) == own)


def _membership(directory: Path) -> str | None:
    try:
        return (directory / "cgroup").read_text()
    except OSError:
        return None


def device_processes(bus_id: str | None, load: Callable[[str], Any] = import_module) -> tuple[ProcessMemory, ...]:
    """The processes besides this one that hold memory of the device at that place, as NVML knows them, largest first.

    NVML gives this also where it refuses to tell the device's memory, as on GB10.
    """
    if bus_id is None:
        return ()
    try:
        nvml = load("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - without NVML nothing is known, which is no reason to fail
        return ()
    try:
        running = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByPciBusId(bus_id))
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()
    found = [
        ProcessMemory(int(process.pid), process_name(int(process.pid)), int(process.usedGpuMemory or 0))
        for process in running
        if int(process.pid) != os.getpid()
    ]
    return tuple(sorted(found, key=lambda process: -process.nbytes))


def process_name(pid: int) -> str:
    """The name of a process; `?` where that is not to be had."""
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "?"
