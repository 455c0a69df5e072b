"""Trees of kernel files for tests: what a machine would show under /proc and /sys/fs/cgroup."""

from __future__ import annotations

from pathlib import Path

MEMINFO = """\
MemTotal:       125000000 kB
MemFree:          3000000 kB
MemAvailable:    90000000 kB
Buffers:            12000 kB
SwapTotal:        4000000 kB
SwapFree:         1000000 kB
HugePages_Total:       0
"""
VMSTAT = "nr_free_pages 123\npswpin 11\npswpout 7\nworkingset_refault_file 5\n"
STATUS = "Name:\tpython\nVmHWM:\t  5000 kB\nRssAnon:\t  3000 kB\nRssFile:\t  1500 kB\nRssShmem:\t    20 kB\n"


def proc_tree(root: Path, cgroup: str = "0::/\n", *, meminfo: str = MEMINFO) -> Path:
    """A /proc with this process's control groups."""
    (root / "self").mkdir(parents=True)
    (root / "meminfo").write_text(meminfo)
    (root / "vmstat").write_text(VMSTAT)
    (root / "self" / "status").write_text(STATUS)
    fields = ["1", "(a (strange) name)", "S", *(str(number) for number in range(100, 120))]
    (root / "self" / "stat").write_text(" ".join(fields))
    (root / "self" / "cgroup").write_text(cgroup)
    return root


def group_v2(directory: Path, *, limit: str, high: str = "max", used: int, inactive: int = 0, active: int = 0) -> None:
    """A v2 memory control group."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.high").write_text(f"{high}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\nfile 2\ninactive_file {inactive}\nactive_file {active}\n")


def group_v1(directory: Path, *, limit: int, used: int, inactive: int = 0, active: int = 0) -> None:
    """A v1 memory control group."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
    stat = f"cache 2\ninactive_file 9\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n"
    (directory / "memory.stat").write_text(stat)
