"""`umem.load_into`: any module, in place or from meta, against torch's own loading."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import umem
from tests.writers import Holder, random_tensor, same_bytes, write_safetensors
from umem import LoadSettings
from umem.errors import (
    InsufficientMemoryError,
    KeyMismatchError,
    MemoryOverrunError,
    ReadError,
    SettingsError,
    UnsupportedError,
)


class Net(torch.nn.Module):
    """Parameters, buffers, a tie, and a buffer that is not stored."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.conv = torch.nn.Conv2d(3, 4, 2)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.zeros(5), requires_grad=False)


def saved(directory: Path, suffix: str = "pt") -> tuple[Net, Path]:
    torch.manual_seed(1)
    net = Net()
    for tensor in net.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape))
    if suffix == "pt":
        torch.save(net.state_dict(), directory / "net.pt")
    else:
        tensors = {name: tensor for name, tensor in net.state_dict().items() if name != "head.weight"}
        write_safetensors(directory / "net.safetensors", tensors)
    return net, directory


def assert_equal(left: torch.nn.Module, right: torch.nn.Module) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert same_bytes(tensor, theirs[name]), name


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("on_meta", [True, False])
def test_equals_the_module_that_was_saved(tmp_path: Path, suffix: str, on_meta: bool) -> None:
    expected, path = saved(tmp_path, suffix)
    with torch.device("meta" if on_meta else "cpu"):
        net = Net()
    addresses = {name: tensor.data_ptr() for name, tensor in net.named_parameters()}
    report = umem.load_into(net, path, device="cpu")
    assert_equal(net, expected)
    assert net.head.weight is net.embed.weight
    assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in expected.parameters()]
    assert all(isinstance(parameter, torch.nn.Parameter) for parameter in net.parameters())
    if not on_meta:
        assert addresses == {name: tensor.data_ptr() for name, tensor in net.named_parameters()}
        assert report.plan.forecast.allocated_bytes == 0
    net.norm(torch.randn(4, 6)).sum().backward()


@pytest.mark.parametrize("on_meta", [True, False])
@pytest.mark.parametrize("stored", ["first", "second"])
def test_a_tie_stored_under_either_name(tmp_path: Path, stored: str, on_meta: bool) -> None:
    module = Holder({"first": torch.empty(3, 2), "x": torch.empty(2)}, "meta" if on_meta else "cpu")
    module.register_parameter("second", module.get_parameter("first"))
    write_safetensors(tmp_path / "m.safetensors", {stored: random_tensor((3, 2)), "x": random_tensor((2,))})
    umem.load_into(module, tmp_path, device="cpu")
    assert module.get_parameter("second") is module.get_parameter("first")
    assert same_bytes(module.get_parameter("first"), random_tensor((3, 2)))


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(None, torch.float32), ("auto", torch.bfloat16), (torch.float16, torch.float16), ("float64", torch.float64)],
)
def test_dtypes_of_meta_modules(tmp_path: Path, dtype: object, expected: torch.dtype) -> None:
    weight, count = torch.randn(4, 3).bfloat16(), torch.arange(3)
    write_safetensors(tmp_path / "m.safetensors", {"w": weight, "n": count})
    module = Holder({"w": torch.empty(4, 3), "n": torch.empty(3, dtype=torch.int64)})
    umem.load_into(module, tmp_path, device="cpu", dtype=dtype)  # type: ignore[arg-type]
    assert same_bytes(module.get_parameter("w"), weight.to(expected))
    assert same_bytes(module.get_parameter("n"), count)


def test_key_mapping(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"model.body.x": random_tensor((3,)), "model.y": random_tensor((2,))})
    module = Holder({"trunk.x": torch.empty(3), "y": torch.empty(2)})
    umem.load_into(module, tmp_path, device="cpu", key_mapping={r"^model\.": "", r"^body\.": "trunk."})
    assert same_bytes(module.get_parameter("trunk.x"), random_tensor((3,)))


@pytest.mark.parametrize("mapping", [{"(": ""}, {r"^.$": "same"}], ids=["no expression", "two to one"])
def test_a_key_mapping_that_makes_no_sense(tmp_path: Path, mapping: dict[str, str]) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"a": random_tensor((3,)), "b": random_tensor((3,))})
    with pytest.raises(SettingsError, match="key_mapping"):
        umem.load_into(Holder({"same": torch.empty(3)}), tmp_path, device="cpu", key_mapping=mapping)


def test_modules_partly_live_partly_on_meta(tmp_path: Path) -> None:
    tensors = {"live": random_tensor((4,)), "meta": random_tensor((5,), seed=1)}
    write_safetensors(tmp_path / "m.safetensors", tensors)
    module = Holder({"meta": tensors["meta"]})
    live = torch.nn.Parameter(torch.zeros(4))
    module.register_parameter("live", live)
    umem.load_into(module, tmp_path, device="cpu")
    assert module.get_parameter("live") is live
    assert all(same_bytes(module.get_parameter(name), tensor) for name, tensor in tensors.items())


def test_what_may_be_missing_stays_as_it_was(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"a": random_tensor((3,)), "extra": random_tensor((3,))})
    module = Holder({"a": torch.empty(3), "b.w": torch.empty(2)})
    module.register_parameter("c", torch.nn.Parameter(torch.full((2,), 7.0)))
    umem.load_into(module, tmp_path, device="cpu", allow_missing=["b.*", "c"], allow_unexpected=["ex*"])
    assert module.get_parameter("b.w").is_meta
    assert module.get_parameter("c").tolist() == [7, 7]


def test_refusals_leave_the_module_alone(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"a": random_tensor((3,))})
    module = Holder({"a": torch.empty(3), "b": torch.empty(2)})
    cases: list[tuple[type[Exception], Callable[[], object]]] = [
        (KeyMismatchError, lambda: umem.load_into(module, tmp_path, device="cpu")),
        (
            InsufficientMemoryError,
            lambda: umem.load_into(
                module, tmp_path, device="cpu", allow_missing=["b"], settings=LoadSettings(memory_budget_bytes=1000)
            ),
        ),
    ]
    for error, call in cases:
        with pytest.raises(error):
            call()
        assert all(parameter.is_meta for parameter in module.parameters())


def test_buffers_on_meta_that_nothing_fills(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"a": random_tensor((3,))})
    module = Holder({"a": torch.empty(3)})
    module.register_buffer("cache", torch.empty(4, device="meta"), persistent=False)
    with pytest.raises(KeyMismatchError, match="cache"):
        umem.load_into(module, tmp_path, device="cpu")
    umem.load_into(module, tmp_path, device="cpu", allow_missing=["cache"])
    assert same_bytes(module.get_parameter("a"), random_tensor((3,)))


def test_a_failure_half_way_from_meta_leaves_meta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    tensors = {f"t{i}": random_tensor((1 << 20,), seed=i) for i in range(8)}
    write_safetensors(tmp_path / "m.safetensors", tensors)
    real, calls = os.preadv, []

    def fails_late(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        calls.append(offset)
        if offset > 20 << 20:
            raise OSError(5, "Input/output error")
        return real(descriptor, buffers, offset, flags)

    for on_meta in (True, False):
        module = Holder(tensors, "meta" if on_meta else "cpu")
        monkeypatch.setattr(os, "preadv", fails_late)
        with pytest.raises(ReadError) as caught:
            umem.load_into(module, tmp_path, device="cpu")
        monkeypatch.setattr(os, "preadv", real)
        if on_meta:
            assert all(parameter.is_meta for parameter in module.parameters())
            assert caught.value.spoiled == ()
        else:
            changed = {name for name, p in module.named_parameters() if p.view(torch.uint8).any()}
            assert changed
            assert changed <= set(caught.value.spoiled)
            assert any("no longer hold" in note for note in caught.value.__notes__)
    gc.collect()


def test_what_is_no_dtype_is_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"a": random_tensor((3,))})
    for wanted in ("bf17", ["bfloat16"]):
        with pytest.raises(SettingsError, match="is no dtype that a checkpoint can hold"):
            umem.load_into(Holder({"a": torch.empty(3, device="meta")}), tmp_path, device="cpu", dtype=wanted)  # type: ignore[arg-type]


def test_sharded_parameters_are_refused(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"a": random_tensor((3,))})
    module = Holder({"a": torch.empty(3)})
    module.get_parameter("a").placements = ()  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="before distributing"):
        umem.load_into(module, tmp_path, device="cpu")


def test_reading_starts_only_after_all_checks(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"a": random_tensor((1 << 20,))})

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])

    module = Holder({"a": torch.empty(7)})
    before = bytes_read()
    with pytest.raises(KeyMismatchError):
        umem.load_into(module, path, device="cpu")
    assert bytes_read() - before < 200_000


def test_a_checkpoint_of_empty_tensors(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"empty": torch.empty(0, 3)})
    module = Holder({"empty": torch.empty(0, 3)})
    report = umem.load_into(module, path, device="cpu")
    assert module.state_dict()["empty"].shape == (0, 3)
    assert (report.reader, report.copier) == ("none", "none")


def test_an_overrun_leaves_meta_as_it_was_and_names_what_it_spoiled(tmp_path: Path) -> None:
    tensors = {name: random_tensor((512, 1024)) for name in ("a", "b")}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    nothing_is_enough = umem.Thresholds(floor_bytes=1 << 60, soft_floor_bytes=1 << 60)
    settings = umem.LoadSettings(thresholds=nothing_is_enough)
    meta = Holder(tensors)
    with pytest.raises(MemoryOverrunError, match="left of MemAvailable, the floor is") as caught:
        umem.load_into(meta, path, device="cpu", settings=settings)
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert (caught.value.rule, caught.value.spoiled) == ("floor", ())
    assert isinstance(caught.value, MemoryError)
    assert caught.value.value in [sample["available_bytes"] for sample in caught.value.series]
    live = Holder(tensors, device="cpu")
    with pytest.raises(MemoryOverrunError) as caught:
        umem.load_into(live, path, device="cpu", settings=settings)
    assert caught.value.spoiled == ()  # it was over before a byte was written
    umem.load_into(meta, path, device="cpu")
    assert all(same_bytes(parameter, tensors[name]) for name, parameter in meta.named_parameters())
