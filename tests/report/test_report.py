"""Reports: numbers that add up, JSON that is whole, a picture that is well-formed."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from rich.console import Console

import umem
from tests.writers import Holder, random_tensor, write_sharded
from umem import LoadReport
from umem.report.chart import memory_chart
from umem.report.model import PHASES, Stopwatch
from umem.report.table import plan_table, report_table

SHAPES = {f"layer.{i}.weight": (256, 1024) for i in range(8)}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> LoadReport:
    directory = tmp_path_factory.mktemp("checkpoint")
    tensors = {name: random_tensor(shape) for name, shape in SHAPES.items()}
    half = {"norm.weight": random_tensor((64,), torch.float16)}
    write_sharded(directory, [tensors, half])
    module = Holder(tensors | {"norm.weight": torch.empty(64)})
    return umem.load_into(module, directory, device="cpu", settings=umem.LoadSettings(sample_interval_s=0.002))


def test_phases_add_up_to_the_time_that_passed(report: LoadReport) -> None:
    assert set(report.seconds) <= set(PHASES)
    assert report.total_s == pytest.approx(sum(report.seconds.values()))
    spans = sorted(report.spans, key=lambda span: span[1])
    assert {name for name, _, _ in spans} >= {"open", "plan", "allocate", "read", "install"}
    assert report.total_s <= max(end for _, _, end in spans) - min(start for _, start, _ in spans) + 0.05


def test_the_measured_peak_is_what_was_loaded(report: LoadReport) -> None:
    final = report.plan.forecast.final_bytes
    assert final == 8 * 256 * 1024 * 4 + 64 * 4
    measured = report.measured_peak_bytes
    assert measured is not None
    assert 0.9 * final < measured < report.plan.forecast.peak_bytes
    assert report.window_peak_bytes <= report.plan.forecast.window_bytes


def test_json_is_whole_and_versioned(report: LoadReport) -> None:
    facts = json.loads(json.dumps(report.to_json()))
    assert (facts["schema"], facts["version"]) == ("umem.report", 1)
    routes = {(row["route"], row["reason"]): row["read_bytes"] for row in facts["plan"]["routes"]}
    assert routes == {("direct", "stored as it is used"): 8 << 20, ("streaming", "cast F16 to F32"): 128}
    assert facts["seconds"]["total"] == pytest.approx(report.total_s)
    assert facts["series"][0]["time_s"] == 0
    assert len(facts["series"]) == len(report.samples)
    assert facts["peak"]["measured_bytes"] == report.measured_peak_bytes
    assert facts["copier"] == {"name": "memory", "reason": "the processor's memory is the destination"}


def test_the_picture_shows_phases_and_forecast(report: LoadReport) -> None:
    svg = memory_chart(report)
    root = ET.fromstring(svg)
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert any("forecast peak" in text for text in texts)
    assert any("memory of the process" in text for text in texts)
    paths = [element.get("d") or "" for element in root.iter("{http://www.w3.org/2000/svg}path")]
    numbers = [float(number) for path in paths for number in re.findall(r"[-\d.]+", path)]
    assert all(0 <= number <= 860 for number in numbers)


@pytest.mark.parametrize("width", [80, 200])
def test_tables_fit_the_terminal(report: LoadReport, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=width)
    console.print(report_table(report))
    console.print(plan_table(report.plan))
    printed = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= width
    for part in ("seconds", "peak", "forecast", "direct", "cast F16 to F32", "8.00 MiB"):
        assert part in printed


def test_nested_phases_count_once() -> None:
    watch = Stopwatch()
    with watch.phase("build"):
        time.sleep(0.02)
        with watch.phase("plan"):
            time.sleep(0.03)
    assert 0.02 <= watch.seconds["build"] < 0.03
    assert watch.seconds["plan"] >= 0.03
    with pytest.raises(KeyError), watch.phase("read"):
        raise KeyError
    assert "read" in watch.seconds


def test_a_path_in_the_chart_is_no_markup(tmp_path: Path, report: LoadReport) -> None:
    (tmp_path / "chart.svg").write_text(memory_chart(report))
    assert ET.parse(tmp_path / "chart.svg").getroot().tag.endswith("svg")
