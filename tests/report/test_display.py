"""How records show themselves: to rich, in notebooks, and a load's progress as a bar."""

from __future__ import annotations

import base64
import re
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from rich.console import Console
from rich.text import Text

import umem
from tests.writers import Holder, random_tensor, write_safetensors
from umem._display import Displayed
from umem.report.notebook import notebook_html


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("file") / "x<&>.safetensors"
    tensors = {"a": random_tensor((64, 64)), "b": random_tensor((8,), torch.float16)}
    write_safetensors(path, tensors)
    return {
        "plan": umem.plan(path, device="cpu"),
        "report": umem.load_into(Holder(tensors), path, device="cpu"),
        "machine": umem.probe(device="cpu"),
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("plan", ("to read", "stored as it is used")),
        ("report", ("seconds", "forecast")),
        ("machine", ("MemAvailable",)),
    ],
)
def test_rich_and_notebooks_show_the_same_table(records: dict[str, Any], name: str, words: tuple[str, ...]) -> None:
    console = Console(width=96, file=StringIO())
    console.print(records[name])
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    shown = ET.fromstring(records[name]._repr_html_())
    text = "".join(shown.itertext())
    assert [line.rstrip() for line in text.splitlines()] == [line.rstrip() for line in printed.rstrip().splitlines()]
    for word in words:
        assert word in text


def test_a_report_brings_its_picture_along(records: dict[str, Any]) -> None:
    html = records["report"]._repr_html_()
    pictures = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', html)
    assert len(pictures) == len(re.findall("src=", html)) == 1
    assert ET.fromstring(base64.b64decode(pictures[0])).tag.endswith("svg")
    assert "color:" not in html.replace("background-color:", "")  # the notebook's own colours, light or dark


def test_markup_in_text_is_text() -> None:
    html = notebook_html(Text.assemble(("<b>& ", "bold"), ("dim", "dim")))
    assert "<b>&lt;b&gt;&amp; </b>" in html
    assert '<span style="opacity: .65">dim</span>' in html


def test_a_record_without_a_view_shows_itself_as_any_object() -> None:
    class Plain(Displayed):
        def __repr__(self) -> str:
            return "plain"

    assert Plain()._repr_html_() is None
    assert Plain().__rich__() == "plain"


class Bar:
    """What of tqdm a bar needs."""

    def __init__(self, **options: Any) -> None:
        self.options, self.n, self.closed = options, 0, False

    def update(self, count: int) -> None:
        self.n += count

    def close(self) -> None:
        self.closed = True


def test_a_bar_follows_one_load_after_the_other(tmp_path: Path) -> None:
    tensors = {"a": random_tensor((512, 1024))}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    bars: list[Bar] = []

    def opened(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    progress = umem.tqdm_progress(opened, desc="weights")
    for _ in range(2):
        umem.load_into(Holder(tensors), path, device="cpu", progress=progress)
    assert [(bar.n, bar.closed) for bar in bars] == [(2 << 20, True)] * 2
    assert bars[0].options["total"] == 2 << 20
    assert (bars[0].options["desc"], bars[0].options["unit"]) == ("weights", "B")


def test_tqdm_itself_shows_it(tmp_path: Path) -> None:
    pytest.importorskip("tqdm")
    tensors = {"a": random_tensor((512, 1024))}
    path = write_safetensors(tmp_path / "x.safetensors", tensors)
    shown = StringIO()
    umem.load_into(Holder(tensors), path, device="cpu", progress=umem.tqdm_progress(file=shown))
    assert "loading: 100%" in shown.getvalue()
    assert "2.00M/2.00M" in shown.getvalue()
