"""How umem's records show themselves: in a terminal by rich, in a notebook as HTML.

Records of the lower layers know nothing of rendering. The layer that renders them says here how, once; until then they
show themselves as any other object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Displayed", "display_as"]


class _View(NamedTuple):
    terminal: Callable[[Any], Any]
    notebook: Callable[[Any], str]


_VIEWS: dict[type, _View] = {}


class Displayed:
    """A record that rich and notebooks show as its registered view."""

    __slots__ = ()

    def __rich__(self) -> Any:
        """What rich prints."""
        view = _VIEWS.get(type(self))
        return repr(self) if view is None else view.terminal(self)

    def _repr_html_(self) -> str | None:
        """What a notebook shows; None for what `repr` gives."""
        view = _VIEWS.get(type(self))
        return None if view is None else view.notebook(self)


def display_as(record: type[Displayed], *, terminal: Callable[[Any], Any], notebook: Callable[[Any], str]) -> None:
    """Show records of this class as what `terminal` gives to rich, and as the HTML that `notebook` gives."""
    _VIEWS[record] = _View(terminal, notebook)
