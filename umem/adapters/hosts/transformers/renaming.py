"""Stored names to parameter names by the library's own functions, in near-linear time.

The library tries every declared pattern on every stored name: seconds for 100,000 names. Names that differ only in
their numbers (layers, experts) are renamed alike, so one of each kind is renamed by the library, twice with different
numbers to see which of them stay where, and the others follow. That holds only while no declaration looks at a number;
kinds and names for which it might are left to the library, one by one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import core_model_loading as library

__all__ = ["Renamer", "in_library_order"]

#: Transforms whose result depends on a name only through their regular expressions.
_STATELESS = (library.WeightRenaming, library.WeightConverter, library.PrefixChange)

#: What is no literal digit in a pattern: classes, back-references, repetitions.
_NO_LITERAL = re.compile(r"\\d|\[0-9\]|\\\d|\{\d+(?:,\d*)?\}")


#: Parts of a dotted name that are numbers; the name is split at them.
_NUMBER_PART = re.compile(r"(?:(?<=^)|(?<=\.))([0-9]+)(?=\.|$)")


class _Kind(NamedTuple):
    """Names that differ only in their numbers: what stands around those, and how many digits each has."""

    texts: tuple[str, ...]
    digits: tuple[int, ...]


class _Template(NamedTuple):
    """A renamed name as a format of the stored name's numbers, and the converter's pattern that matched."""

    form: str
    pattern: str | None


class Renamer:
    """Renames stored names as `core_model_loading.rename_source_key` does for a model."""

    def __init__(
        self, model: Any, parameters: Mapping[str, Any], renamings: Sequence[Any], converters: Sequence[Any]
    ) -> None:
        self._prefix = model.base_model_prefix
        self._parameters = parameters
        self._transforms = list(renamings), list(converters)
        self._templates: dict[_Kind, _Template | None] = {}
        patterns = [pattern for transform in (*renamings, *converters) for pattern in transform.source_patterns]
        bare = [_NO_LITERAL.sub("", pattern) for pattern in patterns]
        self._literals = {number for pattern in bare for number in re.findall(r"\d+", pattern)}
        self._follows = all(type(transform) in _STATELESS for transform in (*renamings, *converters)) and not any(
            re.search(r"\[[^\]]*\d[^\]]*\]", pattern) for pattern in bare
        )

    def __call__(self, original: str) -> tuple[str, str | None]:
        """The parameter's name, and the converter's source pattern that matched (None: no converter)."""
        renamed, pattern = self._by_transforms(original)
        renamed = self._with_prefix(renamed)
        if renamed not in self._parameters and original in self._parameters:
            return self._with_prefix(original), None
        return renamed, pattern

    def _by_transforms(self, original: str) -> tuple[str, str | None]:
        texts = _NUMBER_PART.split(original)
        numbers = texts[1::2]
        if not self._follows or not numbers or not self._literals.isdisjoint(numbers):
            return self._by_library(original)
        kind = _Kind(tuple(texts[::2]), tuple(map(len, numbers)))
        if kind not in self._templates:
            self._templates[kind] = self._template(kind)
        template = self._templates[kind]
        if template is None:
            return self._by_library(original)
        return template.form.format(*numbers), template.pattern

    def _template(self, kind: _Kind) -> _Template | None:
        """How names of this kind are renamed; None where two examples do not agree."""
        examples = []
        for first in ("3", "6"):
            numbers = [str(int(first * digits) + position) for position, digits in enumerate(kind.digits)]
            if tuple(map(len, numbers)) != kind.digits or not self._literals.isdisjoint(numbers):
                return None
            between = zip(kind.texts, [*numbers, ""], strict=True)
            examples.append((numbers, *self._by_library("".join(text + number for text, number in between))))
        (numbers, renamed, pattern), (other_numbers, other_renamed, other_pattern) = examples
        parts, other_parts = renamed.split("."), other_renamed.split(".")
        if pattern != other_pattern or len(parts) != len(other_parts):
            return None
        form = []
        for part, other in zip(parts, other_parts, strict=True):
            if part == other:
                form.append(part.replace("{", "{{").replace("}", "}}"))
            elif part in numbers and other_numbers[numbers.index(part)] == other:
                form.append(f"{{{numbers.index(part)}}}")
            else:
                return None
        return _Template(".".join(form), pattern)

    def _by_library(self, name: str) -> tuple[str, str | None]:
        renamed: tuple[str, str | None] = library.rename_source_key(name, *self._transforms)
        return renamed

    def _with_prefix(self, name: str) -> str:
        """The name with the base model's prefix taken off or put on, where that makes it a parameter's."""
        prefix = self._prefix
        if prefix is None:
            return name
        shorter = name[len(prefix) + 1 :] if len(name) > len(prefix) else name
        if name.startswith(prefix) and shorter in self._parameters:
            return shorter
        longer = f"{prefix}.{name}"
        return longer if longer in self._parameters else name


def in_library_order(names: Sequence[str]) -> list[str]:
    """Stored names in the order in which the library collects them: numbers by value, texts by letter."""
    known: dict[str, Any] = {}

    def key(name: str) -> list[Any]:
        parts = name.split(".")
        for part in parts:
            if part not in known:
                known[part] = library.dot_natural_key(part)[0]
        return [known[part] for part in parts]

    return sorted(names, key=key)
