"""Models split over memory and disk: they answer as the whole model does, and leave nothing behind."""

from __future__ import annotations

import gc
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM, modeling_utils  # noqa: E402

import umem  # noqa: E402
from tests.adapters.hosts.models import logits, save_family  # noqa: E402
from tests.adapters.hosts.test_transformers import in_fp8, rewrite, scaled_experts, small_fp8_model  # noqa: E402
from tests.writers import same_bytes  # noqa: E402
from umem.adapters.hosts.transformers.placement import DeviceMap, Placement  # noqa: E402
from umem.errors import (  # noqa: E402
    ChangedFileError,
    InsufficientMemoryError,
    InsufficientSpaceError,
    ReadError,
    SettingsError,
    UnsupportedError,
)
from umem.planning import Route  # noqa: E402
from umem.probes import Platform, PlatformClass  # noqa: E402
from umem.settings import LoadSettings  # noqa: E402


@pytest.fixture(autouse=True)
def quiet_accelerate() -> Iterator[None]:
    """It warns of every model that is offloaded."""
    logger = logging.getLogger("accelerate.big_modeling")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def budget_of(model: torch.nn.Module, fraction: float) -> LoadSettings:
    """Settings under which that fraction of the model's bytes fits beside the window."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    return LoadSettings(memory_budget_bytes=LoadSettings().window_bytes + int(fraction * size))


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("fraction", [0.6, 0.9])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3_moe", "mixtral", "gpt2"])
def test_a_split_model_answers_as_the_whole_one(tmp_path: Path, family: str, fraction: float) -> None:
    save_family(tmp_path, family)
    whole = umem.load(tmp_path, device="cpu")
    settings = budget_of(whole, fraction)
    split, report = umem.load(
        tmp_path, device="cpu", offload="disk", offload_folder=tmp_path / "off", settings=settings, return_report=True
    )
    assert torch.equal(logits(split), logits(whole))
    forecast = report.plan.forecast
    assert set(forecast.final_bytes_by_device) == {"cpu", "disk"}
    assert forecast.peak_bytes <= (settings.memory_budget_bytes or 0)
    on_disk = {name for name, parameter in split.named_parameters() if parameter.is_meta}
    assert (
        sum(parameter.nbytes for name, parameter in whole.named_parameters() if name in on_disk)
        == (forecast.final_bytes_by_device["disk"])
    )
    as_stored = not family.endswith(("moe", "mixtral"))
    assert (forecast.offloaded_bytes == 0) is as_stored
    assert bool(files_in(tmp_path / "off")) is not as_stored


def test_a_refusal_names_the_offloading_that_would_fit(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_moe")
    settings = budget_of(umem.load(tmp_path, device="cpu"), 0.8)
    with pytest.raises(InsufficientMemoryError, match="leave on disk what does not fit") as caught:
        umem.load(tmp_path, device="cpu", settings=settings)
    (remedy,) = [remedy for remedy in caught.value.remedies if remedy.action == "offload"]
    folder = tmp_path / "off"
    _, report = umem.load(
        tmp_path, device="cpu", settings=settings, offload="disk", offload_folder=folder, return_report=True
    )
    assert report.plan.forecast.peak_bytes == remedy.nbytes


def test_a_refusal_does_not_name_offloading_that_would_not_fit(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    settings = budget_of(umem.load(tmp_path, device="cpu"), 0.01)
    maps: list[dict[str, str] | None] = [None, {"": "cpu"}]
    for device_map in maps:
        with pytest.raises(InsufficientMemoryError) as caught:
            umem.load(tmp_path, device="cpu", settings=settings, device_map=device_map)
        assert "offload" not in {remedy.action for remedy in caught.value.remedies}


def test_a_model_that_fits_is_not_split(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    model = umem.load(tmp_path, device="cpu", offload="disk")
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert not hasattr(model.lm_head, "_hf_hook")


def test_weights_that_are_cast_are_written_once(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    settings: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    whole = umem.load(tmp_path, **settings)
    split, report = umem.load(
        tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "off", return_report=True, **settings
    )
    assert torch.equal(logits(split), logits(whole))
    forecast = report.plan.forecast
    assert forecast.offloaded_bytes == forecast.final_bytes_by_device["disk"] == forecast.final_bytes
    (file,) = files_in(tmp_path / "off")
    written = load_file(file)
    assert all(same_bytes(written[name], parameter) for name, parameter in whole.named_parameters())


def test_torch_files_are_written_to_the_folder(tmp_path: Path) -> None:
    save_family(tmp_path, "llama-tied")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    split = umem.load(tmp_path, device="cpu", device_map={"": "disk"}, offload_folder=tmp_path / "off")
    assert torch.equal(logits(split), logits(whole))


def test_conversions_of_the_library_are_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family(tmp_path, "llama")
    monkeypatch.setattr(modeling_utils, "get_model_conversion_mapping", lambda *_args, **_kwargs: scaled_experts())
    whole = umem.load(tmp_path, device="cpu")
    split, report = umem.load(
        tmp_path, device="cpu", device_map={"": "disk"}, offload_folder=tmp_path / "off", return_report=True
    )
    assert {Route.MATERIALIZED, Route.KEPT} <= {route for route, _ in report.plan.bytes_by_route()}
    assert torch.equal(logits(split), logits(whole))


def test_fp8_is_dequantized_into_the_offload_file(tmp_path: Path) -> None:
    small_fp8_model(tmp_path)
    in_fp8(tmp_path)
    whole = umem.load(tmp_path, device="cpu")
    split, report = umem.load(
        tmp_path, device="cpu", device_map={"": "disk"}, offload_folder=tmp_path / "off", return_report=True
    )
    assert {route for route, _ in report.plan.bytes_by_route()} == {Route.STREAMING, Route.KEPT}
    assert torch.equal(logits(split), logits(whole))


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_saving_a_split_model_writes_the_published_layout_back(tmp_path: Path, family: str) -> None:
    save_family(tmp_path / "first", family)
    split = umem.load(tmp_path / "first", device="cpu", device_map={"": "disk"}, offload_folder=tmp_path / "off")
    split.save_pretrained(tmp_path / "second")  # type: ignore[operator]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(same_bytes(first[name], second[name]) for name in first)


def test_maps_of_the_caller(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_moe")
    devices = {
        "model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": torch.device("cpu"),
        "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "cpu",
    }  # fmt: skip
    split = umem.load(tmp_path, device="cpu", device_map=devices, offload_folder=tmp_path / "off")
    assert torch.equal(logits(split), logits(umem.load(tmp_path, device="cpu")))
    on_disk = {name for name, parameter in split.named_parameters() if parameter.is_meta}
    assert on_disk == {
        name for name, _ in split.named_parameters() if "layers.0" in name or name == "model.norm.weight"
    }
    assert split.hf_device_map == {name: str(device) for name, device in devices.items()}


def test_maps_that_cannot_be(tmp_path: Path) -> None:
    save_family(tmp_path, "llama-tied")
    rest = {"model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    cases: list[tuple[Any, type[Exception], str]] = [
        ("auto", SettingsError, "offload='cpu' or 'disk'"),
        ({"": "gpu"}, SettingsError, "'gpu' is no device"),
        ({"": "meta"}, SettingsError, "meta holds no weights"),
        ({"": "cpu", "model.layer.0": "cpu"}, SettingsError, "no module model.layer.0"),
        ({"model.layers": "cpu"}, SettingsError, r"no device for model.embed_tokens.weight, .*lm_head"),
        ({"": "disk", "lm_head": "cpu"}, SettingsError, "lm_head lies in the model, which goes elsewhere"),
        (
            {**rest, "model.embed_tokens": "cpu", "lm_head": "disk"},
            UnsupportedError,
            "tied tensors are on disk together",
        ),
    ]
    for device_map, kind, message in cases:
        for function in (umem.plan, umem.load):
            with pytest.raises(kind, match=message):
                function(tmp_path, device="cpu", device_map=device_map)
    with pytest.raises(SettingsError, match="offload or device_map"):
        umem.load(tmp_path, device="cpu", device_map={"": "disk"}, offload="disk")
    with pytest.raises(SettingsError, match="cpu or disk"):
        umem.load(tmp_path, device="cpu", offload="nvme")


def test_offloading_to_the_same_memory_is_refused(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    with pytest.raises(UnsupportedError, match="goes to the processor's memory already"):
        umem.load(tmp_path, device="cpu", offload="cpu")
    unified = SimpleNamespace(platform=Platform(PlatformClass.UNIFIED, "cuda:0", "GB10: integrated=1"))
    with pytest.raises(UnsupportedError, match=r"cuda:0 and the processor share one memory \(GB10: integrated=1\)"):
        Placement.of("cpu", None, None).settings(unified)  # type: ignore[arg-type]


def test_the_planner_gets_the_budgets_of_device_and_processor() -> None:
    def session(kind: PlatformClass, device: str, **room: int | None) -> Any:
        return SimpleNamespace(platform=Platform(kind, device, ""), room=lambda: {device: 7, **room})

    to_disk = Placement.of("disk", None, None)
    discrete = to_disk.settings(session(PlatformClass.DISCRETE, "cuda:1", cpu=9))
    assert discrete == {"device_map": "sequential", "max_memory": {1: 7, "cpu": 9}}
    assert to_disk.settings(session(PlatformClass.UNIFIED, "cuda:0"))["max_memory"] == {0: 7}
    assert to_disk.settings(session(PlatformClass.UNIFIED, "mps"))["max_memory"] == {"mps": 7}
    with pytest.raises(SettingsError, match="how much memory cpu has"):
        to_disk.settings(session(PlatformClass.DISCRETE, "cuda:0", cpu=None))


def test_devices_of_a_map_are_found_by_the_nearest_module() -> None:
    devices = DeviceMap({"a": 0, "a.b.c": "cuda", "a.bc": "disk"}, main_device="cuda:3")
    found = {name: devices.device_of(name) for name in ("a", "a.b.weight", "a.b.c.weight", "a.bc", "a.bcd", "b")}
    assert found == {
        "a": "cuda:0", "a.b.weight": "cuda:0", "a.b.c.weight": "cuda:3", "a.bc": "disk", "a.bcd": "cuda:0", "b": None,
    }  # fmt: skip


def test_a_piece_that_stays_whole_and_does_not_fit(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    settings = budget_of(umem.load(tmp_path, device="cpu"), 0.3)
    with pytest.raises(InsufficientMemoryError, match=r"model\.layers\.0 is computed as one piece") as caught:
        umem.load(tmp_path, device="cpu", offload="disk", settings=settings)
    assert caught.value.needed_bytes > caught.value.available_bytes


def test_refusals_of_what_would_have_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_family(tmp_path, "qwen3_moe")
    with pytest.raises(SettingsError, match="not stored as they are used and have to be written; say where"):
        umem.load(tmp_path, device="cpu", device_map={"": "disk"})
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=100))
    with pytest.raises(InsufficientSpaceError, match="100 B are free"):
        umem.load(tmp_path, device="cpu", device_map={"": "disk"}, offload_folder=tmp_path / "off")
    assert not (tmp_path / "off").exists()


def test_what_the_model_initialises_cannot_be_on_disk(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    rewrite(tmp_path, **{"lm_head.weight": None})
    devices = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(UnsupportedError, match=r"lacks lm_head\.weight, which the model initialises in memory"):
        umem.plan(tmp_path, device="cpu", device_map=devices, allow_missing=["lm_head.*"])
    devices = {"model": "disk", "lm_head": "cpu"}
    split = umem.load(tmp_path, device="cpu", device_map=devices, allow_missing=["lm_head.*"])
    assert logits(split).isfinite().all()


def test_the_files_go_with_the_model(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_moe")
    (tmp_path / "off").mkdir()
    (tmp_path / "off" / "foreign").write_text("keep")
    settings: dict[str, Any] = {"device": "cpu", "device_map": {"": "disk"}, "offload_folder": tmp_path / "off"}
    first, second = umem.load(tmp_path, **settings), umem.load(tmp_path, **settings)
    assert len(files_in(tmp_path / "off")) == 3
    del first
    gc.collect()
    assert len(files_in(tmp_path / "off")) == 2
    part = second.model
    del second
    gc.collect()
    assert torch.equal(part(torch.arange(1, 9)[None])[0].isfinite().all(), torch.tensor(True))
    del part
    gc.collect()
    assert [path.name for path in (tmp_path / "off").iterdir()] == ["foreign"]


class Unlucky:
    """Fails the load at some point of it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("place", "error", "raised"),
    [
        ("os.preadv", OSError(5, "Input/output error"), ReadError),
        ("os.fdatasync", KeyboardInterrupt(), KeyboardInterrupt),
        ("transformers.modeling_utils.accelerate_dispatch", ValueError("after the load"), ValueError),
    ],
)
def test_a_load_that_fails_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException, raised: type[BaseException]
) -> None:
    save_family(tmp_path, "qwen3_moe")
    (tmp_path / "off").mkdir()
    (tmp_path / "off" / "foreign").write_text("keep")
    settings: dict[str, Any] = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "off" / "a"}
    monkeypatch.setattr(place, Unlucky(error))
    with pytest.raises(raised):
        umem.load(tmp_path, device="cpu", settings=LoadSettings(reader="buffered"), **settings)
    assert [path.name for path in (tmp_path / "off").rglob("*")] == ["foreign"]


def test_a_checkpoint_that_changes_under_the_load_is_no_place_to_stay(tmp_path: Path) -> None:
    save_family(tmp_path, "llama")
    rewrite(tmp_path, **{"model.norm.weight": torch.ones(32)})  # fp32, so that one weight is read and cast

    def touch(_: Any) -> None:
        os.utime(tmp_path / "model.safetensors")

    with pytest.raises(ChangedFileError):
        umem.load(tmp_path, device="cpu", device_map={"": "disk"}, offload_folder=tmp_path / "off", progress=touch)
    assert not (tmp_path / "off").exists()


def test_the_plan_says_where_things_go(tmp_path: Path) -> None:
    save_family(tmp_path, "qwen3_moe")
    settings = budget_of(umem.load(tmp_path, device="cpu"), 0.6)
    plan = umem.plan(tmp_path, device="cpu", offload="disk", settings=settings)
    facts = json.loads(json.dumps(plan.to_json()))["forecast"]
    assert facts["final_bytes_by_device"].keys() == {"cpu", "disk"}
    assert 0 < facts["offloaded_bytes"] < facts["final_bytes_by_device"]["disk"]
    assert sum(facts["final_bytes_by_device"].values()) == facts["final_bytes"]
    assert not os.path.exists(tmp_path / "off")
    assert modeling_utils.PreTrainedModel._load_pretrained_model.__module__ == modeling_utils.__name__
