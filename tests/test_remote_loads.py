"""Loads from URLs, whole: modules, models, adapters, the command line; bounds, failures, interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("aiohttp")

import fsspec
from safetensors.torch import save_file

import umem
from tests.servers import Fault, FileServer, file_server
from tests.writers import Holder, random_tensor, same_bytes, write_index, write_safetensors
from umem.checkpoint.stores import requests
from umem.errors import CheckpointNotFoundError, RemoteReadError, UnsupportedError

MIB = 1 << 20

#: 32 MiB in tensors of all sizes.
SIZES = [1, 1000, 3 * MIB // 2, 700_001, 5 * MIB // 2, 17, MIB, 2 * MIB, MIB // 2]
TENSORS = {f"t{i}": random_tensor((size,), seed=i) for i, size in enumerate(SIZES)}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    with file_server(tmp_path, sound_bytes=100_000) as server:
        yield server


def publish(directory: Path) -> str:
    fsspec.filesystem("memory").put(f"{directory}/*", "/models/", recursive=True)
    return "memory://models"


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    if fsspec.filesystem("memory").exists("/models"):
        fsspec.filesystem("memory").rm("/models", recursive=True)


def assert_filled(module: torch.nn.Module) -> None:
    for name, tensor in TENSORS.items():
        assert same_bytes(module.get_parameter(name), tensor), name


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("place", ["http", "memory"])
def test_a_module_is_filled(tmp_path: Path, server: FileServer, place: str, live: bool) -> None:
    files = {name: f"model-{1 + (number > 3)}.safetensors" for number, name in enumerate(TENSORS)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in TENSORS.items() if files[name] == file}, tmp_path / file)
    write_index(tmp_path / "model.safetensors.index.json", files)
    url = server.url if place == "http" else publish(tmp_path)
    module = Holder(TENSORS, "cpu" if live else "meta")
    report = umem.load_into(module, url, device="cpu")
    assert_filled(module)
    assert (report.reader, report.reader_reason) == {
        "http": ("http", "http URLs"),
        "memory": ("fsspec", "memory URLs"),
    }[place]
    assert report.to_json()["plan"]["checkpoint"]["path"] == url
    assert report.peaks.page_cache_bytes == 0


def test_torch_files(tmp_path: Path, server: FileServer) -> None:
    torch.save(TENSORS, tmp_path / "pytorch_model.bin")
    module = Holder(TENSORS)
    umem.load_into(module, server.url, device="cpu")
    assert_filled(module)


def test_requests_are_large_and_as_many_at_once_as_the_window_has_room_for(tmp_path: Path, server: FileServer) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    server.fault = Fault(silent_s=0.5, times=None)
    settings = umem.LoadSettings(window_bytes=24 * MIB, block_bytes=2 * MIB)
    report = umem.load_into(Holder(TENSORS), server.url, device="cpu", settings=settings)
    reads = [(first, last) for _, first, last in server.requests if first >= server.sound_bytes]
    assert len(reads) <= 1 + sum(tensor.nbytes for tensor in TENSORS.values()) / (2 * MIB)
    assert server.most_in_flight == 8
    assert report.window_peak_bytes <= 24 * MIB


MEASURED = """
import sys, json, fsspec
import umem, umem.strategies, aiohttp
from tests.writers import Holder
import torch
url, size = sys.argv[1], int(sys.argv[2])
if url.startswith("memory"):
    fsspec.filesystem("memory").pipe_file("/models/model.safetensors", open(sys.argv[3], "rb").read())
module = Holder({"t": torch.empty(size)})
report = umem.load_into(module, url, device="cpu", settings=umem.LoadSettings(sample_interval_s=0.005))
print(json.dumps([report.measured_peak_bytes, report.plan.forecast.peak_bytes, report.plan.forecast.final_bytes]))
"""


@pytest.mark.parametrize("place", ["http", "memory"])
def test_the_peak_is_the_model_and_the_window(tmp_path: Path, server: FileServer, place: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"t": torch.zeros(48 * MIB)}, path)
    url = server.url if place == "http" else "memory://models"
    command = [sys.executable, "-c", MEASURED, url, str(48 * MIB), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    measured, forecast, final = json.loads(done.stdout)
    assert final < measured <= forecast + 0.02 * final


def test_a_failure_half_way(tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_FIRST_PAUSE_S", 0.001)
    save_file(TENSORS, tmp_path / "model.safetensors")
    for device in ("meta", "cpu"):
        module = Holder(TENSORS, device)
        server.fault = Fault(status=503, times=None, after=2)
        with pytest.raises(RemoteReadError, match="status 503") as caught:
            umem.load_into(module, server.url, device="cpu")
        if device == "meta":
            assert all(parameter.is_meta for parameter in module.parameters())
        else:
            changed = {name for name, tensor in module.named_parameters() if tensor.view(torch.uint8).any()}
            assert changed <= set(caught.value.spoiled)
        server.fault = None


@pytest.mark.parametrize("sound_bytes", [0, 100_000], ids=["while it is opened", "while it is read"])
def test_an_interrupt_does_not_wait_for_a_slow_server(tmp_path: Path, sound_bytes: int) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with file_server(tmp_path, sound_bytes=sound_bytes, fault=Fault(silent_s=300, times=None)) as server:
        code = "import sys; from umem.cli import main; sys.argv = ['umem', *sys.argv[1:]]; main()"
        if sound_bytes:
            code = (
                "import sys, torch, umem\nfrom tests.writers import Holder\n"
                f"umem.load_into(Holder({{f't{{i}}': torch.empty(n) for i, n in enumerate({SIZES})}}), sys.argv[2])"
            )
        process = subprocess.Popen(
            [sys.executable, "-c", code, "plan", server.url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while server.in_flight < (4 if sound_bytes else 1):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    if sound_bytes:
        assert err.strip().splitlines()[-1].startswith("KeyboardInterrupt")
    else:
        assert process.returncode == 130
        assert "Traceback" not in err


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["http", "memory"])
def test_a_model_is_built_and_loaded(tmp_path: Path, server: FileServer, place: str) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from tests.adapters.hosts.models import assert_same_model, save_family

    save_family(tmp_path, "qwen3_moe")
    url = server.url if place == "http" else publish(tmp_path)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    for path in (url, f"{url}/model.safetensors"):
        model = umem.load(path, device="cpu")
        assert model.name_or_path == path
        expected.config.name_or_path = path
        assert_same_model(model, expected)
        assert (
            umem.plan(path, device="cpu").forecast.final_bytes == umem.plan(tmp_path, device="cpu").forecast.final_bytes
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_config_that_says_no_dtype(tmp_path: Path, server: FileServer, dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from tests.adapters.hosts.models import assert_same_model, save_family

    save_family(tmp_path, "llama")
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected.config.name_or_path = server.url
    assert_same_model(umem.load(server.url, device="cpu"), expected)


def test_models_that_cannot_be_built(tmp_path: Path, server: FileServer) -> None:
    pytest.importorskip("transformers")
    write_safetensors(tmp_path / "model.safetensors", {"x": random_tensor((3,))})
    with pytest.raises(CheckpointNotFoundError, match=r"config\.json") as caught:
        umem.load(f"{server.url}/model.safetensors?key=secret", device="cpu")
    assert "secret" not in str(caught.value)
    for settings in ({"trust_remote_code": True}, {"subfolder": "below"}):
        with pytest.raises(UnsupportedError):
            umem.load(server.url, device="cpu", **settings)
    assert list(umem.plan(server.url, device="cpu").targets) == ["x"]


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_an_adapter(tmp_path: Path, server: FileServer) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    inputs = torch.randn(3, 8)
    with torch.no_grad():
        adapted = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], init_lora_weights=False))
        adapted.save_pretrained(tmp_path)
        wanted = adapted(inputs)
        base = adapted.unload()
        assert torch.equal(umem.load_adapter(base, server.url)(inputs), wanted)
    with pytest.raises(CheckpointNotFoundError, match="adapter_config"):
        umem.load_adapter(base, f"{server.url}/none")


def test_the_command_line(tmp_path: Path, server: FileServer) -> None:
    pytest.importorskip("transformers")
    from tests.adapters.hosts.models import save_family

    save_family(tmp_path, "llama")
    for command in ("plan", "load"):
        done = subprocess.run(
            [sys.executable, "-m", "umem", command, f"{server.url}?key=secret", "--json"],
            capture_output=True, text=True, timeout=120, check=False, env=dict(os.environ),
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert "secret" not in done.stdout
