"""Tables and pictures as HTML for notebooks: self-contained, in the notebook's own colours, light or dark."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape
from io import StringIO

from rich.console import Console, RenderableType

__all__ = ["notebook_html"]

_COLUMNS = 96


def notebook_html(table: RenderableType, *pictures: str) -> str:
    """The text of a table, and pictures (SVG) under it.

    Text takes its colour from around it. A picture is an image of its own, so that its styles stay in it.
    """
    images = (
        f'<img alt="" style="display: block; max-width: 860px; width: 100%" src="data:image/svg+xml;base64,'
        f'{base64.b64encode(picture.encode()).decode()}"/>'
        for picture in pictures
    )
    text = "".join(_spans(table)).rstrip("\n")
    return f'<div><pre style="line-height: 1.35; overflow-x: auto">{text}</pre>{"".join(images)}</div>'


def _spans(table: RenderableType) -> Iterator[str]:
    """The text as a terminal would show it; of its styles, bold and dim."""
    console = Console(width=_COLUMNS, file=StringIO(), force_jupyter=False)
    for line in console.render_lines(table, pad=False):
        for text, style, _ in line:
            shown = escape(text)
            if style is not None and style.bold:
                shown = f"<b>{shown}</b>"
            if style is not None and style.dim:
                shown = f'<span style="opacity: .65">{shown}</span>'
            yield shown
        yield "\n"
