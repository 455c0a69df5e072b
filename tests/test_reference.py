"""The reference has everything that users meet: public names, settings of the environment, commands."""

from __future__ import annotations

import re
from pathlib import Path

import cli_reference
from typer.testing import CliRunner

import umem
from umem import cli
from umem.settings import _VARIABLES

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"


def test_every_public_name_has_its_entry() -> None:
    text = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    entries = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    assert {f"umem.{name}" for name in umem.__all__ if name != "UmemError"} <= entries
    assert "umem.errors" in entries


def test_every_setting_of_the_environment_is_told() -> None:
    rows = re.findall(r"^\| `(UMEM_\w+)` \| `(\w+)` \|", (REFERENCE / "settings.md").read_text(), re.MULTILINE)
    assert dict(rows) == _VARIABLES


def test_every_option_of_every_command_is_told() -> None:
    page = cli_reference.on_page_markdown((REFERENCE / "cli.md").read_text())
    _, *parts = re.split(r"^## umem (\w+)$", page, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    for name in re.findall(r"^│ (\w+) ", said("--help"), re.MULTILINE):
        options = re.findall(r"^│ (--[\w-]+)", said(name, "--help"), re.MULTILINE)
        assert options[-1] == "--help"
        assert [option for option in options[:-1] if f"| `{option}` |" not in sections[name]] == []


def said(*arguments: str) -> str:
    return CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "120"}).output
