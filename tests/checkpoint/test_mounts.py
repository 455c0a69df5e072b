"""The file system of a path: that of the mount which holds it, and of no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mounts import mounted
from umem.checkpoint.mounts import file_system_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


def test_a_mount_says_the_file_system_of_what_lies_in_it(tmp_path: Path) -> None:
    outside = file_system_of(tmp_path)
    assert file_system_of("/proc/self") == "proc"
    with mounted("tmpfs", tmp_path / "a"), mounted("overlay", tmp_path / "b"):
        (tmp_path / "a" / "file").write_text("")
        (tmp_path / "b" / "file").write_text("")
        (tmp_path / "link").symlink_to("a/file")
        assert file_system_of(tmp_path / "a" / "file") == "tmpfs"
        assert file_system_of(tmp_path / "link") == "tmpfs"
        assert file_system_of(tmp_path / "b" / "file") == "overlay"
        assert file_system_of(tmp_path) == outside
    assert file_system_of(tmp_path / "a") == outside


def test_a_hidden_mount_says_nothing(tmp_path: Path) -> None:
    with mounted("tmpfs", tmp_path / "a"):
        (tmp_path / "a" / "b").mkdir()
        with mounted("overlay", tmp_path / "a" / "b"), mounted("tmpfs", tmp_path / "a"):
            (tmp_path / "a" / "b").mkdir()
            assert file_system_of(tmp_path / "a" / "b") == "tmpfs"


def test_what_is_not_there_lies_on_none(tmp_path: Path) -> None:
    assert file_system_of(tmp_path / "none") is None
