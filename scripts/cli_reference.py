"""Writes the page of the command line from the commands themselves: a hook of mkdocs, called while it builds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from umem.cli import app

MARK = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page's text with every command in place of the mark."""
    return markdown.replace(MARK, "\n".join(reference())) if MARK in markdown else markdown


def reference() -> Iterator[str]:
    """Every command: what it does, its arguments, its options. In Markdown, line by line."""
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        arguments = [parameter.metavar for parameter in command.params if parameter.param_type_name == "argument"]
        usage = " ".join(["umem", name, "[OPTIONS]", *arguments])
        yield from (f"## umem {name}", "", command.help, "", "```text", usage, "```", "")
        yield from ("| | |", "|---|---|", *map(_row, command.params), "")


def _row(parameter: Any) -> str:
    called = parameter.opts if parameter.param_type_name == "option" else [parameter.metavar]
    words = parameter.help
    if parameter.multiple:
        words += " May be given several times."
    if isinstance(parameter.default, str):
        words += f" Default: `{parameter.default}`."
    return f"| {', '.join(f'`{name}`' for name in called)} | {words} |"
