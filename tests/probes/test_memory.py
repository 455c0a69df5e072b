"""The memory probe on trees of kernel files, and on the machine itself."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import pytest

from tests.limits import memory_group
from tests.probes.trees import group_v1, group_v2, proc_tree
from umem.probes import MemoryProbe, MemorySnapshot, free_in_blocks_of, read_cgroup
from umem.probes.kernel_files import CounterFile, KernelFile

KIB, GIB = 1 << 10, 1 << 30


def test_what_the_kernel_says(tmp_path: Path) -> None:
    with MemoryProbe(proc_tree(tmp_path / "proc"), tmp_path / "cgroup") as probe:
        snapshot = probe.sample()
    assert (snapshot.total_bytes, snapshot.free_bytes) == (125000000 * KIB, 3000000 * KIB)
    assert snapshot.available_bytes == 90000000 * KIB
    assert (snapshot.swap_total_bytes, snapshot.swap_free_bytes) == (4000000 * KIB, 1000000 * KIB)
    assert (snapshot.anonymous_bytes, snapshot.file_bytes, snapshot.shared_bytes) == (3000 * KIB, 1500 * KIB, 20 * KIB)
    assert snapshot.peak_resident_bytes == 5000 * KIB
    assert (snapshot.swapped_in_pages, snapshot.swapped_out_pages) == (11, 7)
    assert snapshot.swapped_bytes == 16 * KIB
    assert snapshot.major_faults == 108
    assert snapshot.file_cache_bytes == 62000000 * KIB
    assert (snapshot.huge_pages, snapshot.huge_page_pool_bytes) == (512, 500 * 2048 * KIB)
    assert snapshot.cgroup is None


def test_what_the_kernel_counts(tmp_path: Path) -> None:
    with MemoryProbe(proc_tree(tmp_path / "proc"), tmp_path / "cgroup") as probe:
        snapshot = probe.sample()
    assert (snapshot.pressure_some_us, snapshot.pressure_some_percent) == (123456, 1.5)
    assert (snapshot.pressure_full_us, snapshot.pressure_full_percent) == (23456, 0.25)
    assert (snapshot.refaulted_file_pages, snapshot.refaulted_anonymous_pages) == (5, 4)
    assert (snapshot.allocation_stalls, snapshot.directly_scanned_pages) == (6, 21)
    assert (snapshot.compaction_stalls, snapshot.compaction_failures) == (8, 6)
    assert (snapshot.system_major_faults, snapshot.oom_kills) == (31, 1)


def test_a_snapshot_is_saved_without_the_names_of_groups(tmp_path: Path) -> None:
    proc = proc_tree(tmp_path / "proc", "0::/alice/container-7\n")
    group_v2(tmp_path / "cgroup/alice/container-7", limit=str(8 * GIB), used=5 * GIB, inactive=GIB)
    with MemoryProbe(proc, tmp_path / "cgroup") as probe:
        snapshot = probe.sample()
    text = json.dumps(snapshot.to_json())
    assert "alice" not in text
    again = MemorySnapshot.from_json(json.loads(text))
    assert again.to_json() == snapshot.to_json()
    assert again.cgroup is not None
    assert again.cgroup.headroom_bytes == 4 * GIB


def test_what_is_not_there_is_unknown_and_not_zero(tmp_path: Path) -> None:
    proc = proc_tree(tmp_path / "proc", meminfo="MemTotal: 10 kB\nMemAvailable: nonsense kB\n")
    (proc / "self" / "stat").write_text("nonsense")
    (proc / "vmstat").unlink()
    (proc / "pressure/memory").write_text("nonsense")
    (proc / "buddyinfo").unlink()
    with MemoryProbe(proc, tmp_path / "none") as probe:
        snapshot = probe.sample()
    assert snapshot.total_bytes == 10 * KIB
    known = {name for name, value in snapshot.to_json().items() if value not in (None, ())}
    process = {"anonymous_bytes", "file_bytes", "shared_bytes", "swapped_bytes", "peak_resident_bytes"}
    assert known == {"time_s", "total_bytes", "page_bytes", *process}
    assert snapshot.free_in_blocks_of(1) is None


def test_a_v2_limit_counts_clean_cache_as_headroom(tmp_path: Path) -> None:
    proc = proc_tree(tmp_path / "proc", "0::/job\n")
    group_v2(tmp_path / "cgroup" / "job", limit=str(8 * GIB), used=5 * GIB, inactive=2 * GIB, active=GIB)
    limit = read_cgroup(proc, tmp_path / "cgroup")
    assert limit is not None
    assert (limit.limit_bytes, limit.used_bytes, limit.headroom_bytes) == (8 * GIB, 5 * GIB, 6 * GIB)
    assert limit.peak_bytes == 10 * GIB


def test_the_tightest_of_nested_limits(tmp_path: Path) -> None:
    proc = proc_tree(tmp_path / "proc", "0::/a/b/c\n")
    root = tmp_path / "cgroup"
    group_v2(root / "a", limit=str(20 * GIB), used=15 * GIB)
    group_v2(root / "a" / "b", limit="max", high=str(9 * GIB), used=2 * GIB)
    group_v2(root / "a" / "b" / "c", limit="max", used=GIB)
    limit = read_cgroup(proc, root)
    assert limit is not None
    assert (Path(limit.path), limit.headroom_bytes) == (root / "a", 5 * GIB)
    with MemoryProbe(proc, root) as probe:
        groups = probe.sample().cgroups
    assert [Path(group.path).name for group in groups] == ["c", "b", "a"]
    assert [group.limit_bytes for group in groups] == [None, 9 * GIB, 20 * GIB]


def test_a_process_that_is_moved_is_followed(tmp_path: Path) -> None:
    proc, root = proc_tree(tmp_path / "proc", "0::/a\n"), tmp_path / "cgroup"
    group_v2(root / "a", limit=str(2 * GIB), used=GIB)
    group_v2(root / "b", limit=str(9 * GIB), used=GIB)
    with MemoryProbe(proc, root) as probe:
        before = probe.sample().cgroup
        (proc / "self/cgroup").write_text("0::/b\n")
        after = probe.sample().cgroup
        (root / "b/memory.current").write_text(f"{4 * GIB}\n")
        later = probe.sample().cgroup
    assert [group and group.headroom_bytes for group in (before, after, later)] == [GIB, 8 * GIB, 5 * GIB]


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    proc = proc_tree(tmp_path / "proc", "0::/docker/0123456789\n")
    group_v2(tmp_path / "cgroup", limit=str(4 * GIB), used=GIB)
    limit = read_cgroup(proc, tmp_path / "cgroup")
    assert limit is not None
    assert limit.headroom_bytes == 3 * GIB


def test_a_v1_limit(tmp_path: Path) -> None:
    proc = proc_tree(tmp_path / "proc", "5:cpu,cpuacct:/x\n4:memory:/user/job\n0::/\n")
    group_v1(tmp_path / "cgroup/memory", limit=0x7FFFFFFFFFFFF000, used=9 * GIB)
    group_v1(tmp_path / "cgroup/memory/user/job", limit=6 * GIB, used=4 * GIB, inactive=GIB)
    limit = read_cgroup(proc, tmp_path / "cgroup")
    assert limit is not None
    assert limit.headroom_bytes == 3 * GIB


@pytest.mark.parametrize("lines", ["", "0::/\n", "4:memory:/\n", "nonsense\n", "0::/../elsewhere\n"])
def test_no_limit(tmp_path: Path, lines: str) -> None:
    group_v2(tmp_path / "cgroup", limit="max", used=GIB)
    group_v1(tmp_path / "cgroup/memory", limit=0x7FFFFFFFFFFFF000, used=GIB)
    assert read_cgroup(proc_tree(tmp_path / "proc", lines), tmp_path / "cgroup") is None


def test_this_machine() -> None:
    with MemoryProbe() as probe:
        before = probe.sample()
        pages = mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.write(bytes(32 << 20))
        after = probe.sample()
    assert 0 < (before.available_bytes or 0) < (before.total_bytes or 0)
    assert 30 << 20 < (after.anonymous_bytes or 0) - (before.anonymous_bytes or 0) < 40 << 20
    assert after.time_s > before.time_s


@pytest.mark.root
def test_a_limit_on_this_machine() -> None:
    with memory_group() as group:
        group.limit(3 * GIB)
        done = group.run("import umem; print(umem.probe(device='cpu').memory.cgroup.limit_bytes)")
        assert (done.stdout.strip(), done.stderr) == (str(3 * GIB), "")


def test_free_memory_in_large_blocks(tmp_path: Path) -> None:
    page = mmap.PAGESIZE
    lines = [f"Node 0, zone   Normal {' '.join(str(count) for count in [9, 8, 7, 0, 0, 0, 0, 0, 0, 3, 2])}"]
    (tmp_path / "buddyinfo").write_text("\n".join([*lines, *lines]) + "\n")
    assert free_in_blocks_of(page << 9, tmp_path) == 2 * (3 * (page << 9) + 2 * (page << 10))
    assert free_in_blocks_of(page << 11, tmp_path) is None  # no such blocks are kept, which is not "none are free"
    assert free_in_blocks_of(page << 9, tmp_path / "none") is None


def test_free_memory_in_large_blocks_leaves_out_the_zones_for_small_devices(tmp_path: Path) -> None:
    proc = proc_tree(tmp_path / "proc")
    assert free_in_blocks_of(mmap.PAGESIZE << 13, proc) == 700 * (mmap.PAGESIZE << 13)


def test_a_list_longer_than_a_page_is_read_whole() -> None:
    """The kernel gives /proc/kallsyms, and /proc/vmstat on large machines, a page at a time."""
    symbols = Path("/proc/kallsyms")
    if not symbols.exists():
        pytest.skip("no /proc/kallsyms")
    file = KernelFile(symbols)
    given = file.read()
    file.close()
    whole = symbols.read_bytes()
    assert len(whole) > 1 << 16
    assert len(given) >= 1 << 16
    assert whole.startswith(given)


def test_lines_that_move_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "vmstat"
    path.write_text("nr_free_pages 5\npswpin 1\npswpout 2\n")
    file = CounterFile(path, ("pswpin", r"allocstall_\w+"))
    assert file.values() == {"pswpin": 1}
    path.write_text("pswpin 3\nallocstall_normal 4\nallocstall_dma 5\n")
    assert file.values() == {"pswpin": 3, "allocstall_normal": 4, "allocstall_dma": 5}
    path.write_text("")
    assert file.values() == {}
    file.close()
