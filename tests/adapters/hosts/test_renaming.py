"""Renaming by kind against the library's own renaming of every name."""

from __future__ import annotations

import itertools
import re
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from hypothesis import given
from hypothesis import strategies as st
from transformers import core_model_loading as library
from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

from umem.adapters.hosts.transformers.renaming import Renamer, in_library_order

MAPPINGS = _build_checkpoint_conversion_mapping()
NUMBERS = ("0", "1", "7", "10", "61", "99", "127")


def split(transforms: list[Any]) -> tuple[list[Any], list[Any]]:
    renamings = [transform for transform in transforms if isinstance(transform, library.WeightRenaming)]
    return renamings, [transform for transform in transforms if isinstance(transform, library.WeightConverter)]


def sample_names(transforms: list[Any]) -> list[str]:
    """Names that the patterns match, roughly: each pattern with its special parts filled in, in a layer and alone."""
    names = []
    for transform in transforms:
        for pattern in transform.source_patterns:
            text = re.sub(r"\(\?[!=<:].*?\)", "", pattern)
            text = re.sub(r"\((?:\\d\+|\\d|\[0-9\]\+)\)|\\d\+|\\d|\[0-9\]\+|\*", "{}", text)
            text = re.sub(r"\(([^|()]*)(\|[^()]*)?\)", r"\1", text)
            text = re.sub(r"[\^$?+\\]|\(|\)|\.\.", "", text)
            for wrapped in (f"model.layers.{{}}.{text}", f"{text}.weight", text, f"model.{text}.{{}}.bias"):
                count = wrapped.count("{}")
                names += [wrapped.format(*numbers) for numbers in itertools.islice(combinations(count), 6)]
    return sorted({name for name in names if ".." not in name and name.strip(".") == name})


def combinations(count: int) -> Any:
    return (
        zip(*(itertools.islice(itertools.cycle(NUMBERS), start, None) for start in range(count)), strict=False)
        if count
        else [()]
    )


@pytest.mark.parametrize("entry", MAPPINGS)
def test_every_mapping_of_the_library(entry: str) -> None:
    fresh, oracle, probe = (deepcopy(MAPPINGS[entry]) for _ in range(3))
    names = in_library_order(sample_names(fresh))
    parameters = {}
    for name in names:
        renamed, _ = library.rename_source_key(name, *split(probe))
        parameters[renamed.removeprefix("model.")] = parameters[f"model.{renamed}"] = 1
    rename = Renamer(SimpleNamespace(base_model_prefix="model"), parameters, *split(fresh))
    for name in names:
        expected = library.rename_source_key(name, *split(oracle), "model", parameters)
        if expected[0] not in parameters and name in parameters:
            expected = library.rename_source_key(name, [], [], "model", parameters)
        assert rename(name) == expected, name
    assert [transform.was_used() for transform in fresh] == [transform.was_used() for transform in oracle]


def test_the_library_is_asked_once_for_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    converters = [t for t in MAPPINGS["qwen2_moe"] if isinstance(t, library.WeightConverter)]
    asked = []
    real = library.rename_source_key

    def counted(name: str, *rest: Any) -> Any:
        asked.append(name)
        return real(name, *rest)

    monkeypatch.setattr(library, "rename_source_key", counted)
    parameters = {f"model.layers.{layer}.mlp.experts.down_proj": 1 for layer in range(50)}
    rename = Renamer(SimpleNamespace(base_model_prefix="model"), parameters, [], converters)
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight" for layer in range(50) for expert in range(100)
    ]
    assert {rename(name) for name in names} == {(name, "mlp.experts.*.down_proj.weight") for name in parameters}
    assert len(asked) == 2 * 4  # two examples of each: one or two digits of layer, one or two of expert


def test_a_pattern_with_a_number_is_asked_for_each_name() -> None:
    renamings = [library.WeightRenaming(r"layers\.61\.", "mtp."), library.WeightRenaming(r"block\.(\d)\.", r"b.\1.")]
    rename = Renamer(SimpleNamespace(base_model_prefix=""), {}, renamings, [])
    assert rename("layers.61.x")[0] == "mtp.x"
    assert rename("layers.62.x")[0] == "layers.62.x"
    assert rename("block.1.x")[0] == "b.1.x"
    assert rename("block.12.x")[0] == "block.12.x"


@given(st.lists(st.text("ab.019", min_size=1, max_size=9), max_size=12, unique=True))
def test_the_order_is_the_librarys(names: list[str]) -> None:
    assert in_library_order(names) == sorted(names, key=library.dot_natural_key)
