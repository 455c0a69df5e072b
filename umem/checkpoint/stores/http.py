"""Files of web servers: ranged requests, streamed into place, each reply held against what was asked.

fsspec's http file system gives the session with its settings and the event loop. The requests are made here, because
its own hold whole replies in memory, those too that give the whole file where a range was asked for. A reply must be
partial (206), start where it should, and be of the version that was opened.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal
from urllib.parse import unquote, urlsplit

from aiohttp import ClientError, ClientResponse, ClientResponseError, ClientTimeout, InvalidURL

from umem.checkpoint.entries import Shard
from umem.checkpoint.stores.filesystems import filesystem_of
from umem.checkpoint.stores.requests import Requests
from umem.checkpoint.stores.sink import Sink
from umem.checkpoint.urls import path_of, shown
from umem.errors import UnsupportedError

__all__ = ["HttpTransport", "StatusError"]

#: Names by which a URL is taken for that of a file; servers do not say what is a directory.
_FILE_SUFFIXES = (".safetensors", ".json", ".bin", ".pt", ".pth")

#: Without a byte for so long, a reply is given up. A whole reply may take any time.
_SILENCE_S = 60.0

_ABSENT_STATUSES = (404, 410)
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")


class StatusError(OSError):
    """The server refused, with a status.

    Attributes
    ----------
    status
        The HTTP status.
    retry_after_s
        How long it wants to be left alone, where it says so.
    """

    def __init__(self, status: int, reason: str, retry_after: str = "") -> None:
        self.status = status
        self.retry_after_s = _seconds_until(retry_after)
        super().__init__(f"status {status} {reason}".rstrip())


def _seconds_until(when: str) -> float | None:
    """A Retry-After in seconds from now: a number of them, or a date (RFC 9110, 10.2.3). None for anything else."""
    if when.strip().isdecimal():
        return float(when)
    try:
        date = parsedate_to_datetime(when)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=UTC)
    return max(0.0, (date - datetime.now(UTC)).total_seconds())


class HttpTransport:
    """A web server's files, by their URLs."""

    def __init__(self, url: str, requests: Requests) -> None:
        self._filesystem, _ = filesystem_of(url)
        self._url, self._requests = url, requests

    def kind(self) -> Literal["file", "directory"]:
        """By its name: servers do not tell. That a file is there is looked up."""
        if not path_of(self._url).endswith(_FILE_SUFFIXES):
            return "directory"
        self.inspect()
        return "file"

    def names(self) -> list[str]:
        """The names that an index page of the server links to; none where there is no such page."""
        base = self._url.rstrip("/")
        if urlsplit(base).query:
            return []
        try:
            links = self._requests.run(self._filesystem.loop, self._filesystem._ls(f"{base}/", detail=False))
        except FileNotFoundError:
            return []
        except ClientResponseError as error:
            if error.status < 500:
                return []
            raise
        except ClientError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        below = (link.removeprefix(f"{base}/") for link in links if link.startswith(f"{base}/"))
        return [unquote(name) for name in below if name and "/" not in name]

    def inspect(self) -> Shard:
        """The file's length and version, by a request for its first byte."""
        return self._requests.run(self._filesystem.loop, self._get(0, 1))

    def fetch(self, shard: Shard, start: int, sink: Sink) -> None:
        """Stream the bytes from `start` on into `sink`, as far as they come."""
        self._requests.run(self._filesystem.loop, self._get(start, start + sink.missing, shard, sink))

    async def _get(self, start: int, end: int, expected: Shard | None = None, sink: Sink | None = None) -> Shard:
        """The file as a reply shows it, which must be as expected; the reply's body goes to `sink`."""
        options = dict(self._filesystem.kwargs)
        headers = {**options.pop("headers", {}), "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        if "timeout" not in self._filesystem.client_kwargs:
            options.setdefault("timeout", ClientTimeout(None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S))
        session = await self._filesystem.set_session()
        try:
            async with session.get(self._filesystem.encode_url(self._url), headers=headers, **options) as reply:
                shard, first = self._seen(reply)
                if expected is not None:
                    expected.check_same(shard)
                if sink is not None and first is not None:
                    if first != start:
                        raise ConnectionError(f"byte {start} was asked for, the reply starts at byte {first}")
                    async for chunk in reply.content.iter_any():
                        sink.write(chunk)
                return shard
        except InvalidURL:
            raise UnsupportedError(f"{shown(self._url)}: this is no URL that can be asked for") from None
        except ClientError as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error

    def _seen(self, reply: ClientResponse) -> tuple[Shard, int | None]:
        """The file as a reply's head shows it, and where the body starts in it; None for past the end."""
        if reply.status in _ABSENT_STATUSES:
            raise FileNotFoundError(shown(self._url))
        if reply.status >= 400 and reply.status != 416:
            raise StatusError(reply.status, reply.reason or "", reply.headers.get("Retry-After", ""))
        described = _CONTENT_RANGE.match(reply.headers.get("Content-Range", ""))
        encoded = reply.headers.get("Content-Encoding", "identity") != "identity"
        if reply.status not in (206, 416) or described is None or encoded:
            raise UnsupportedError(
                f"{shown(self._url)}: the server gives no byte ranges (status {reply.status}); download the file and"
                " give its path"
            )
        version = reply.headers.get("ETag") or reply.headers.get("Last-Modified")
        first = None if described[1] is None else int(described[1])
        return Shard(self._url, int(described[2]), version), first
