"""Headers changed at random: umem accepts only what the reference library accepts, and fails only in its own words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from tests.writers import Stored, file_bytes, header_of
from umem.checkpoint import open_checkpoint
from umem.errors import CheckpointError

TENSORS = {
    "model.a": Stored("F32", (2, 3), bytes(range(24))),
    "b": Stored("BF16", (), b"ab"),
    "c.weight": Stored("U8", (0, 4), b""),
    "d": Stored("F8_E4M3", (5,), b"12345"),
}
HEADER = header_of(TENSORS, {"format": "pt"})
DATA = b"".join(tensor.data for tensor in TENSORS.values())

numbers = st.integers(-3, 40) | st.sampled_from([2**31, 2**63, 2**64 - 1, 2**64, 2**70]) | st.floats() | st.none()
values: st.SearchStrategy[Any] = st.recursive(
    numbers | st.text(max_size=4) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def changed_values(draw: st.DrawFn) -> bytes:
    """The header with some of its values replaced."""
    header: dict[str, Any] = json.loads(json.dumps(HEADER))
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*header, "new"]))
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets", "all", "shape item", "offset item"]))
        entry = header.get(name)
        if field == "all" or not isinstance(entry, dict) or name == "__metadata__":
            header[name] = draw(values)
        elif field == "shape item" and isinstance(entry.get("shape"), list) and entry["shape"]:
            entry["shape"][draw(st.integers(0, len(entry["shape"]) - 1))] = draw(numbers)
        elif field == "offset item" and isinstance(entry.get("data_offsets"), list) and entry["data_offsets"]:
            entry["data_offsets"][draw(st.integers(0, len(entry["data_offsets"]) - 1))] = draw(numbers)
        elif field == "dtype":
            entry["dtype"] = draw(st.sampled_from(["F16", "F4", "F6_E2M3", "I64", "U16", "BOOL", "C64", "X"]) | values)
        elif field in ("shape", "data_offsets"):
            entry[field] = draw(st.lists(st.integers(-1, 30), max_size=4) | values)
    return json.dumps(header).encode()


@st.composite
def changed_bytes(draw: st.DrawFn) -> bytes:
    """The header's text with bytes replaced, put in and taken out."""
    raw = bytearray(json.dumps(HEADER).encode())
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(raw) - 1))
        kind = draw(st.sampled_from(["replace", "insert", "delete"]))
        if kind == "replace":
            raw[place] = draw(st.integers(0, 255))
        elif kind == "insert":
            raw[place:place] = draw(st.binary(min_size=1, max_size=3))
        else:
            del raw[place : place + draw(st.integers(1, 8))]
    return bytes(raw)


def accepted_by_reference(path: Path) -> dict[str, list[int]] | None:
    try:
        with safe_open(str(path), "pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no iterator
    except SafetensorError:
        return None


@pytest.mark.parametrize("changes", [changed_values(), changed_bytes()], ids=["values", "bytes"])
def test_umem_accepts_only_what_the_reference_accepts(changes: st.SearchStrategy[bytes], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    @settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
    @given(header=changes, data=st.just(DATA) | st.binary(max_size=40))
    def check(header: bytes, data: bytes) -> None:
        path.write_bytes(file_bytes(header, data))
        try:
            entries = open_checkpoint(path).entries
        except CheckpointError:
            return
        reference = accepted_by_reference(path)
        assert reference is not None
        assert reference.keys() == entries.keys()
        for name, entry in entries.items():
            if entry.dtype.bits >= 8:
                assert tuple(reference[name]) == entry.shape
            assert path.stat().st_size >= entry.start + entry.nbytes

    check()


@settings(max_examples=200, deadline=None)
@given(raw=st.binary(max_size=200))
def test_random_bytes_are_refused(raw: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    path.write_bytes(raw)
    if accepted_by_reference(path) is None:
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            open_checkpoint(path)
