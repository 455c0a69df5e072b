"""Families that people load most, by the parity matrix (`scripts/parity.py`), which covers all of the library's."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import parity

pytestmark = pytest.mark.slow

FAMILIES = [
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_vl_moe", "deepseek_v2",
    "deepseek_v3", "deepseek_v4", "glm4_moe", "glm_moe_dsa", "minimax_m2", "nemotron_h", "gpt_oss", "gemma4",
    "llama4", "jamba", "phimoe", "olmoe", "lfm2_moe", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoehybrid",
    "kimi_linear", "step3p7", "bailing_hybrid", "olmo_hybrid", "llama", "qwen3", "phi3", "gpt2", "gpt_neox",
    "falcon", "bloom",
]  # fmt: skip

ENTRIES = {entry.name: entry for entry in parity.entries()}


@pytest.mark.filterwarnings("ignore")  # the library's own, about shapes and settings of tiny models
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_and_never_materialized(family: str) -> None:
    row = parity.run_entry(ENTRIES[family])
    assert (row.status, row.detail) == ("equal", "")
    assert set(row.route_bytes) <= {"direct", "streaming"}
    assert row.converters_used > 0 or not ENTRIES[family].has_operations
