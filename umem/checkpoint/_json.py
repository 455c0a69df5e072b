"""JSON read strictly: UTF-8, no duplicate keys, no surprises in depth or numbers."""

from __future__ import annotations

import json
from typing import Any

from umem.errors import DuplicateKeyError, HeaderSyntaxError

__all__ = ["parse_strict"]


def parse_strict(raw: bytes, *, path: str, what: str) -> Any:
    """The value of `raw`; `what` names the part of the file in errors.

    Raises
    ------
    HeaderSyntaxError
        Not UTF-8, not JSON, or nested too deeply.
    DuplicateKeyError
        An object names one key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise DuplicateKeyError(f"{what} names {twice!r} twice; write the file again", path=path)
        return result

    def refuse(constant: str) -> None:
        raise HeaderSyntaxError(f"{what} holds {constant}, which is not JSON; write the file again", path=path)

    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HeaderSyntaxError(
            f"{what} is not UTF-8 ({error}); the file is damaged or of another format", path=path
        ) from None
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except HeaderSyntaxError:
        raise
    except (ValueError, RecursionError) as error:
        raise HeaderSyntaxError(
            f"{what} is not JSON ({error}); the file is damaged or of another format", path=path
        ) from None
