"""Probes: the machine as it is, in immutable snapshots. Knows no checkpoints and decides nothing."""

from umem.probes.cgroup import CgroupMemory, read_cgroup
from umem.probes.device import DeviceMemory, read_device_memory
from umem.probes.facts import DriverFacts, KernelFacts, Node, NvmlFacts, PlatformFacts, TorchFacts, gather_facts
from umem.probes.memory import MemoryProbe, MemorySnapshot, free_in_blocks_of, is_virtual_machine
from umem.probes.monitor import Monitor, Sample
from umem.probes.platform import Platform, PlatformClass, classify, probe_platform
from umem.probes.processes import biggest_processes, device_processes, processes_in_group

__all__ = [
    "CgroupMemory",
    "DeviceMemory",
    "DriverFacts",
    "KernelFacts",
    "MemoryProbe",
    "MemorySnapshot",
    "Monitor",
    "Node",
    "NvmlFacts",
    "Platform",
    "PlatformClass",
    "PlatformFacts",
    "Sample",
    "TorchFacts",
    "biggest_processes",
    "classify",
    "device_processes",
    "free_in_blocks_of",
    "gather_facts",
    "is_virtual_machine",
    "probe_platform",
    "processes_in_group",
    "read_cgroup",
    "read_device_memory",
]
