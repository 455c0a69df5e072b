"""URLs of files, as text: what is one, how names are joined to one, what of one may be shown. Opens nothing.

A path without `scheme://` is local; so is `file://`, which `plain_path` takes off. The query of an http URL, where
tokens and signatures are, belongs to every file under it and is never shown.
"""

from __future__ import annotations

import posixpath
import re
from urllib.parse import quote, urlsplit, urlunsplit

from umem.errors import UnsupportedError

__all__ = ["is_http", "is_url", "joined", "parent", "path_of", "plain_path", "protocol_of", "shown"]

_URL = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]+)://")
_LOCAL = ("file", "local")


def is_url(path: str) -> bool:
    """Whether `path` is a URL rather than a local path or a hub id."""
    return _URL.match(path) is not None


def is_http(path: str) -> bool:
    """Whether `path` is an http or https URL."""
    return is_url(path) and protocol_of(path) in ("http", "https")


def protocol_of(url: str) -> str:
    """The scheme of a URL, as fsspec names it."""
    return url.partition("://")[0].lower()


def plain_path(path: str) -> str:
    """The local path of a `file://` URL; anything else as it is.

    Raises
    ------
    UnsupportedError
        A chain of file systems (`zip://...::s3://...`), whose caches and archives umem does not read through.
    """
    if "::" in path and "://" in path.partition("::")[2]:
        raise UnsupportedError(f"{path}: umem does not read through chained URLs; give the URL of the store itself")
    return path.partition("://")[2] if is_url(path) and protocol_of(path) in _LOCAL else path


def path_of(url: str) -> str:
    """The part of a URL that names the file; a local path as it is."""
    return urlsplit(url).path if is_http(url) else url


def joined(directory: str, name: str) -> str:
    """The URL of `name`, a path of plain text, in the directory at that URL."""
    if not is_http(directory):
        return f"{directory.rstrip('/')}/{name}"
    parts = urlsplit(directory)
    return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}"))


def parent(url: str) -> str:
    """The URL of the directory that holds the file at `url`."""
    if not is_http(url):
        return url.rpartition("/")[0]
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=posixpath.dirname(parts.path)))


def shown(path: str) -> str:
    """The URL without its query and password, for messages and reports; a local path as it is."""
    if not is_url(path):
        return path
    if is_http(path):
        path = urlunsplit(urlsplit(path)._replace(query="", fragment=""))
    protocol, _, rest = path.partition("://")
    host, slash, name = rest.partition("/")
    return f"{protocol}://{host.rpartition('@')[2]}{slash}{name}"
