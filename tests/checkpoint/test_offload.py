"""Folders and files for weights on disk: what is written is read back, and nothing else is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.writers import same_bytes
from umem._types import DType
from umem.checkpoint import open_checkpoint
from umem.checkpoint.offload import OffloadFile, OffloadFolder, Weight, check_space
from umem.checkpoint.pagecache import cached_bytes_of_files
from umem.errors import InsufficientSpaceError, SettingsError, UnsupportedError

WEIGHTS = {
    "flag": torch.tensor([True, False, True]),
    "weight": torch.randn(5, 7).to(torch.bfloat16),
    "scale": torch.randn(3, dtype=torch.float64),
    "coded": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "packed": torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2),
    "count": torch.tensor(7),
    "none": torch.empty(0, 3),
}


def written(path: Path) -> OffloadFile:
    file = OffloadFile(
        str(path), [Weight(name, DType.from_torch(w.dtype), tuple(w.shape)) for name, w in WEIGHTS.items()]
    )
    for name, weight in WEIGHTS.items():
        content = weight.reshape(-1).view(torch.uint8).numpy().tobytes() if weight.numel() else b""
        file.memory[file.start_of(name) : file.start_of(name) + len(content)] = content
    return file


def test_the_file_is_a_checkpoint_like_any_other(tmp_path: Path) -> None:
    file = written(tmp_path / "w.safetensors")
    file.settle()
    file.close()
    with safe_open(tmp_path / "w.safetensors", framework="pt") as stored:
        for name, weight in WEIGHTS.items():
            assert stored.get_tensor(name).dtype == weight.dtype
            assert same_bytes(stored.get_tensor(name), weight), name
    entries = open_checkpoint(tmp_path / "w.safetensors").entries
    assert {name: entry.shape for name, entry in entries.items()} == {n: tuple(w.shape) for n, w in WEIGHTS.items()}
    assert all(entry.start % entry.dtype.itemsize == 0 for entry in entries.values())


def test_settling_writes_and_leaves_no_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    file = OffloadFile(str(path), [Weight("w", DType.U8, (8 << 20,))])
    file.memory[file.start_of("w") :] = b"x" * (8 << 20)
    cached = cached_bytes_of_files([str(path)])
    if not cached:
        pytest.skip("the page cache of this file system cannot be counted")
    file.settle()
    assert cached_bytes_of_files([str(path)]) == 0
    assert file.memory[file.start_of("w") :] == b"x" * (8 << 20)
    file.close()


def test_a_folder_goes_with_what_it_made_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "foreign").write_text("keep")
    folders = [OffloadFolder(str(tmp_path / name)) for name in ("there", "there", "new/deep")]
    assert len({folder.path for folder in folders}) == 3
    for folder in folders:
        Path(folder.path, "w.safetensors").write_text("x")
    for folder in folders:
        folder.remove()
    assert [path.name for path in tmp_path.rglob("*")] == ["there", "foreign"]


def test_parents_that_others_use_by_now_stay(tmp_path: Path) -> None:
    folder = OffloadFolder(str(tmp_path / "new"))
    (tmp_path / "new" / "foreign").write_text("keep")
    folder.remove()
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "foreign"]


def test_a_forked_process_leaves_the_folder_alone(tmp_path: Path) -> None:
    folder = OffloadFolder(str(tmp_path))
    child = os.fork()
    if child == 0:
        folder.remove()
        os._exit(0)
    os.waitpid(child, 0)
    assert os.path.isdir(folder.path)


def test_folders_without_room_or_on_no_drive_are_refused(tmp_path: Path) -> None:
    check_space(str(tmp_path / "not" / "there" / "yet"), 1)
    with pytest.raises(InsufficientSpaceError, match="Nothing was read") as caught:
        check_space(str(tmp_path), 1 << 60)
    assert caught.value.needed_bytes == 1 << 60
    assert 0 < caught.value.available_bytes < 1 << 60
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="is a file"):
        check_space(str(tmp_path / "file" / "folder"), 1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="no /dev/shm")
def test_a_folder_in_memory_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="lies in memory"):
        check_space("/dev/shm/umem-offload", 1)


def test_a_file_that_finds_no_space_is_an_error_and_no_kill(tmp_path: Path) -> None:
    with pytest.raises(InsufficientSpaceError, match="Free some space"):
        OffloadFile(str(tmp_path / "w.safetensors"), [Weight("w", DType.U8, (1 << 50,))])
