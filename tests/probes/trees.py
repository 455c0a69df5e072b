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
Active(file):     2000000 kB
Inactive(file):  60000000 kB
HugePages_Total:      512
HugePages_Free:       500
Hugepagesize:        2048 kB
"""
VMSTAT = """\
nr_free_pages 123
pswpin 11
pswpout 7
pgmajfault 31
pgscan_direct 21
pgscan_direct_throttle 99
allocstall_dma 1
allocstall_normal 2
allocstall_movable 3
workingset_refault_anon 4
workingset_refault_file 5
compact_stall 8
compact_fail 6
oom_kill 1
"""
STATUS = """\
Name:\tpython
VmHWM:\t  5000 kB
RssAnon:\t  3000 kB
RssFile:\t  1500 kB
RssShmem:\t    20 kB
VmSwap:\t    16 kB
"""
PRESSURE = """\
some avg10=1.50 avg60=0.70 avg300=0.10 total=123456
full avg10=0.25 avg60=0.10 avg300=0.00 total=23456
"""
#: Free blocks of orders 0 to 13, as on kernels that keep blocks of 32 MiB.
BUDDYINFO = """\
Node 0, zone      DMA      1      0      0      0      0      0      0      0      0      0      0      0      0      9
Node 0, zone   Normal      5      4      3      0      0      0      0      0      0      1      1      1      2    700
"""


def proc_tree(root: Path, cgroup: str = "0::/\n", *, meminfo: str = MEMINFO) -> Path:
    """A /proc with this process's control groups."""
    (root / "self").mkdir(parents=True)
    (root / "meminfo").write_text(meminfo)
    (root / "vmstat").write_text(VMSTAT)
    (root / "buddyinfo").write_text(BUDDYINFO)
    (root / "pressure").mkdir()
    (root / "pressure" / "memory").write_text(PRESSURE)
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
    (directory / "memory.peak").write_text(f"{2 * used}\n")
    (directory / "memory.stat").write_text(f"anon 1\nfile 2\ninactive_file {inactive}\nactive_file {active}\n")


def group_v1(directory: Path, *, limit: int, used: int, inactive: int = 0, active: int = 0) -> None:
    """A v1 memory control group."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{used}\n")
    (directory / "memory.max_usage_in_bytes").write_text(f"{2 * used}\n")
    stat = f"cache 2\ninactive_file 9\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n"
    (directory / "memory.stat").write_text(stat)
