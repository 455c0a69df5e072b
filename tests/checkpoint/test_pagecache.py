"""The page cache of files: counted, and given back from behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from umem.checkpoint.pagecache import DropBehind, cached_bytes, cached_bytes_of_files, cached_ranges, evict

MIB = 1 << 20


@pytest.fixture
def cached_file(tmp_path: Path) -> Iterator[int]:
    """A descriptor of a file of 16 MiB that lies in the page cache whole."""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(16 * MIB))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    if cached_bytes(descriptor) is None:
        pytest.skip("the kernel does not have cachestat")
    if cached_bytes(descriptor) != 16 * MIB:
        pytest.skip("the file system does not use the page cache")
    yield descriptor
    os.close(descriptor)


def test_counts_ranges(cached_file: int) -> None:
    assert cached_bytes(cached_file, 4 * MIB, 2 * MIB) == 2 * MIB
    assert cached_bytes(cached_file, 16 * MIB, 2 * MIB) == 0


def test_eviction_up_to_a_point_and_whole(cached_file: int) -> None:
    evict(cached_file, end=8 * MIB)
    assert cached_bytes(cached_file, 0, 8 * MIB) == 0
    assert cached_bytes(cached_file, 8 * MIB) == 8 * MIB
    evict(cached_file)
    assert cached_bytes(cached_file) == 0


def test_files_that_are_not_there_are_unknown(tmp_path: Path) -> None:
    assert cached_bytes_of_files([str(tmp_path / "none")]) is None


def test_drop_behind_follows_the_blocks_that_are_done_in_order(cached_file: int) -> None:
    behind = DropBehind(f"/proc/self/fd/{cached_file}", [4 * MIB, 8 * MIB, 12 * MIB, 16 * MIB])
    behind.block_done(1)
    assert cached_bytes(cached_file) == 16 * MIB
    behind.block_done(0)
    assert cached_bytes(cached_file) == 8 * MIB
    behind.block_done(2)
    assert cached_bytes(cached_file) == 4 * MIB
    behind.close()
    assert cached_bytes(cached_file) == 0


def test_ranges_that_are_cached(cached_file: int) -> None:
    path = f"/proc/self/fd/{cached_file}"
    assert cached_ranges(path) == [range(16 * MIB)]
    evict(cached_file, 6 * MIB, 10 * MIB)
    assert cached_ranges(path) == [range(6 * MIB), range(10 * MIB, 16 * MIB)]
    evict(cached_file)
    assert cached_ranges(path) == []
    assert cached_ranges("/does/not/exist") is None


def test_ranges_that_were_cached_before_are_kept_by_drop_behind(cached_file: int) -> None:
    kept = [range(2 * MIB, 6 * MIB), range(14 * MIB, 16 * MIB)]
    behind = DropBehind(f"/proc/self/fd/{cached_file}", [4 * MIB, 8 * MIB, 16 * MIB], kept)
    behind.block_done(0)
    assert cached_bytes(cached_file, 0, 2 * MIB) == 0
    behind.block_done(1)
    assert cached_bytes(cached_file) == 12 * MIB
    behind.close()
    assert cached_ranges(f"/proc/self/fd/{cached_file}") == kept


def test_the_page_cache_of_a_file_that_has_gone_is_nobodys(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB))
    behind = DropBehind(str(path), [MIB])
    path.unlink()
    behind.block_done(0)
    behind.close()
