"""Probes: the machine as it is, in immutable snapshots. Knows no checkpoints and decides nothing."""

from umem.probes.cgroup import CgroupMemory, read_cgroup
from umem.probes.memory import MemoryProbe, MemorySnapshot, free_in_blocks_of, is_virtual_machine
from umem.probes.monitor import Monitor, Sample
from umem.probes.platform import Platform, PlatformClass, probe_platform

__all__ = [
    "CgroupMemory",
    "MemoryProbe",
    "MemorySnapshot",
    "Monitor",
    "Platform",
    "PlatformClass",
    "Sample",
    "free_in_blocks_of",
    "is_virtual_machine",
    "probe_platform",
    "read_cgroup",
]
