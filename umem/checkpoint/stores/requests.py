"""Requests that may take long or fail in passing: cancelled from other threads, tried again with pauses between.

A request fails in passing when the network or the server's state is at fault: a broken connection, a reply cut short,
no reply in time, the statuses in `TRANSIENT_STATUSES`. What is not there, not allowed or not understood is asked for
once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import random
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from umem.checkpoint.urls import shown
from umem.errors import ReadError, RemoteReadError, UmemError

__all__ = ["ATTEMPTS", "TRANSIENT_STATUSES", "Patience", "Requests", "is_transient"]

#: How often in a row something is asked for that does not come.
ATTEMPTS = 5

#: Pauses between attempts: 0.25 s, doubled each time, and up to half of it taken off at random.
_FIRST_PAUSE_S = 0.25

#: A server that wants to be left alone for longer is asked again after this all the same.
_LONGEST_PAUSE_S = 60.0

TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
_DENIED_STATUSES = frozenset({401, 403})
#: What drivers raise for a broken network that is no OSError.
_NETWORK_ERRORS = (
    ("aiohttp", "ClientError"),
    ("azure.core.exceptions", "IncompleteReadError"),
    ("azure.core.exceptions", "ServiceRequestError"),
    ("azure.core.exceptions", "ServiceResponseError"),
    ("botocore.exceptions", "ConnectionError"),
    ("botocore.exceptions", "HTTPClientError"),
    ("botocore.exceptions", "IncompleteReadError"),
)

_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)

_T = TypeVar("_T")


def is_transient(error: Exception) -> bool:
    """Whether what failed may work a moment later."""
    status = _status(error)
    if status is not None:
        return status in TRANSIENT_STATUSES
    if isinstance(error, (*_LASTING, UmemError)):
        return False
    loaded = ((sys.modules.get(module), name) for module, name in _NETWORK_ERRORS)
    return isinstance(error, (OSError, *(getattr(module, name) for module, name in loaded if hasattr(module, name))))


def _status(error: Exception) -> int | None:
    """The HTTP status that an error carries, as aiohttp's and gcsfs's do."""
    found = getattr(error, "status", getattr(error, "code", None))
    return found if isinstance(found, int) else None


class Requests:
    """The requests of one user; `cancel`, from any thread, ends the one in flight and all later ones."""

    def __init__(self) -> None:
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._in_flight: set[concurrent.futures.Future[Any]] = set()

    def run(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T]) -> _T:
        """The result of a coroutine on another thread's event loop."""
        future = asyncio.run_coroutine_threadsafe(work, loop)
        with self._lock:
            self._in_flight.add(future)
            if self._cancelled.is_set():
                future.cancel()
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the waiting itself was interrupted
            raise
        finally:
            with self._lock:
                self._in_flight.discard(future)

    def cancel(self) -> None:
        """End everything."""
        with self._lock:
            self._cancelled.set()
            for future in self._in_flight:
                future.cancel()

    @property
    def are_cancelled(self) -> bool:
        """Whether somebody has."""
        return self._cancelled.is_set()

    def pause(self, seconds: float) -> None:
        """Wait, no longer than until somebody cancels."""
        self._cancelled.wait(seconds)

    def persist(self, url: str, ask: Callable[[], _T]) -> _T:
        """What `ask` gives, within the attempts there are; that something is not there is its answer."""
        patience = Patience(self, url)
        while True:
            try:
                return ask()
            except (UmemError, FileNotFoundError):
                raise
            except Exception as error:
                if (final := patience.verdict(error)) is not None:
                    raise final from error


class Patience:
    """Counts the attempts in a row that brought nothing, and pauses before the next, as long as the server asked for.

    Parameters
    ----------
    requests
        By whom the asking is cancelled.
    url
        What is asked for; `end` is one past the last byte of the range, None where it is no range.
    """

    def __init__(self, requests: Requests, url: str, end: int | None = None) -> None:
        self._requests, self._path, self._end = requests, shown(url), end
        self._attempts = 0

    def progress(self) -> None:
        """Bytes came; count from the start again."""
        self._attempts = 0

    def verdict(self, error: Exception, start: int | None = None) -> ReadError | None:
        """None, after a pause, if it should be asked again from `start` on; else the error that ends the asking."""
        if self._requests.are_cancelled:
            return ReadError("the read was given up", path=self._path)
        self._attempts += 1
        if self._attempts < ATTEMPTS and is_transient(error):
            pause_s: float = _FIRST_PAUSE_S * 2 ** (self._attempts - 1)
            pause_s *= random.uniform(0.5, 1.0)  # noqa: S311 - spreads requests, hides nothing
            wanted_s = getattr(error, "retry_after_s", None) or 0.0
            self._requests.pause(max(pause_s, min(wanted_s, _LONGEST_PAUSE_S)))
            return None
        what = "it could not be looked up" if start is None else f"bytes {start} to {self._end} could not be read"
        times = "1 attempt" if self._attempts == 1 else f"{self._attempts} attempts in a row"
        cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        return RemoteReadError(
            f"{what}, in {times}; the last failed with {cause}. {_cure(error)}",
            path=self._path,
            attempts=self._attempts,
            start=start,
            end=self._end,
        )


def _cure(error: Exception) -> str:
    if isinstance(error, PermissionError) or _status(error) in _DENIED_STATUSES or "redential" in type(error).__name__:
        return "Check the credentials; fsspec takes them from the store's own places and from FSSPEC_* variables"
    if is_transient(error):
        return "Check the network and the store, and load again"
    return "Check the URL"
