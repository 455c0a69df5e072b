"""Files of any fsspec file system: object stores, and what else there is a driver for. Whole replies, no caches.

A reply is a `bytes` of its own, which the driver puts together from pieces: it is held twice for a moment.
Asynchronous file systems answer many threads at once. Others are asked one request at a time: some (memory) hand every
thread the same open file.
"""

from __future__ import annotations

import threading
from typing import Any, Literal

from umem.checkpoint.entries import Shard
from umem.checkpoint.stores.filesystems import filesystem_of
from umem.checkpoint.stores.requests import Requests
from umem.checkpoint.stores.sink import Sink

__all__ = ["ObjectTransport"]

#: What drivers say of a file that changes when it does; generations and tags before times.
_VERSION_FACTS = ("ETag", "etag", "generation", "VersionId", "md5Hash", "content_md5", "LastModified", "last_modified",
                  "updated", "modified", "mtime", "created")  # fmt: skip

_one_at_a_time = threading.Lock()


class ObjectTransport:
    """A file system's files, by their URLs.

    Parameters
    ----------
    request_bytes
        The most that one request asks for.
    """

    def __init__(self, url: str, requests: Requests, request_bytes: int) -> None:
        self._filesystem, self._path = filesystem_of(url)
        self._url, self._requests, self._request_bytes = url, requests, request_bytes

    def kind(self) -> Literal["file", "directory"]:
        """What the file system says."""
        return "directory" if self._info()["type"] == "directory" else "file"

    def names(self) -> list[str]:
        """The names in the directory."""
        self._filesystem.invalidate_cache()
        listed = self._ask("ls", self._path, detail=False)
        return [str(path).rstrip("/").rpartition("/")[2] for path in listed]

    def inspect(self) -> Shard:
        """The file's length and version."""
        info = self._info()
        if info["type"] == "directory" or info.get("size") is None:
            raise FileNotFoundError(self._path)
        version = tuple((fact, str(info[fact])) for fact in _VERSION_FACTS if info.get(fact) is not None)
        return Shard(self._url, int(info["size"]), version)

    def fetch(self, shard: Shard, start: int, sink: Sink) -> None:
        """The bytes from `start` on into `sink`, one request's worth."""
        end = min(start + min(sink.missing, self._request_bytes), shard.size_bytes)
        if end > start:
            sink.write(self._ask("cat_file", self._path, start=start, end=end))

    def _info(self) -> dict[str, Any]:
        self._filesystem.invalidate_cache()  # a listing from before would say what was, not what is
        info: dict[str, Any] = self._ask("info", self._path)
        return info

    def _ask(self, method: str, *arguments: Any, **settings: Any) -> Any:
        if self._filesystem.async_impl:
            work = getattr(self._filesystem, f"_{method}")(*arguments, **settings)
            return self._requests.run(self._filesystem.loop, work)
        if method == "cat_file":
            settings["cache_type"] = "none"
        with _one_at_a_time:
            return getattr(self._filesystem, method)(*arguments, **settings)
