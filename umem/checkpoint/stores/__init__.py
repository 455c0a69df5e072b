"""Stores: where the files of a checkpoint live. Local directories, and whatever fsspec has a file system for."""

from __future__ import annotations

from umem.checkpoint.stores.base import Store, StoredFile
from umem.checkpoint.stores.local import LocalStore
from umem.checkpoint.urls import is_url

__all__ = ["LocalStore", "Store", "StoredFile", "store_of"]


def store_of(path: str) -> Store:
    """The store that a path or URL is in."""
    if not is_url(path):
        return LocalStore()
    from umem.checkpoint.stores.remote import RemoteStore

    return RemoteStore()
