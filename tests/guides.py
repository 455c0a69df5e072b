"""What the guides show, as blocks that can be run: sessions at a prompt, and Python code.

A ```console block holds commands after `$ `, each followed by lines of its output; a ```python block may be followed
by a ```text block with what it prints. Of the output, only what is shown must be there, in that order; `...` stands
for anything, and white space is one like another. A comment `<!-- not run: why -->` before a block keeps it from
being run; after `<!-- figures vary -->` one number is like another, and one unit of size.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["Block", "Command", "blocks_of", "commands_of", "missing_from"]

_BLOCK = re.compile(
    r"(?:<!-- (?:not run: (?P<why>[^>]+)|(?P<vary>figures vary)) -->\s*)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_FIGURE = re.compile(r"\d+(?:\.\d+)?(?: [KMGT]?i?B\b)?")


class Block(NamedTuple):
    """A fenced block; `not_run` is the reason why it is not to be run, or empty. `line` counts from 1."""

    language: str
    text: str
    not_run: str
    figures_vary: bool
    line: int


class Command(NamedTuple):
    """A command, and what is shown of its output."""

    line: str
    shown: str


def blocks_of(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(
            found["language"],
            found["text"],
            not_run=found["why"] or "",
            figures_vary=bool(found["vary"]),
            line=text.count("\n", 0, found.start("language")) + 1,
        )
        for found in _BLOCK.finditer(text)
    ]


def commands_of(session: str) -> list[Command]:
    """The commands of a console block."""
    parts = re.split(r"^\$ ", session, flags=re.MULTILINE)
    if parts[0].strip():
        raise ValueError(f"output before the first command: {parts[0]!r}")
    return [Command(*(piece.strip() for piece in part.partition("\n")[::2])) for part in parts[1:]]


def missing_from(output: str, shown: str, *, figures_vary: bool = False) -> str:
    """The first piece of `shown` that `output` lacks after those before it; empty: it has all."""
    if figures_vary:
        output, shown = _FIGURE.sub("#", output), _FIGURE.sub("#", shown)
    there, at = " ".join(output.split()), 0
    for piece in shown.split("..."):
        wanted = " ".join(piece.split())
        found = there.find(wanted, at)
        if found < 0:
            return wanted
        at = found + len(wanted)
    return ""
