"""Time to first forward: that runs are what they are called, that answers are compared, what the pages show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.adapters.hosts.models import save_family
from umem.errors import CheckpointNotFoundError, MissingDependencyError, RunFailedError, SettingsError
from umem.measurement import baselines, cgroups, ttff
from umem.measurement.baselines import MODEL_LOADERS, ModelLoader, check_installed
from umem.measurement.first_forward import flattened
from umem.measurement.page import page_of, section
from umem.measurement.page_cache import cached_fraction, prepare_cache, shards_of
from umem.measurement.table import ttff_table
from umem.measurement.ttff import Measurement, measure, row_of

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(tmp_path_factory.mktemp("ttff") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def measured(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The result and the page of the command line, for umem and two baselines."""
    html = tmp_path_factory.mktemp("page") / "ttff.html"
    command = [sys.executable, "-m", "umem", "ttff", str(dense), "--repeats", "1", "--device", "cpu", "--json"]
    command += ["--baseline", "transformers", "--baseline", "safetensors", "--html", str(html), "--window", "32MiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout), html.read_text()


@slow
def test_every_loader_ran_with_both_caches_and_gave_the_same_answer(measured: tuple[dict[str, Any], str]) -> None:
    result, _ = measured
    assert (result["schema"], result["version"]) == ("umem.ttff", 1)
    assert result["equal"]
    ran = {(run["cache"], run["loader"]) for run in result["runs"]}
    assert ran == {(cache, name) for cache in ("cold", "warm") for name in ("umem", "transformers", "safetensors")}
    assert len({run["logits_digest"] for run in result["runs"]}) == 1
    assert {run["loader"] for run in result["runs"] if "weights_digest" in run} == set(result["loaders"])


@slow
def test_a_record_does_not_tell_where_on_the_machine_the_checkpoint_is(
    dense: Path, measured: tuple[dict[str, Any], str]
) -> None:
    result, html = measured
    assert dense.name in json.dumps(result)
    assert str(dense.parent) not in json.dumps(result)
    assert str(dense.parent) not in html


@slow
def test_caches_were_as_they_are_called(dense: Path, measured: tuple[dict[str, Any], str]) -> None:
    prepare_cache(shards_of(dense), "cold")
    if cached_fraction(shards_of(dense)) != 0:
        pytest.skip("the file system does not evict, or pages are not counted")
    for run in measured[0]["runs"]:
        assert run["cached_fraction"] in ((0,) if run["cache"] == "cold" else (1,))


@slow
def test_the_result_says_what_was_measured_and_where(measured: tuple[dict[str, Any], str]) -> None:
    result, _ = measured
    assert result["model"]["class"] == "Qwen3ForCausalLM"
    assert (result["model"]["dtype"], result["backend"], result["topology"]["kind"]) == ("bfloat16", "cpu", "cpu")
    assert {row["route"] for row in result["layout"]} == {"direct"}
    assert result["settings"] == {"window_bytes": 32 << 20}
    assert {"torch", "transformers", "kernel", "date", "commit"} <= set(result["machine"])
    assert result["storage"]["file_system"]


@slow
def test_phases_follow_each_other_from_the_start_of_the_process(measured: tuple[dict[str, Any], str]) -> None:
    for run in measured[0]["runs"]:
        spans = run["spans"]
        assert [spans[0][0], spans[1][0], spans[-2][0], spans[-1][0]] == [
            "start", "import", "first forward", "second forward",
        ]  # fmt: skip
        assert spans[0][1] == 0
        for (_, _, before), (_, after, _) in zip(spans, spans[1:], strict=False):
            assert after >= before
        assert run["first_forward_s"] == spans[-2][2]
        names = {name for name, _, _ in spans}
        told = {"umem": {"probe", "open", "plan", "build", "allocate", "read"}, "safetensors": {"build", "load"}}
        assert told.get(run["loader"], {"load"}) <= names


@slow
def test_memory_is_watched_from_the_first_moment_to_the_answer(measured: tuple[dict[str, Any], str]) -> None:
    for run in measured[0]["runs"]:
        series = run["series"]
        assert len({len(values) for values in series.values()}) == 1
        assert series["time_s"][0] < run["spans"][1][1] + 1
        assert run["spans"][-2][1] - 1 < series["time_s"][-1] <= run["first_forward_s"]
        assert max(series["anonymous_bytes"]) > 50 << 20  # torch alone
        assert run["peaks"]["anonymous_bytes"] > 0


class Page(HTMLParser):
    """Tags, their attributes and the text of a page; fails where tags do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


@slow
def test_the_page_is_whole_and_needs_nothing_else(measured: tuple[dict[str, Any], str]) -> None:
    _, text = measured
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not {"src", "href"} & {name for name, _ in page.attributes}
    assert "url(" not in text
    assert "//" not in text
    assert "prefers-color-scheme: dark" in text
    assert page.tags.count("circle") == 6
    for words in ("forecast", "budget", "import", "transformers", "bit for bit", "Qwen3ForCausalLM"):
        assert words in page.words


@slow
def test_numbers_of_pictures_stay_inside_them(measured: tuple[dict[str, Any], str]) -> None:
    page = Page(measured[1])
    widths = [float(value or 0) for name, value in page.attributes if name in ("x", "cx", "width") and value != "100%"]
    assert all(0 <= value <= 920 for value in widths)
    assert "nan" not in measured[1].lower().replace("finance", "")


@slow
def test_a_name_is_no_markup(measured: tuple[dict[str, Any], str]) -> None:
    changed = json.loads(json.dumps(measured[0]))
    changed["model"]["name"] = "<b>&\"'"
    changed["left_out"] = {"accelerate": "<i>no</i>"}
    page = Page(page_of("<b>", [section(changed)]))
    assert "b" not in page.tags
    assert "i" not in page.tags
    assert "<i>no</i>" in page.words


@slow
def test_the_table_fits_80_columns(measured: tuple[dict[str, Any], str], capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=80).print(ttff_table(measured[0]))
    printed = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80
    assert "…" not in printed
    for words in ("cold", "warm", "safetensors", "first forward s", "anonymous", "bit for bit", "peak"):
        assert words in " ".join(printed.split())


@slow
def test_a_road_that_does_not_reach_the_model_is_left_out_with_its_reason(tmp_path: Path) -> None:
    path = save_family(tmp_path / "moe", "qwen3_moe")
    lines: list[str] = []
    wanted = Measurement(checkpoint=str(path), device="cpu", baselines=["safetensors"], caches=["warm"], repeats=2)
    result = measure(wanted, lines.append)
    assert "other names" in result["left_out"]["safetensors"]
    assert [run["loader"] for run in result["runs"]] == ["umem", "umem"]
    assert result["equal"]
    assert sum("left out" in line for line in lines) == 1


@slow
def test_a_load_of_umems_that_fails_is_an_error(dense: Path) -> None:
    wanted = Measurement(checkpoint=str(dense), device="cpu", repeats=1, settings={"memory_budget_bytes": 1 << 20})
    with pytest.raises(RunFailedError, match="InsufficientMemoryError: the load needs"):
        measure(wanted)


@slow
def test_an_interrupt_leaves_nothing(dense: Path) -> None:
    command = [sys.executable, "-m", "umem", "ttff", str(dense), "--device", "cpu"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not (found := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert "interrupted" in err
    assert "Traceback" not in err
    assert found
    assert not any(Path(f"/proc/{child}").exists() for child in found)
    assert not list(cgroups.ROOT.glob(f"**/umem-measure-{process.pid}-*"))


def test_refusals_come_before_any_run(dense: Path, tmp_path: Path) -> None:
    for path in shards_of(dense):
        (tmp_path / path.name).symlink_to(path)
    with pytest.raises(CheckpointNotFoundError, match=r"config\.json"):
        measure(Measurement(checkpoint=str(tmp_path)))
    with pytest.raises(CheckpointNotFoundError, match="no such file"):
        measure(Measurement(checkpoint=str(tmp_path / "none")))
    with pytest.raises(SettingsError, match="transformers, accelerate, safetensors"):
        Measurement(checkpoint=str(dense), baselines=["vllm"])
    with pytest.raises(SettingsError, match="cold, warm"):
        Measurement(checkpoint=str(dense), caches=["hot"])
    with pytest.raises(SettingsError, match="one at least"):
        Measurement(checkpoint=str(dense), repeats=0)


def test_what_is_not_installed_is_named() -> None:
    absent = ModelLoader("x", ("torch", "no_such_package"), "", lambda _: None, lambda _: baselines.Loaded(None, []))
    with pytest.raises(MissingDependencyError, match="no_such_package"):
        check_installed(absent)
    for loader in MODEL_LOADERS.values():
        check_installed(loader)


def test_spans_that_nest_count_once() -> None:
    nested = [("open", 1.0, 2.0), ("build", 2.0, 9.0), ("plan", 3.0, 4.0), ("read", 5.0, 8.0), ("convert", 6.0, 7.0)]
    assert flattened(nested) == [
        ("open", 1.0, 2.0),
        ("build", 2.0, 3.0),
        ("plan", 3.0, 4.0),
        ("build", 4.0, 5.0),
        ("read", 5.0, 6.0),
        ("convert", 6.0, 7.0),
        ("read", 7.0, 8.0),
        ("build", 8.0, 9.0),
    ]
    assert flattened([("open", 1.0, 2.0), ("plan", 3.0, 4.0)])[1] == ("between", 2.0, 3.0)


def run(number: int, seconds: float, peak: int, **more: Any) -> dict[str, Any]:
    return {
        "round": number, "cache": "cold", "loader": "x", "first_forward_s": seconds, "load_s": seconds / 2,
        "peak_bytes": peak, "phases_s": {"import": 1.0, "first forward": 0.5}, "peaks": {"anonymous_bytes": peak},
        "cached_before_bytes": 0, "cached_after_bytes": 7, "minor_faults": 1, "major_faults": 0, "cpu_s": 1.0,
        "others_cpu_s": 0.0, "device_peak_bytes": None, "logits_digest": "a",
    } | more  # fmt: skip


def test_a_row_holds_medians_and_ratios_within_rounds() -> None:
    ours = [run(0, 1.0, 100), run(1, 10.0, 100), run(2, 2.0, 100)]
    theirs = [run(0, 3.0, 200), run(1, 10.0, 200), run(2, 8.0, 200)]
    row = row_of(theirs, ours, 100)
    assert (row["first_forward_s"], row["fastest_s"], row["slowest_s"]) == (8.0, 3.0, 10.0)
    assert row["to_umem"] == 3.0  # of 3, 1 and 4
    assert (row["peak_to_umem"], row["peak_to_model"], row["cache_left_bytes"]) == (2.0, 2.0, 7)
    assert row_of(theirs, [], 100)["to_umem"] is None


def test_other_weights_or_other_answers_are_not_equal() -> None:
    same = [run(0, 1.0, 1, weights_digest="w"), run(1, 1.0, 1, weights_digest="w")]
    assert ttff._is_equal(same)
    assert not ttff._is_equal([*same, run(2, 1.0, 1, weights_digest="v")])
    assert not ttff._is_equal([*same, run(2, 1.0, 1, logits_digest="b")])
