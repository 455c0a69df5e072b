"""Other processes: who holds how much, as far as it would be free without them."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from umem.probes import biggest_processes, census, device_processes, processes_in_group

MIB = 1 << 20
HOLD = """
import mmap, sys
pages = mmap.mmap(-1, 96 << 20)
pages.write(bytes(96 << 20))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_process_that_holds_memory_is_found_with_what_it_holds() -> None:
    """A shared mapping, as pinned memory is: it counts, though it is no anonymous memory."""
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = {other.pid: other for other in biggest_processes(1000)}
        assert process.stdin is not None
        process.stdin.close()
    assert 96 * MIB <= found[process.pid].nbytes < 130 * MIB
    assert "python" in found[process.pid].name
    assert os.getpid() not in found
    sizes = [other.nbytes for other in found.values()]
    assert sizes == sorted(sizes, reverse=True)


def test_the_processes_of_a_group() -> None:
    assert os.getpid() in processes_in_group()


def test_processes_on_a_device() -> None:
    class NVMLError(Exception):
        pass

    own = SimpleNamespace(pid=os.getpid(), usedGpuMemory=5)
    others = [SimpleNamespace(pid=1 << 30, usedGpuMemory=None), SimpleNamespace(pid=1, usedGpuMemory=7 * MIB)]
    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda bus_id: bus_id,
        nvmlDeviceGetComputeRunningProcesses=lambda _handle: [own, *others],
    )
    found = device_processes("0000:01:00.0", lambda _name: nvml)
    assert [(process.pid, process.nbytes) for process in found] == [(1, 7 * MIB), (1 << 30, 0)]

    def refuse(_bus_id: str) -> Any:
        raise NVMLError

    nvml.nvmlDeviceGetHandleByPciBusId = refuse
    assert device_processes("0000:01:00.0", lambda _name: nvml) == ()
    assert device_processes(None) == ()


def test_a_census_tells_how_much_a_process_grew() -> None:
    code = (
        "import sys; held = bytearray(b'x') * (32 << 20); print('small', flush=True); sys.stdin.readline();"
        "more = bytearray(b'x') * (64 << 20); print('large', flush=True); sys.stdin.readline()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        before = census()
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        after = census()
    finally:
        process.kill()
        process.communicate()
    assert 32 << 20 <= before[process.pid] < 64 << 20
    assert 64 << 20 <= after[process.pid] - before[process.pid] < 68 << 20
    assert os.getpid() not in after
