"""Tiny transformers models with numbers that are all different, saved in the layout that is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.writers import same_bytes

COMMON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

#: Family -> (config class, its settings). Dimensions differ from each other, so that no wrong orientation passes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON),
    "llama-tied": ("LlamaConfig", COMMON | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", COMMON),
    "qwen3": ("Qwen3Config", COMMON | {"head_dim": 8}),
    "mistral": ("MistralConfig", COMMON | {"head_dim": 8}),
    "gemma2": ("Gemma2Config", COMMON | {"head_dim": 8}),
    "phi3": ("Phi3Config", COMMON),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}),
    "gpt_neox": ("GPTNeoXConfig", COMMON | {"tie_word_embeddings": False}),
    "mixtral": ("MixtralConfig", COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        COMMON | EXPERTS | {"num_experts": 5, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", COMMON | EXPERTS | {"num_experts": 5, "head_dim": 8}),
    "olmoe": ("OlmoeConfig", COMMON | {"num_experts": 5, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        COMMON
        | EXPERTS
        | {
            "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "kv_lora_rank": 12, "q_lora_rank": 20,
            "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8, "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
        },
    ),
}  # fmt: skip


def save_family(directory: Path, family: str, *, seed: int = 0) -> Path:
    """Save a tiny model of the family in bf16."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, name)(**settings, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*model.parameters(), *(buffer for _, buffer in persistent_buffers(model))]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    model.save_pretrained(directory)
    return directory


def persistent_buffers(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers that a checkpoint holds."""
    stored = model.state_dict()
    return [(name, buffer) for name, buffer in model.named_buffers() if name in stored]


def assert_same_model(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    """Everything that `from_pretrained` promises is equal: class, names, bits, ties, flags, buffers, mode, configs."""
    assert type(ours) is type(theirs)
    left, right = ours.state_dict(), theirs.state_dict()
    assert list(left) == list(right)
    for name, tensor in left.items():
        assert same_bytes(tensor, right[name]), name
    for (name, one), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert same_bytes(one, other), name
    flags = [[(name, p.requires_grad, type(p)) for name, p in model.named_parameters()] for model in (ours, theirs)]
    assert flags[0] == flags[1]
    assert ours.training is theirs.training is False
    assert ours.config.to_dict() == theirs.config.to_dict()  # type: ignore[union-attr, operator]
    if theirs.can_generate():  # type: ignore[operator]
        assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()  # type: ignore[union-attr, operator]


def logits(model: torch.nn.Module) -> torch.Tensor:
    """The model's answer to some tokens."""
    with torch.no_grad():
        result: torch.Tensor = model(torch.arange(1, 9)[None]).logits
    return result
