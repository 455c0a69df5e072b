"""Broken files: each is refused with an error of its own, before a tensor byte is read, and leaves the model alone.

The cases rebuild the attacks that the format's library is tested with (huggingface/safetensors `tensor.rs` and
`attacks/`) and the streamers' own, for every dtype, and add indexes, torch archives and pickles.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import umem
from tests.writers import Holder, Stored, file_bytes, header_of, random_tensor, safetensors_bytes, write_safetensors
from umem import errors
from umem._types import DType
from umem.errors import CheckpointError


class Case(NamedTuple):
    name: str
    error: type[CheckpointError]
    write: Callable[[Path], Path]
    tensor: str | None = None


def one_file(data: bytes, name: str = "model.safetensors") -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        (directory / name).write_bytes(data)
        return directory / name

    return write


def per_dtype(dtype: DType) -> Iterator[Case]:
    """Faults in the description of one tensor, `x`, between two sound ones."""
    size = 8 * dtype.bits // 8
    tensors = {
        "before": Stored("U8", (3,), bytes(3)),
        "x": Stored(dtype.label, (2, 4), bytes(size)),
        "z": Stored("U8", (2,), bytes(2)),
    }
    sound, data = header_of(tensors), bytes(3 + size + 2)

    def case(
        name: str, error: type[CheckpointError], *, tensor: str | None = "x", data: bytes = data, **facts: Any
    ) -> Case:
        header = json.loads(json.dumps(sound))
        header["x"].update(facts)
        header["x"] = {key: value for key, value in header["x"].items() if value is not None}
        return Case(f"{dtype.label}-{name}", error, one_file(file_bytes(header, data)), tensor)

    begin, end = 3, 3 + size
    yield case("range-too-short", errors.TensorSizeError, data_offsets=[begin, end - 1])
    yield case("range-too-long", errors.TensorSizeError, data_offsets=[begin, end + 1])
    yield case("shape-too-large", errors.TensorSizeError, shape=[4, 4])
    yield case("shape-too-small", errors.TensorSizeError, shape=[1, 4])
    yield case("shape-overflows", errors.TensorSizeError, shape=[2**40, 2**40])
    yield case("size-overflows-of-nothing", errors.TensorSizeError, shape=[0, 2**64], data_offsets=[begin, begin])
    yield case("shape-overflows-to-its-size", errors.TensorSizeError, shape=[2**63, 2**62, 2, 4])
    yield case("overlap", errors.TensorOverlapError, data_offsets=[begin - 1, end - 1])
    yield case("hole", errors.TensorHoleError, data_offsets=[begin + 1, end + 1], data=bytes(100))
    yield case("range-reversed", errors.TensorExtentError, data_offsets=[end, begin])
    yield case("negative-offset", errors.TensorExtentError, data_offsets=[-1, size - 1])
    yield case("offset-overflows", errors.TensorExtentError, data_offsets=[2**64, 2**64 + size])
    yield case("file-too-short", errors.TruncatedFileError, tensor="z", data=data[:-1])
    yield case("file-too-long", errors.TensorHoleError, tensor=None, data=data + b"!")
    yield case("unknown-dtype", errors.UnknownDTypeError, dtype=dtype.label.lower())
    yield case("no-dtype", errors.HeaderSyntaxError, dtype=None)
    yield case("fractional-size", errors.HeaderSyntaxError, shape=[2.0, 4])
    yield case("boolean-size", errors.HeaderSyntaxError, shape=[True, 4])
    yield case("negative-size", errors.HeaderSyntaxError, shape=[-2, -4])
    yield case("three-offsets", errors.HeaderSyntaxError, data_offsets=[begin, end, end])


def headers() -> Iterator[Case]:
    """Faults of the header as a whole."""
    sound = safetensors_bytes({"x": Stored("U8", (4,), bytes(4))})
    for length in range(8):
        yield Case(f"file-of-{length}-bytes", errors.TruncatedFileError, one_file(sound[:length]))
    for cut in (8, 9, 20, 40):
        yield Case(f"cut-in-the-header-at-{cut}", errors.TruncatedFileError, one_file(sound[:cut]))
    for name, claimed in (("beyond-the-limit", 100_000_001), ("of-2-to-the-63", 2**63), ("of-all-ones", 2**64 - 1)):
        yield Case(f"header-{name}", errors.HeaderTooLongError, one_file(claimed.to_bytes(8, "little") + b"{}"))
    yield Case("header-longer-than-the-file", errors.TruncatedFileError, one_file((50).to_bytes(8, "little") + b"{}"))
    no_json = [
        b"", b" ", b"{", b"}", b"[", b"{]", b"null,", b"not json", b"\x00" * 16, b"{'x': 1}", b'{"x": }', b'{"x": 1,}',
        b'{"x" 1}', b"{x: 1}", b'{"x": 01}', b'{"x": 1} {"y": 2}', b'{"x": "\x01"}', b"//\n{}", b'{"x": NaN}',
        b'{"x": Infinity}', b'{"x": -Infinity}', b'{"x": ' + b"1" * 5000 + b"}", b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ]  # fmt: skip
    for number, raw in enumerate(no_json):
        yield Case(f"not-json-{number}", errors.HeaderSyntaxError, one_file(file_bytes(raw, b"")))
    for number, raw in enumerate([b"\xff\xfe{}", b'{"\xff": 1}', b'{"x\xc3": 1}', b"\xef\xbb\xbf{}"]):
        yield Case(f"not-utf8-{number}", errors.HeaderSyntaxError, one_file(file_bytes(raw, b"")))
    for raw in (b"[]", b"null", b"1", b'"x"', b"true"):
        yield Case(f"no-object-{raw.decode()}", errors.HeaderSyntaxError, one_file(file_bytes(raw, b"")))
    for number, facts in enumerate((None, 1, "x", [], [1, 2], {}, {"dtype": "U8"}, {"dtype": "U8", "shape": [1]})):
        yield Case(f"no-description-{number}", errors.HeaderSyntaxError, one_file(file_bytes({"x": facts}, b"")), "x")
    for number, metadata in enumerate((1, "x", [], {"a": 1}, {"a": None}, {"a": {"b": "c"}})):
        header = {"__metadata__": metadata}
        yield Case(f"metadata-{number}", errors.MetadataError, one_file(file_bytes(header, b"")))
    described = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    twice = f'{{"x":{described},"x":{described}}}'.encode()
    yield Case("a-name-twice", errors.DuplicateKeyError, one_file(file_bytes(twice, b"\0")))
    inner = b'{"x":{"dtype":"U8","shape":[1],"shape":[2],"data_offsets":[0,1]}}'
    yield Case("a-field-twice", errors.DuplicateKeyError, one_file(file_bytes(inner, b"\0")))
    surrogate = f'{{"\\ud800":{described}}}'.encode()
    yield Case("no-unicode-name", errors.HeaderSyntaxError, one_file(file_bytes(surrogate, b"\0")))
    same = {name: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]} for name in "xy"}
    yield Case("two-tensors-in-one-place", errors.TensorOverlapError, one_file(file_bytes(same, bytes(4))))
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4999999999\n"
    yield Case("lfs-pointer", errors.LfsPointerError, one_file(pointer))
    yield Case("lfs-pointer-for-torch", errors.LfsPointerError, one_file(pointer, "pytorch_model.bin"))


def indexes() -> Iterator[Case]:
    """Faults between an index and its shards."""

    def with_index(index: object, *shards: tuple[str, tuple[str, ...]]) -> Callable[[Path], Path]:
        def write(directory: Path) -> Path:
            for file, names in shards:
                write_safetensors(directory / file, {name: random_tensor((2,)) for name in names})
            raw = index if isinstance(index, bytes) else json.dumps(index).encode()
            (directory / "model.safetensors.index.json").write_bytes(raw)
            return directory

        return write

    def mapped(**weight_map: str) -> dict[str, dict[str, str]]:
        return {"weight_map": {name: f"{shard}.safetensors" for name, shard in weight_map.items()}}

    a, b = ("a.safetensors", ("x",)), ("b.safetensors", ("y",))
    yield Case("index-names-an-absent-shard", errors.MissingShardError, with_index(mapped(x="a", y="b"), a))
    yield Case("shard-lacks-a-tensor", errors.MissingTensorError, with_index(mapped(x="a", w="a"), a), "w")
    yield Case("tensor-in-the-other-shard", errors.MissingTensorError, with_index(mapped(x="b", y="a"), a, b), "x")
    both = ("b.safetensors", ("x", "y"))
    yield Case("tensor-in-two-shards", errors.DuplicateTensorError, with_index(mapped(x="a", y="b"), a, both), "x")
    elsewhere = ("../a.safetensors", "/etc/passwd", "..", "x/../../a", "a\0b", "", "..\\a.safetensors")
    for number, name in enumerate(elsewhere):
        yield Case(f"shard-elsewhere-{number}", errors.ShardPathError, with_index({"weight_map": {"x": name}}, a))
    for number, index in enumerate(([], {}, {"weight_map": []}, {"weight_map": {"x": 1}}, {"weight_map": None}, "x")):
        yield Case(f"index-form-{number}", errors.IndexFormatError, with_index(index, a))
    yield Case("index-not-json", errors.HeaderSyntaxError, with_index(b"{", a))
    yield Case("index-names-twice", errors.DuplicateKeyError, with_index(b'{"weight_map":{"x":"a","x":"b"}}', a))
    yield Case("empty-directory", errors.CheckpointNotFoundError, lambda directory: directory)
    yield Case("no-such-path", errors.CheckpointNotFoundError, lambda directory: directory / "none" / "x.safetensors")

    def two_indexes(directory: Path) -> Path:
        for name in ("one", "two"):
            (directory / f"{name}.safetensors.index.json").write_text("{}")
        return directory

    yield Case("two-indexes", errors.AmbiguousCheckpointError, two_indexes)


class Payload:
    """Would create a file if anything unpickled it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def torch_files() -> Iterator[Case]:
    """Torch archives that are damaged, of the older format, or that ask for code."""

    def saved(obj: object, name: str = "m.pt", *, legacy: bool = False) -> Callable[[Path], Path]:
        def write(directory: Path) -> Path:
            torch.save(obj, directory / name, _use_new_zipfile_serialization=not legacy)
            return directory / name

        return write

    tensors = {"x": torch.arange(600.0)}
    yield Case("legacy-pickle", errors.LegacyPickleError, saved(tensors, legacy=True))
    yield Case("plain-pickle", errors.LegacyPickleError, one_file(pickle.dumps({"x": 1}), "m.pt"))
    yield Case("text-for-torch", errors.HeaderSyntaxError, one_file(b"hello", "m.bin"))
    yield Case("nothing-for-torch", errors.HeaderSyntaxError, one_file(b"", "m.bin"))
    yield Case("no-dictionary", errors.HeaderSyntaxError, saved(torch.zeros(3)))

    def asking(directory: Path) -> Path:
        torch.save({"x": Payload(directory / "owned")}, directory / "m.pt")
        return directory / "m.pt"

    yield Case("pickle-with-code", errors.UnsafePickleError, asking)
    yield Case("whole-module", errors.UnsafePickleError, saved(torch.nn.Linear(2, 2)))
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    whole = buffer.getvalue()
    for cut in (30, len(whole) // 2, len(whole) - 10):
        yield Case(f"archive-cut-at-{cut}", errors.TruncatedFileError, one_file(whole[:cut], "m.pt"))

    def rewritten(ending: str, data: bytes | None, method: int = zipfile.ZIP_STORED) -> Callable[[Path], Path]:
        """Another member in place of the one of that ending; None takes it away."""

        def write(directory: Path) -> Path:
            with zipfile.ZipFile(io.BytesIO(whole)) as old, zipfile.ZipFile(directory / "m.pt", "w", method) as new:
                for name in old.namelist():
                    content = data if name.endswith(ending) else old.read(name)
                    if content is not None:
                        new.writestr(name, content)
            return directory / "m.pt"

        return write

    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        pickled = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    yield Case("no-data-pkl", errors.HeaderSyntaxError, rewritten("data.pkl", None))
    yield Case("no-storage", errors.TensorExtentError, rewritten("data/0", None), "x")
    yield Case("short-storage", errors.TensorExtentError, rewritten("data/0", bytes(99)), "x")
    yield Case("compressed", errors.CompressedTensorError, rewritten("none", None, zipfile.ZIP_DEFLATED), "x")
    yield Case("big-endian", errors.CompressedTensorError, rewritten("byteorder", b"big"))
    yield Case("damaged-pickle", errors.HeaderSyntaxError, rewritten("data.pkl", pickled[:40]))


CASES = [
    *(case for dtype in DType if dtype is not DType.C128 for case in per_dtype(dtype)),
    *headers(),
    *indexes(),
    *torch_files(),
]


def test_there_are_enough_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 300


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_is_refused_with_its_own_error(case: Case, tmp_path: Path) -> None:
    path = case.write(tmp_path)
    module = Holder({"x": torch.zeros(2, 4)})
    with pytest.raises(CheckpointError) as caught:
        umem.load_into(module, path, device="cpu")
    assert type(caught.value) is case.error
    assert caught.value.path in str(caught.value)
    assert str(tmp_path) in caught.value.path
    if case.tensor is not None:
        assert caught.value.tensor == case.tensor
        assert repr(case.tensor) in str(caught.value)
    assert next(module.parameters()).is_meta
    assert not (tmp_path / "owned").exists()
