"""Probes: the machine as it is, in immutable snapshots. Knows no checkpoints and decides nothing."""

from umem.probes.cgroup import CgroupMemory, read_cgroup
from umem.probes.device import DeviceMemory, read_device_memory
from umem.probes.facts import DriverFacts, KernelFacts, Node, NvmlFacts, PlatformFacts, TorchFacts, gather_facts
from umem.probes.memory import MemoryProbe, MemorySnapshot, free_in_blocks_of, is_virtual_machine
from umem.probes.monitor import LoadStoppedError, LoadWatch, Monitor, Unwatched
from umem.probes.overrun import Cause, overrun_error
from umem.probes.platform import Platform, PlatformClass, classify, probe_platform
from umem.probes.policy import Expectation, Policy, floors_within
from umem.probes.processes import biggest_processes, census, device_processes, process_name, processes_in_group
from umem.probes.verdicts import Level, Rule, Sample, Verdict

__all__ = [
    "Cause",
    "CgroupMemory",
    "DeviceMemory",
    "DriverFacts",
    "Expectation",
    "KernelFacts",
    "Level",
    "LoadStoppedError",
    "LoadWatch",
    "MemoryProbe",
    "MemorySnapshot",
    "Monitor",
    "Node",
    "NvmlFacts",
    "Platform",
    "PlatformClass",
    "PlatformFacts",
    "Policy",
    "Rule",
    "Sample",
    "TorchFacts",
    "Unwatched",
    "Verdict",
    "biggest_processes",
    "census",
    "classify",
    "device_processes",
    "floors_within",
    "free_in_blocks_of",
    "gather_facts",
    "is_virtual_machine",
    "overrun_error",
    "probe_platform",
    "process_name",
    "processes_in_group",
    "read_cgroup",
    "read_device_memory",
]
