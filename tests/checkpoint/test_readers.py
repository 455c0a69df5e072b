"""The contract of readers: every reader fills the given buffers whole, or fails in words."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Self

import pytest

from tests.checkpoint.places import Place, place_of
from tests.mounts import mounted
from umem.checkpoint.entries import Shard
from umem.checkpoint.pagecache import cached_bytes_of_files, evict
from umem.checkpoint.readers import READERS, Reader, choose_readers, odirect
from umem.checkpoint.readers.base import address_of
from umem.checkpoint.urls import shown
from umem.errors import ChangedFileError, ReadError, SettingsError, TruncatedFileError

SIZE = 300_007


BLOCK = 100_000


@pytest.fixture(params=sorted(READERS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(name: str, tmp_path: Path) -> Iterator[Place]:
    """Where the reader reads from, with a file there."""
    with place_of(name, tmp_path) as place:
        place.write(os.urandom(SIZE))
        yield place


@pytest.fixture
def reader(name: str, place: Place) -> Reader:
    reader = READERS[name]
    if why := reader.why_not(place.shard()):
        pytest.skip(f"{name}: {why}")
    return reader


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    """A local file."""
    place = Place(tmp_path)
    place.write(os.urandom(SIZE))
    return place.shard()


@pytest.fixture(params=sorted(READERS.keys() - {"http", "fsspec"}))
def local_reader(request: pytest.FixtureRequest, shard: Shard) -> Reader:
    reader = READERS[request.param]
    if why := reader.why_not(shard):
        pytest.skip(f"{reader.name}: {why}")
    return reader


def content(shard: Shard) -> bytes:
    return Path(shard.path).read_bytes()


def fill(reader: Reader, shard: Shard, offset: int, sizes: Sequence[int]) -> bytes:
    buffers = [bytearray(size) for size in sizes]
    with reader.open(shard, BLOCK) as handle:
        handle.fill(offset, [memoryview(buffer) for buffer in buffers])
    return b"".join(buffers)


def fill_twice(reader: Reader, shard: Shard, size: int, *, between: Callable[[], None]) -> None:
    with reader.open(shard, BLOCK) as handle:
        handle.fill(0, [memoryview(bytearray(10))])
        between()
        handle.fill(0, [memoryview(bytearray(size))])


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 12345])
@pytest.mark.parametrize("sizes", [[1], [0], [4096], [1, 2, 3], [5000, 0, 70_001], [0, 0, 1]])
def test_any_offset_into_any_buffers(reader: Reader, place: Place, offset: int, sizes: list[int]) -> None:
    assert fill(reader, place.shard(), offset, sizes) == place.content()[offset : offset + sum(sizes)]


def test_up_to_the_last_byte(reader: Reader, place: Place) -> None:
    assert fill(reader, place.shard(), 0, [SIZE]) == place.content()
    assert fill(reader, place.shard(), SIZE - 1, [1]) == place.content()[-1:]


def test_more_buffers_than_one_call_takes(reader: Reader, place: Place) -> None:
    assert fill(reader, place.shard(), 7, [3] * 5000) == place.content()[7 : 7 + 15_000]


def test_beyond_the_end(reader: Reader, place: Place) -> None:
    with pytest.raises(TruncatedFileError) as caught:
        fill(reader, place.shard(), SIZE - 10, [11])
    assert caught.value.path == shown(place.path)


def test_a_file_that_shrank(reader: Reader, place: Place) -> None:
    shard = place.shard()
    place.cut(SIZE - 1)
    with pytest.raises(TruncatedFileError, match="shrank"):
        fill(reader, shard, 0, [1])


def test_a_file_that_shrinks_while_it_is_read(reader: Reader, place: Place) -> None:
    shard = place.shard()
    with pytest.raises(TruncatedFileError):
        fill_twice(reader, shard, 10_000, between=lambda: place.cut(4096))


def test_a_file_that_is_replaced_while_it_is_read_from_afar(reader: Reader, place: Place) -> None:
    """A local file that is open stays what it was."""
    shard = place.shard()
    if not shard.is_remote:
        pytest.skip("local")
    with pytest.raises(ChangedFileError):
        fill_twice(reader, shard, 10, between=lambda: place.write(bytes(SIZE)))


def test_a_file_that_was_replaced(reader: Reader, place: Place) -> None:
    shard = place.shard()
    place.write(bytes(SIZE))
    with pytest.raises(ChangedFileError, match="open the checkpoint again"):
        fill(reader, shard, 0, [1])


def test_a_file_that_is_gone(reader: Reader, place: Place) -> None:
    shard = place.shard()
    place.remove()
    with pytest.raises(ReadError):
        fill(reader, shard, 0, [1])


@pytest.fixture
def calling_reader(local_reader: Reader) -> Reader:
    """A local reader that reads by system calls, which may fail or fall short."""
    if local_reader.name == "mapped":
        pytest.skip("it maps")
    return local_reader


def test_short_reads_and_interrupts(calling_reader: Reader, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.preadv, []

    def a_little(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        calls.append(offset)
        return real(descriptor, [buffers[0][:4096]], offset, flags)

    monkeypatch.setattr(os, "preadv", a_little)
    assert fill(calling_reader, shard, 3, [12_500, 10, 7_000]) == content(shard)[3 : 3 + 19_510]
    assert len(calls) > 3


def test_an_error_of_the_drive(calling_reader: Reader, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(ReadError, match="Input/output error") as caught:
        fill(calling_reader, shard, 0, [10])
    assert caught.value.path == shard.path


@pytest.mark.parametrize("offset", [0, 8, 4095, 5000])
@pytest.mark.parametrize("sizes", [[200_000], [40_000, 7, 60_000, 0, 50_001], [100, 90_000, 100, 90_000], [3] * 2000])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_memory_congruent_to_the_file_or_not(
    reader: Reader, place: Place, offset: int, sizes: list[int], shift: int
) -> None:
    """Buffers one after the other in one memory, `shift` bytes off the places where no copy is needed."""
    shard = place.shard()
    pages = mmap.mmap(-1, SIZE + 8192)
    at = offset % reader.alignment(shard) + shift
    buffers, start = [], at
    for size in sizes:
        buffers.append(memoryview(pages)[start : start + size])
        start += size
    with reader.open(shard, BLOCK) as handle:
        handle.fill(offset, buffers)
    assert pages[at:start] == place.content()[offset : offset + sum(sizes)]
    assert not any(pages[:at])
    assert not any(pages[start:])


def test_congruent_memory_is_read_without_a_copy(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = READERS["odirect"]
    if reader.why_not(shard):
        pytest.skip(str(reader.why_not(shard)))
    copied = []
    monkeypatch.setattr("umem.checkpoint.readers.odirect.move_bytes", lambda into, _from: copied.append(into.nbytes))
    pages = mmap.mmap(-1, SIZE + 4096)
    with reader.open(shard, SIZE) as handle:
        handle.fill(100, [memoryview(pages)[100:200_100]])
    assert sum(copied) < 2 * 4096


@pytest.mark.parametrize(("address", "offset"), [(4, 512), (1, 512), (512, 4096), (4096, 512), (64, 4096)])
def test_addresses_need_not_be_as_aligned_as_offsets(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, address: int, offset: int
) -> None:
    """Drives that want less of addresses than of offsets read tensors of any header's length in place."""
    wanted = odirect._Alignments(address, max(address, offset))
    real, copied = os.preadv, []

    def checked(descriptor: int, vectors: list[memoryview], position: int) -> int:
        assert position % offset == 0
        for vector in vectors:
            assert address_of(vector) % address == 0
            assert vector.nbytes % offset == 0
        return real(descriptor, vectors, position)

    def counted(into: memoryview, source: memoryview) -> None:
        copied.append(into.nbytes)
        into[:] = source

    monkeypatch.setattr(odirect, "_FLAG", 0)
    monkeypatch.setattr(odirect, "_alignments", lambda _descriptor: wanted)
    monkeypatch.setattr(odirect, "move_bytes", counted)
    monkeypatch.setattr(os, "preadv", checked)
    reader = READERS["odirect"]
    assert reader.alignment(shard) == wanted.offset
    content = Path(shard.path).read_bytes()
    pages = mmap.mmap(-1, SIZE + 8192)
    for start in (1000, 1008, 5000):
        at = start % 4096 + max(8, address)
        with reader.open(shard, SIZE) as handle:
            handle.fill(start, [memoryview(pages)[at : at + 200_000]])
        assert pages[at : at + 200_000] == content[start : start + 200_000]
        assert sum(copied) < 2 * wanted.offset
        copied.clear()


@pytest.mark.parametrize(
    ("name", "leaves"), [("buffered", True), ("mapped", True), ("dontcache", False), ("odirect", False)]
)
def test_what_a_reader_leaves_in_the_page_cache(shard: Shard, name: str, leaves: bool) -> None:
    descriptor = os.open(shard.path, os.O_RDONLY)
    os.fsync(descriptor)
    evict(descriptor)
    os.close(descriptor)
    if cached_bytes_of_files([shard.path]) != 0 or READERS[name].why_not(shard):
        pytest.skip("the kernel or file system cannot show it")
    fill(READERS[name], shard, 0, [SIZE])
    assert bool(cached_bytes_of_files([shard.path])) is leaves


def test_the_choice_follows_the_page_cache(shard: Shard) -> None:
    content(shard)
    if not cached_bytes_of_files([shard.path]) or READERS["odirect"].why_not(shard):
        pytest.skip("the kernel or file system cannot show it")
    assert choose_readers("auto", [shard])[:] == ((READERS["buffered"],), "in the page cache already")
    descriptor = os.open(shard.path, os.O_RDONLY)
    os.fsync(descriptor)
    evict(descriptor)
    os.close(descriptor)
    choice = choose_readers("auto", [shard])
    assert (choice.name, choice.reason) == ("odirect", "not in the page cache")


def test_file_systems_without_direct_reads(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuses(path: str, flags: int, *rest: int) -> int:
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuses)
    monkeypatch.setattr("umem.checkpoint.readers.cached_bytes_of_files", lambda _paths: 0)
    choice = choose_readers("auto", [shard])
    assert choice.name == ("buffered" if READERS["dontcache"].why_not(shard) else "dontcache")
    assert "refuses O_DIRECT (Invalid argument)" in choice.reason
    with pytest.raises(SettingsError, match="Invalid argument"):
        choose_readers("odirect", [shard])


def test_an_error_of_the_drive_behind_a_mapping(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be a SIGBUS at the first touch is an error of the call that faults the pages in."""

    class Broken(mmap.mmap):
        def madvise(self, *_: int) -> None:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    monkeypatch.setattr(mmap, "mmap", Broken)
    with pytest.raises(ReadError, match="Bad address") as caught:
        fill(READERS["mapped"], shard, 0, [10])
    assert caught.value.path == shard.path
    assert "Bad address" in str(READERS["mapped"].why_not(shard))


def test_little_is_mapped_at_a_time(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[int] = []

    class Counted(mmap.mmap):
        def __new__(cls, descriptor: int, length: int, *rest: int, **named: int) -> Self:
            assert not mapped, "two at a time"
            assert length <= BLOCK + mmap.PAGESIZE
            mapped.append(length)
            return super().__new__(cls, descriptor, length, *rest, **named)

        def __exit__(self, *facts: object) -> None:
            super().__exit__(*facts)
            mapped.clear()

    monkeypatch.setattr(mmap, "mmap", Counted)
    assert fill(READERS["mapped"], shard, 11, [SIZE - 20]) == content(shard)[11 : SIZE - 9]


def test_kernels_without_dontcache(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def refuses(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", refuses)
    assert "Operation not supported" in str(READERS["dontcache"].why_not(shard))


@pytest.mark.parametrize("kind", ["tmpfs", "overlay"])
def test_other_file_systems(tmp_path: Path, kind: str) -> None:
    """Whatever `auto` takes there reads the file; `odirect` reads it or says why not."""
    with mounted(kind, tmp_path / "mount") as mount:
        path = mount / "shard"
        path.write_bytes(os.urandom(SIZE))
        shard = Shard.of(str(path), path.stat())
        for reader in choose_readers("auto", [shard]).readers + tuple(READERS.values()):
            if not reader.why_not(shard):
                assert fill(reader, shard, 5, [SIZE - 5]) == content(shard)[5:]


def test_urls_have_readers_of_their_own(shard: Shard) -> None:
    web, store = (Shard(url, 1, None) for url in ("https://host/x.safetensors", "s3://bucket/x.safetensors"))
    assert choose_readers("auto", [web]) == ((READERS["http"],), "https URLs")
    assert choose_readers("auto", [store, shard]).readers[0] is READERS["fsspec"]
    refused = [
        ("http", store),
        ("http", shard),
        ("fsspec", web),
        ("fsspec", shard),
        ("buffered", web),
        ("odirect", web),
    ]
    for name, other in refused:
        with pytest.raises(SettingsError, match="use reader='auto'"):
            choose_readers(name, [other])


def test_names_of_readers(shard: Shard) -> None:
    assert choose_readers("buffered", [shard, shard]) == ((READERS["buffered"],) * 2, "as set")
    assert choose_readers("auto", []).name == "none"
    with pytest.raises(SettingsError, match="buffered"):
        choose_readers("fastest", [shard])
