"""The command line, as a person and as a program use it: fresh processes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

pytest.importorskip("transformers")

from tests.adapters.hosts.models import save_family
from tests.writers import random_tensor, write_safetensors, write_sparse

PLATFORMS = Path(__file__).parent / "platforms"


def umem(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "umem", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environment}
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("model"), "qwen3_moe")


def test_load_reports_and_is_silent_on_a_pipe(model: Path, tmp_path: Path) -> None:
    done = umem("load", model, "--chart", tmp_path / "chart.svg")
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("seconds", "forecast", "direct"):
        assert word in done.stdout
    assert ET.parse(tmp_path / "chart.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize(
    ("command", "schema"), [("load", "umem.report"), ("plan", "umem.plan"), ("probe", "umem.probe")]
)
def test_json(model: Path, command: str, schema: str) -> None:
    done = umem(command, *([] if command == "probe" else [model]), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts = json.loads(done.stdout)
    assert (facts["schema"], facts["version"]) == (schema, 1)


def test_plan_of_a_file_without_a_model(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "x.safetensors", {"a": random_tensor((1000,)), "b": random_tensor((3,))})
    done = umem("plan", path)
    assert done.returncode == 0
    assert "2 tensors in 1 files" in done.stdout
    assert "stored as it is used" in done.stdout


def test_what_does_not_fit_goes_to_disk(model: Path, tmp_path: Path) -> None:
    window = 16 << 20
    split = ("--offload", "disk", "--window", str(window), "--memory-budget", str(window + 50_000))
    done = umem("plan", model, *split)
    assert done.returncode == 0, done.stderr
    for words in ("model on disk", "to write", "kept"):
        assert words in done.stdout
    facts = json.loads(umem("plan", model, *split, "--json").stdout)
    assert facts["budget"]["fits"]
    assert facts["forecast"]["final_bytes_by_device"].keys() == {"cpu", "disk"}
    refused = umem("load", model, *split)
    assert refused.returncode == 1
    assert "offload_folder" in refused.stderr
    done = umem("load", model, *split, "--offload-folder", tmp_path / "off", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["forecast"] == facts["forecast"]
    assert not (tmp_path / "off").exists()


def test_a_machine_that_is_saved_and_planned_for(model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "here.json"
    done = umem("probe", "--device", "cpu", "--save", saved, COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    done = umem("plan", model, "--platform", saved)
    assert (done.returncode, done.stderr) == (0, "")
    assert "it fits" in done.stdout


@pytest.mark.parametrize("name", ["spark_fresh", "apple", "h100"])
def test_a_plan_for_another_machine(model: Path, name: str) -> None:
    done = umem("plan", model, "--platform", PLATFORMS / f"{name}.json", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    facts, expected = json.loads(done.stdout), json.loads((PLATFORMS / "expected.json").read_text())[name]
    assert facts["platform"]["kind"] == expected["kind"]
    assert list(facts["forecast"]["final_bytes_by_device"]) == [expected["device"]]
    assert facts["budget"] == {
        "available_bytes": expected["available_bytes"],
        "source": facts["budget"]["source"],
        "fits": True,
    }
    assert facts["reading"] == {"reader": expected["reader"], "page_cache": expected["page_cache"]}


def test_a_plan_that_does_not_fit_another_machine(tmp_path: Path) -> None:
    path = write_sparse(tmp_path / "large.safetensors", 60 << 30)
    done = umem("plan", path, "--platform", PLATFORMS / "spark_cotenant.json")
    assert done.returncode == 1
    assert "it does not fit" in done.stdout
    for words in ("MemAvailable less", "Nothing was read", "load it as bfloat16"):
        assert words in done.stderr


def test_refusals_are_one_message_on_standard_error(model: Path, tmp_path: Path) -> None:
    cases: list[tuple[list[str | Path], int, str]] = [
        (["load", tmp_path / "none"], 1, "no such file or directory"),
        (["load", tmp_path], 1, "no weights"),
        (["plan", model, "--memory-budget", "1MiB"], 1, "Nothing was read"),
        (["load", model, "--window", "3 parsecs"], 1, "no size in bytes"),
        (["load", model, "--wait-for-memory", "a while"], 1, "is no time"),
        (["plan", model, "--platform", tmp_path / "none.json"], 1, "No such file"),
        (["plan", model, "--platform", model / "config.json"], 1, "not a snapshot"),
        (["plan", model, "--platform", PLATFORMS / "h100.json", "--device", "cpu"], 2, "has a device already"),
        (["plan", model, "--device", "cuda:77"], 1, "torch cannot use cuda:77"),
        (["probe", "--save", tmp_path / "none" / "x.json"], 2, "No such file"),
        (["load", model, "--dtype", "int3"], 1, "int3"),
        (["load"], 2, "Missing argument"),
        (["load", model, "--widow", "1GiB"], 2, "--window"),
        (["lode", model], 2, "lode"),
        (["ttff", tmp_path / "none"], 1, "no such file or directory"),
        (["ttff", model, "--baseline", "vllm"], 1, "transformers, accelerate, safetensors"),
        (["ttff", model, "--html", tmp_path], 1, "name of a file"),
    ]
    for arguments, status, message in cases:
        done = umem(*map(str, arguments))
        assert (done.returncode, done.returncode and message in done.stderr) == (status, True), (arguments, done.stderr)
        assert "Traceback" not in done.stderr


def test_settings_of_the_environment(model: Path) -> None:
    assert umem("load", model, UMEM_WINDOW="32MiB", UMEM_WAIT_FOR_MEMORY="1s").returncode == 0
    for variable, value, message in (("UMEM_WINDOW", "much", "UMEM_WINDOW"), ("UMEM_WINDOWS", "1GiB", "UMEM_WINDOWS")):
        done = umem("load", model, **{variable: value})
        assert done.returncode == 1
        assert message in done.stderr


def test_help_has_examples() -> None:
    for command in ("load", "plan", "probe", "ttff"):
        done = umem(command, "--help", COLUMNS="80", TERM="dumb")
        assert done.returncode == 0
        assert f"umem {command}" in done.stdout
        assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "load" in umem().stdout


def large_checkpoint(directory: Path) -> Path:
    """A model of about 200 MB, so that there is something to interrupt and to show."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8, vocab_size=2048
    )
    config.dtype = torch.bfloat16
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def test_an_interrupt_is_clean(tmp_path: Path) -> None:
    path = large_checkpoint(tmp_path)
    code = (
        "import sys, time, os\n"
        "real = os.preadv\n"
        "def slow(*a):\n    os.write(1, b'reading\\n'); time.sleep(0.3); return real(*a)\n"
        "os.preadv = slow\n"
        "from umem.cli import main\n"
        f"sys.argv = ['umem', 'load', {str(path)!r}, '--device', 'cpu']\n"
        "main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert set(out.split()) <= {"reading"}
    assert "interrupted" in err
    assert "Traceback" not in err


def test_a_terminal_sees_progress(tmp_path: Path) -> None:
    path = large_checkpoint(tmp_path)
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "umem", "load", str(path), "--device", "cpu"],
        stdout=subprocess.DEVNULL,
        stderr=child,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(child)
    shown = b""
    while process.poll() is None or select.select([parent], [], [], 0)[0]:
        if select.select([parent], [], [], 0.2)[0]:
            try:
                shown += os.read(parent, 65536)
            except OSError:
                break
    os.close(parent)
    assert process.wait(60) == 0
    assert b"loading" in shown
    assert b"window" in shown


@pytest.mark.root
def test_watch_says_each_change_of_pace_on_a_pipe(tmp_path: Path) -> None:
    config = "umem.Thresholds(floor_bytes=0, soft_floor_bytes=1 << 60)"
    code = (
        "import umem, umem.cli, sys\n"
        f"umem.cli.settings_from_environment = lambda: umem.LoadSettings(thresholds={config})\n"
        "sys.argv[0] = 'umem'\n"
        "umem.cli.main()"
    )
    model = save_family(tmp_path, "llama")
    done = subprocess.run(
        [sys.executable, "-c", code, "load", str(model), "--watch", "--guard"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert "slower:" in line
    assert "left of MemAvailable" in line
    assert "slower:" in done.stdout  # the report tells it too
