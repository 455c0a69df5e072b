"""URLs as text."""

import pytest

from umem.checkpoint.urls import is_url, joined, parent, plain_path, shown


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("s3://bucket/model", True),
        ("memory://x", True),
        ("org/name", False),
        ("/data/a://b", False),
        ("C:\\models", False),
        ("name", False),
    ],
)
def test_what_is_a_url(path: str, expected: bool) -> None:
    assert is_url(path) is expected


@pytest.mark.parametrize(
    ("directory", "name", "expected"),
    [
        ("s3://bucket/a b/", "m #1.safetensors", "s3://bucket/a b/m #1.safetensors"),
        ("https://host", "m.safetensors", "https://host/m.safetensors"),
        ("https://host/a/?key=1", "sub/m #1?.bin", "https://host/a/sub/m%20%231%3F.bin?key=1"),
    ],
)
def test_names_in_directories(directory: str, name: str, expected: str) -> None:
    assert joined(directory, name) == expected
    if "/sub/" not in expected:
        assert joined(parent(expected), name) == expected


def test_what_is_shown() -> None:
    for url in (
        "https://me:secret@host:80/a/m.bin?key=secret#secret",
        "https://host?key=secret",
        "ftp://me:secret@host/x",
    ):
        assert "secret" not in shown(url)
    for path in ("/data/odd?name", "s3://bucket/what?.bin", "https://host:80/a%20b"):
        assert shown(path) == path


def test_file_urls_are_paths() -> None:
    assert plain_path("file:///data/x") == "/data/x"
    assert plain_path("s3://bucket/x") == "s3://bucket/x"
