"""Files behind URLs: found, listed, refused; and what a server does wrong, survived or said in words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
import torch

pytest.importorskip("aiohttp")

import fsspec
from aiohttp import ClientPayloadError
from fsspec.implementations.memory import MemoryFileSystem

from tests.servers import Fault, FileServer, file_server
from tests.writers import random_tensor, write_safetensors, write_sharded
from umem.checkpoint import open_checkpoint
from umem.checkpoint.readers import READERS
from umem.checkpoint.stores import requests, store_of
from umem.errors import (
    ChangedFileError,
    CheckpointNotFoundError,
    HeaderSyntaxError,
    LegacyPickleError,
    MissingDependencyError,
    MissingShardError,
    ReadError,
    RemoteReadError,
    TruncatedFileError,
    UnsupportedError,
)

X, Y = {"x": random_tensor((50_000,))}, {"y": random_tensor((60_000,), seed=1)}


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_FIRST_PAUSE_S", 0.001)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    with file_server(tmp_path, sound_bytes=1) as server:
        yield server


@pytest.fixture(params=["http", "http without index pages", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a directory; `publish` puts `tmp_path` there."""
    if request.param == "memory":
        yield "memory://published"
        fsspec.filesystem("memory").rm("/published", recursive=True)
        return
    with file_server(tmp_path, listing=request.param == "http") as server:
        yield server.url


def publish(directory: Path, url: str) -> str:
    if url.startswith("memory"):
        fsspec.filesystem("memory").put(f"{directory}/*", "/published/", recursive=True)
    return url


def names(url: str) -> list[str]:
    return sorted(open_checkpoint(url).entries)


# --- what is there ---------------------------------------------------------------------------------------------------


def test_a_directory_with_an_index(tmp_path: Path, url: str) -> None:
    write_sharded(tmp_path, [X, Y])
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    directory = publish(tmp_path, url)
    local = open_checkpoint(tmp_path)
    for path in (directory, f"{directory}/", f"{directory}/model.safetensors.index.json"):
        assert open_checkpoint(path).entries == local.entries


def test_one_file(tmp_path: Path, url: str) -> None:
    write_safetensors(tmp_path / "model.safetensors", X)
    directory = publish(tmp_path, url)
    assert names(directory) == names(f"{directory}/model.safetensors") == ["x"]


def test_torch_files(tmp_path: Path, url: str) -> None:
    torch.save({"a": X, "b": Y}, tmp_path / "pytorch_model.bin")
    assert open_checkpoint(publish(tmp_path, url)).entries == open_checkpoint(tmp_path).entries
    assert names(f"{url}/pytorch_model.bin") == ["a.x", "b.y"]


def test_files_of_other_names_are_found_where_they_are_listed(tmp_path: Path, server: FileServer) -> None:
    write_safetensors(tmp_path / "odd name+%41.safetensors", X)
    (tmp_path / "below").mkdir()
    (tmp_path / "config.json").write_text("{}")
    assert names(server.url) == ["x"]
    server.listing = False
    with pytest.raises(CheckpointNotFoundError, match="no weights"):
        names(server.url)


def test_a_query_belongs_to_every_file_and_is_not_shown(tmp_path: Path, server: FileServer) -> None:
    write_sharded(tmp_path, [X, Y])
    checkpoint = open_checkpoint(f"{server.url}?key=secret")
    assert checkpoint.path == server.url
    assert all(shard.path.endswith("safetensors?key=secret") for shard in checkpoint.shards)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(MissingShardError, match="00002-of-00002") as caught:
        open_checkpoint(f"{server.url}?key=secret")
    assert "secret" not in str(caught.value)


def test_a_file_url_is_a_local_path(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", X)
    assert open_checkpoint(f"file://{path}") == open_checkpoint(path)


def test_nothing_there(tmp_path: Path, url: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    publish(tmp_path, url)
    with pytest.raises(CheckpointNotFoundError, match="nothing at this URL"):
        open_checkpoint(f"{url}/none.safetensors")


def test_what_is_no_checkpoint(tmp_path: Path, url: str) -> None:
    (tmp_path / "text.bin").write_text("hello")
    torch.save(X, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    directory = publish(tmp_path, url)
    for name, error in (("text.bin", HeaderSyntaxError), ("old.pt", LegacyPickleError)):
        with pytest.raises(error):
            open_checkpoint(f"{directory}/{name}")


@pytest.mark.parametrize(
    ("url", "absent", "error", "cure"),
    [
        ("s3://bucket/model", "s3fs", MissingDependencyError, "pip install s3fs"),
        ("gs://bucket/model", "gcsfs", MissingDependencyError, "pip install gcsfs"),
        ("https://host/model", "aiohttp", MissingDependencyError, "pip install aiohttp"),
        ("memory://x", "fsspec", MissingDependencyError, "pip install fsspec"),
        ("s4://bucket/model", "", UnsupportedError, "knows no protocol 's4'"),
        ("zip://model::s3://bucket/x.zip", "", UnsupportedError, "chained"),
        ("hf://org/name", "", CheckpointNotFoundError, "give the id alone"),
    ],
)
def test_urls_that_cannot_be_opened(url: str, absent: str, error: type[Exception], cure: str) -> None:
    code = (
        f"import sys; sys.modules[{absent!r}] = None\n"
        "from umem.checkpoint import open_checkpoint\n"
        f"try:\n    open_checkpoint({url!r})\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(error.__name__)
    assert cure in done.stdout


# --- what goes wrong -------------------------------------------------------------------------------------------------


def read(url: str) -> bytes:
    """The bytes of the only tensor there, in two reads."""
    checkpoint = open_checkpoint(url)
    (entry,) = checkpoint.entries.values()
    (shard,) = checkpoint.shards
    content = bytearray(entry.nbytes)
    middle = entry.nbytes // 2
    with READERS["http" if url.startswith("http") else "fsspec"].open(shard, 1 << 16) as handle:
        handle.fill(entry.start, [memoryview(content)[:100], memoryview(content)[100:middle]])
        handle.fill(entry.start + middle, [memoryview(content)[middle:]])
    return bytes(content)


STORED = bytes(X["x"].view(torch.uint8).tolist())

PASSING = {
    "resets before the body": Fault(cut=0.0, times=3),
    "resets within the body": Fault(cut=0.5, times=9),
    "unavailable": Fault(status=503, times=4),
    "too many requests": Fault(status=429, times=2),
    "server error, later": Fault(status=500, times=1, after=1),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_faults_that_pass(tmp_path: Path, server: FileServer, fault: Fault) -> None:
    write_safetensors(tmp_path / "model.safetensors", X)
    server.fault = fault
    assert read(f"{server.url}/model.safetensors") == STORED
    assert fault.times == 0


@pytest.mark.parametrize(
    ("retry_after", "at_least_s", "at_most_s"),
    [("7", 7, 7), ("9999", 60, 60), ("0", 0, 1), ("soon", 0, 1), ("a date in 20 s", 10, 20)],
)
def test_a_server_that_says_when_is_left_alone_until_then(
    tmp_path: Path,
    server: FileServer,
    monkeypatch: pytest.MonkeyPatch,
    retry_after: str,
    at_least_s: float,
    at_most_s: float,
) -> None:
    write_safetensors(tmp_path / "model.safetensors", X)
    if retry_after.startswith("a date"):
        retry_after = format_datetime(datetime.now(UTC) + timedelta(seconds=20), usegmt=True)
    pauses: list[float] = []
    monkeypatch.setattr(requests.Requests, "pause", lambda _self, seconds: pauses.append(seconds))
    server.fault = Fault(status=429, retry_after=retry_after)
    assert read(f"{server.url}/model.safetensors") == STORED
    (pause_s,) = pauses
    assert at_least_s <= pause_s <= at_most_s


def test_what_came_is_not_asked_for_again(tmp_path: Path, server: FileServer) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", X)
    server.fault = Fault(cut=0.5, times=5)
    assert read(f"{server.url}/model.safetensors") == STORED
    assert server.sent["/model.safetensors"] < 1.5 * path.stat().st_size


@pytest.mark.parametrize(
    ("fault", "attempts", "cause"),
    [
        (Fault(status=503, times=None), 5, "status 503"),
        (Fault(cut=0.0, times=None), 5, "ConnectionError"),
        (Fault(status=403, times=None), 1, "credentials"),
        (Fault(status=400, times=None), 1, "Check the URL"),
    ],
    ids=["unavailable", "resets", "forbidden", "refused"],
)
def test_faults_that_last(tmp_path: Path, server: FileServer, fault: Fault, attempts: int, cause: str) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", X)
    checkpoint = open_checkpoint(f"{server.url}/model.safetensors?key=secret")
    server.requests.clear()
    server.fault = fault
    with (
        pytest.raises(RemoteReadError, match=cause) as caught,
        READERS["http"].open(checkpoint.shards[0], 4096) as file,
    ):
        file.fill(1000, [memoryview(bytearray(500))])
    error = caught.value
    assert (error.path, error.start, error.end) == (f"{server.url}/{path.name}", 1000, 1500)
    assert error.attempts == attempts
    assert len(server.requests) == attempts + 1  # and one that looked the file up
    assert error.__cause__ is not None
    for fact in (error.path, "1000 to 1500", str(attempts)):
        assert fact in str(error)
    assert "secret" not in str(error)


def test_no_server(tmp_path: Path) -> None:
    with file_server(tmp_path) as server:
        url = server.url
    with pytest.raises(RemoteReadError, match="5 attempts in a row") as caught:
        open_checkpoint(f"{url}/model.safetensors")
    assert (caught.value.start, caught.value.end) == (None, None)


def test_a_server_without_ranges(tmp_path: Path, server: FileServer) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"x": random_tensor((8 << 20,))})
    server.ranges = False
    with pytest.raises(UnsupportedError, match="download the file"):
        open_checkpoint(f"{server.url}/model.safetensors")
    server.ranges = True
    checkpoint = open_checkpoint(f"{server.url}/model.safetensors")
    server.ranges = False
    with (
        pytest.raises(UnsupportedError, match="no byte ranges"),
        READERS["http"].open(checkpoint.shards[0], 4096) as file,
    ):
        file.fill(1000, [memoryview(bytearray(500))])


@pytest.mark.parametrize("etags", [True, False])
def test_a_file_that_changes_between_plan_and_read(tmp_path: Path, server: FileServer, etags: bool) -> None:
    write_safetensors(tmp_path / "model.safetensors", X)
    server.etags = etags
    (shard,) = open_checkpoint(f"{server.url}/model.safetensors").shards
    assert (shard.version is not None) is etags
    for size, error in ((0, ChangedFileError if etags else None), (1, ChangedFileError), (-1, TruncatedFileError)):
        content = bytes(shard.size_bytes + size)
        (tmp_path / "model.safetensors").write_bytes(content)
        if error is None:
            continue  # nothing tells this one from the other
        with pytest.raises(error), READERS["http"].open(shard, 4096) as file:
            file.fill(10, [memoryview(bytearray(10))])


def test_synchronous_file_systems_are_read_by_many_threads() -> None:
    """fsspec's memory hands every thread the same open file."""
    data = bytes(random_tensor((1 << 20,)).view(torch.uint8).tolist()[: 1 << 20])
    fsspec.filesystem("memory").pipe_file("/published/x.safetensors", data)
    url = "memory://published/x.safetensors"
    with store_of(url).open(url) as file:
        shard = file.shard

    def part(start: int) -> bool:
        content = bytearray(5000)
        with READERS["fsspec"].open(shard, 4096) as handle:
            handle.fill(start, [memoryview(content)])
        return bytes(content) == data[start : start + 5000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(part, range(0, 1_000_000, 10_000)))
    fsspec.filesystem("memory").rm("/published", recursive=True)


def test_errors_of_a_driver_are_tried_again_and_then_told(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(10_000)
    fsspec.filesystem("memory").pipe_file("/published/x.safetensors", data)
    url = "memory://published/x.safetensors"
    calls: list[tuple[int, int]] = []
    with store_of(url).open(url) as file:
        shard = file.shard
    real = MemoryFileSystem.cat_file

    def failing(times: int, error: Exception) -> None:
        calls.clear()

        def cat_file(self: MemoryFileSystem, path: str, start: int, end: int, **settings: object) -> bytes:
            calls.append((start, end))
            if len(calls) <= times:
                raise error
            return bytes(real(self, path, start, min(end, start + 3000), **settings))  # and short replies

        monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)

    def fill() -> None:
        with READERS["fsspec"].open(shard, 20_000) as handle:
            handle.fill(0, [memoryview(bytearray(10_000))])

    for error in (TimeoutError("slow"), ConnectionResetError(), ClientPayloadError("cut")):
        failing(4, error)
        fill()
        assert len(calls) == 8
    failing(5, TimeoutError("slow"))
    with pytest.raises(RemoteReadError, match="TimeoutError: slow"):
        fill()
    failing(1, PermissionError("no"))
    with pytest.raises(ReadError, match=r"in 1 attempt;.*credentials"):
        fill()
    fsspec.filesystem("memory").rm("/published", recursive=True)
