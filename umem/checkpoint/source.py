"""Finds the files of a checkpoint and opens them: a directory, a file, a URL, a hub id. Reads headers, no tensor bytes.

Within a directory, in this order: `model.safetensors`, `model.safetensors.index.json`, another single index, the only
safetensors file, all safetensors files when none shares a tensor with another, then the same for torch files. An index
says which files belong; others beside it are not looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from umem.checkpoint._json import parse_strict
from umem.checkpoint.entries import Checkpoint, Entry
from umem.checkpoint.hub import looks_like_hub_id, snapshot_directory
from umem.checkpoint.safetensors import ShardContents, read_safetensors
from umem.checkpoint.stores import LocalStore, Store, store_of
from umem.checkpoint.torchzip import read_torch_zip
from umem.checkpoint.urls import is_url, path_of, plain_path, shown
from umem.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    DuplicateTensorError,
    IndexFormatError,
    MissingShardError,
    MissingTensorError,
    ShardPathError,
)

__all__ = ["open_checkpoint", "open_files"]

_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_INDEX_SUFFIX = ".index.json"
_MAX_INDEX_BYTES = 1 << 30
_HEADER_THREADS = 8


def open_checkpoint(path_or_id: str | os.PathLike[str], *, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint: read every header and check it whole, before any tensor byte is read.

    Parameters
    ----------
    path_or_id
        A directory, one file, an index file, the URL of one of these, or a hub id (`org/name`), which is looked up in
        the local cache first.
    revision
        Branch, tag or commit, for hub ids.

    Raises
    ------
    CheckpointNotFoundError
        Nothing is there.
    CheckpointError
        One of its leaves: what is there cannot be used.
    """
    path = plain_path(os.fspath(path_or_id))
    store = store_of(path)
    kind = store.kind(path)
    if kind == "directory":
        return _open_directory(store, path)
    if kind == "file":
        return _open_index(store, path) if path_of(path).endswith(_INDEX_SUFFIX) else open_files(path, [path])
    if looks_like_hub_id(path):
        directory = snapshot_directory(path, revision, complete=_holds_weights)
        return replace(_open_directory(LocalStore(), directory), identifier=path)
    if is_url(path):
        raise CheckpointNotFoundError("there is nothing at this URL; check it, and the credentials", path=shown(path))
    raise CheckpointNotFoundError("no such file or directory, and no hub id (org/name); check the path", path=path)


def open_files(path: str, files: Sequence[str], *, metadata: dict[str, str] | None = None) -> Checkpoint:
    """Open these files, which are in one store, as one checkpoint; `path` is what it is called."""
    store = store_of(path)
    with ThreadPoolExecutor(min(_HEADER_THREADS, max(1, len(files)))) as pool:
        try:
            contents = list(pool.map(lambda file, index: _read_contents(store, file, index), files, range(len(files))))
        except BaseException:
            store.cancel()
            raise
    merged = dict(metadata or {})
    for content in contents:
        merged.update(content.metadata)
    return Checkpoint(shown(path), tuple(content.shard for content in contents), _merged_entries(contents), merged)


def _read_contents(store: Store, path: str, shard_index: int) -> ShardContents:
    is_torch = path_of(path).endswith(_TORCH_SUFFIXES)
    with store.open(path) as file:
        return read_torch_zip(file, shard_index) if is_torch else read_safetensors(file, shard_index)


def _merged_entries(contents: Iterable[ShardContents]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    shards = []
    for content in contents:
        shards.append(content.shard)
        for entry in content.entries:
            other = entries.setdefault(entry.name, entry)
            if other is not entry:
                raise DuplicateTensorError(
                    f"the tensor is in {os.path.basename(path_of(shards[other.shard].path))} too; keep one of the two,"
                    " or name the right files in an index",
                    path=shown(content.shard.path),
                    tensor=entry.name,
                )
    return entries


def _holds_weights(directory: str) -> bool:
    return _select(LocalStore(), directory) is not None


def _open_directory(store: Store, directory: str) -> Checkpoint:
    chosen = _select(store, directory)
    if chosen is None:
        raise CheckpointNotFoundError(
            "the directory holds no weights (*.safetensors, *.safetensors.index.json, *.bin, *.pt, *.pth)",
            path=shown(directory),
        )
    if isinstance(chosen, str):
        return replace(_open_index(store, store.joined(directory, chosen)), path=shown(directory))
    return open_files(directory, [store.joined(directory, name) for name in chosen])


def _select(store: Store, directory: str) -> str | list[str] | None:
    """The name of the index, or those of the files, that make up the checkpoint in a directory; None: there is none."""
    names = sorted(name for name in store.names(directory) if not name.startswith("."))
    for kind, preferred in ((".safetensors", "model"), (".bin", "pytorch_model")):
        if f"{preferred}{kind}" in names:
            return [f"{preferred}{kind}"]
        indexes = [name for name in names if name.endswith(f"{kind}{_INDEX_SUFFIX}")]
        if f"{preferred}{kind}{_INDEX_SUFFIX}" in indexes:
            indexes = [f"{preferred}{kind}{_INDEX_SUFFIX}"]
        if len(indexes) > 1:
            raise AmbiguousCheckpointError(
                f"several indexes: {', '.join(indexes)}; give the path of one of them", path=shown(directory)
            )
        if indexes:
            return indexes[0]
        files = [name for name in names if name.endswith(kind)]
        if files:
            return files
    files = [name for name in names if name.endswith(_TORCH_SUFFIXES)]
    if len(files) > 1:
        raise AmbiguousCheckpointError(
            f"several files: {', '.join(files)}; give the path of one of them", path=shown(directory)
        )
    return files or None


def _open_index(store: Store, index_path: str) -> Checkpoint:
    called = shown(index_path)
    with store.open(index_path) as file:
        if file.shard.size_bytes > _MAX_INDEX_BYTES:
            raise IndexFormatError("the index is larger than any checkpoint's", path=called)
        index = parse_strict(file.read(0, file.shard.size_bytes), path=called, what="the index")
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise IndexFormatError(
            "`weight_map` must map tensor names to file names; download the index again", path=called
        )
    names = sorted(set(weight_map.values()), key=_natural_order)
    for name in names:
        _check_shard_name(name, called)
    files = {store.joined(store.parent(index_path), name): name for name in names}
    metadata = index.get("metadata") or {}
    described = {key: str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}
    try:
        checkpoint = open_files(index_path, list(files), metadata=described)
    except CheckpointNotFoundError as error:
        missing = next((name for path, name in files.items() if shown(path) == error.path), error.path)
        raise MissingShardError(
            f"the index names {missing}, which is not there; the download is not complete", path=called
        ) from None
    positions = {name: position for position, name in enumerate(names)}
    for tensor, shard_name in weight_map.items():
        entry = checkpoint.entries.get(tensor)
        if entry is None or entry.shard != positions[shard_name]:
            raise MissingTensorError(
                f"the index places it in {shard_name}, which lacks it; shards and index are of different versions",
                path=called,
                tensor=tensor,
            )
    return checkpoint


def _check_shard_name(name: str, index_path: str) -> None:
    parts = re.split(r"[/\\]", name)
    if not name or os.path.isabs(name) or ".." in parts or "\0" in name:
        raise ShardPathError(
            f"the index names {name!r}, which leaves the directory; umem does not follow it", path=index_path
        )


def _natural_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
