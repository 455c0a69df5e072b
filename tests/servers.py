"""A web server of files with byte ranges, in a thread, that fails as it is told to."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

__all__ = ["Fault", "FileServer", "file_server"]

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


@dataclass
class Fault:
    """What goes wrong with the replies to come.

    Attributes
    ----------
    status, retry_after
        Instead of the file, this status, and when to ask again.
    cut
        Only so much of the body, then the connection is reset.
    silent_s
        Nothing for so long, after the head of the reply.
    times
        How many replies; None: all.
    after
        How many replies are sound before.
    """

    status: int | None = None
    retry_after: str | None = None
    cut: float | None = None
    silent_s: float = 0.0
    times: int | None = 1
    after: int = 0


@dataclass
class FileServer:
    """The server of a directory.

    Attributes
    ----------
    fault
        What goes wrong with requests for tensor bytes, those that start beyond `sound_bytes`.
    ranges, etags, listing
        Whether the server knows them.
    requests
        (path, first byte, last byte) of each request.
    """

    directory: Path
    url: str = ""
    fault: Fault | None = None
    sound_bytes: int = 0
    ranges: bool = True
    etags: bool = True
    listing: bool = True
    requests: list[tuple[str, int, int]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    stopping: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self, first: int) -> Fault | None:
        """The fault of the next reply, which starts at byte `first`."""
        with self.lock:
            fault = self.fault
            if fault is None or first < self.sound_bytes or fault.times == 0:
                return None
            if fault.after:
                fault.after -= 1
                return None
            if fault.times is not None:
                fault.times -= 1
            return fault


@contextmanager
def file_server(directory: Path, **facts: Any) -> Iterator[FileServer]:
    """A server of `directory`, until left."""
    state = FileServer(directory, **facts)

    class Handler(_Handler):
        server_state = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield state
    finally:
        state.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: FileServer

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        state = self.server_state
        with state.lock:
            state.in_flight += 1
            state.most_in_flight = max(state.most_in_flight, state.in_flight)
        try:
            self._answer(state)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with state.lock:
                state.in_flight -= 1

    def _answer(self, state: FileServer) -> None:
        path = state.directory / unquote(urlsplit(self.path).path).lstrip("/")
        if path.is_dir():
            names = sorted(child.name for child in path.iterdir()) if state.listing else []
            page = "".join(f'<a href="{quote(name)}">{name}</a>' for name in names).encode()
            self._reply(200 if state.listing else 404, {"Content-Type": "text/html"}, page)
            return
        if not path.is_file():
            self._reply(404, {}, b"")
            return
        size, status = path.stat().st_size, path.stat()
        tag = {"ETag": f'"{status.st_mtime_ns}-{status.st_ino}"'} if state.etags else {}
        asked = _RANGE.match(self.headers.get("Range", "")) if state.ranges else None
        if asked is None:
            self._reply(200, tag, path.read_bytes())
            return
        first, last = int(asked[1]), min(int(asked[2]), size - 1)
        with state.lock:
            state.requests.append((urlsplit(self.path).path, first, last))
        fault = state.next_fault(first)
        if fault is not None and fault.status is not None:
            headers = {} if fault.retry_after is None else {"Retry-After": fault.retry_after}
            self._reply(fault.status, headers, b"broken")
        elif first >= size:
            self._reply(416, {**tag, "Content-Range": f"bytes */{size}"}, b"")
        else:
            with path.open("rb") as file:
                file.seek(first)
                body = file.read(last - first + 1)
            self._reply(206, {**tag, "Content-Range": f"bytes {first}-{last}/{size}"}, body, fault)

    def _reply(self, status: int, headers: dict[str, str], body: bytes, fault: Fault | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault is None:
            self._send(body)
            return
        self.wfile.flush()
        if fault.silent_s:
            self.server_state.stopping.wait(fault.silent_s)
        self._send(body[: int(len(body) * (1.0 if fault.cut is None else fault.cut))])
        if fault.cut is not None:
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def _send(self, body: bytes) -> None:
        self.wfile.write(body)
        with self.server_state.lock:
            self.server_state.sent[urlsplit(self.path).path] += len(body)
