"""What the guides start from: Qwen3 checkpoints in a size that loads at once, and a large one without data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.writers import write_index

__all__ = ["LARGE", "SMALL", "SMALL_DENSE", "Size", "write_headers", "write_whole"]

_SHARDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The shape of a Qwen3 model, dense where it has no experts."""

    hidden: int
    inner: int
    experts: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
        dense_kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        experts = {"num_experts": self.experts, "num_experts_per_tok": 2, "moe_intermediate_size": self.inner}
        return (kind | experts if self.experts else dense_kind) | {
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
        }

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes, as released checkpoints have them."""
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            mlps = [f".experts.{expert}" for expert in range(self.experts)] or [""]
            for mlp in mlps:
                yield f"{prefix}.mlp{mlp}.down_proj.weight", (self.hidden, self.inner)
                yield f"{prefix}.mlp{mlp}.gate_proj.weight", (self.inner, self.hidden)
                yield f"{prefix}.mlp{mlp}.up_proj.weight", (self.inner, self.hidden)
            if self.experts:
                yield f"{prefix}.mlp.gate.weight", (self.experts, self.hidden)
            yield f"{prefix}.self_attn.q_proj.weight", (self.heads * self.head, self.hidden)
            yield f"{prefix}.self_attn.k_proj.weight", (self.kv_heads * self.head, self.hidden)
            yield f"{prefix}.self_attn.v_proj.weight", (self.kv_heads * self.head, self.hidden)
            yield f"{prefix}.self_attn.o_proj.weight", (self.hidden, self.heads * self.head)
            yield f"{prefix}.self_attn.q_norm.weight", (self.head,)
            yield f"{prefix}.self_attn.k_norm.weight", (self.head,)
            yield f"{prefix}.input_layernorm.weight", (self.hidden,)
            yield f"{prefix}.post_attention_layernorm.weight", (self.hidden,)
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        yield "lm_head.weight", (self.vocabulary, self.hidden)


SMALL = Size(hidden=256, inner=128, experts=8, layers=2, heads=4, kv_heads=2, head=64, vocabulary=2048)
SMALL_DENSE = Size(hidden=256, inner=512, experts=0, layers=2, heads=4, kv_heads=2, head=64, vocabulary=2048)

#: Qwen3-30B-A3B.
LARGE = Size(hidden=2048, inner=768, experts=128, layers=48, heads=32, kv_heads=4, head=128, vocabulary=151_936)


def write_whole(directory: Path, size: Size) -> None:
    """A checkpoint with numbers in it, in two shards."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in size.shapes()}
    names, weight_map = list(tensors), {}
    for number in range(_SHARDS):
        file = f"model-{number + 1:05}-of-{_SHARDS:05}.safetensors"
        part = names[number * len(names) // _SHARDS : (number + 1) * len(names) // _SHARDS]
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map.update(dict.fromkeys(part, file))
    write_index(directory / "model.safetensors.index.json", weight_map)
    (directory / "config.json").write_text(json.dumps(size.config))


def write_headers(directory: Path, size: Size) -> None:
    """A checkpoint whose tensors are holes, which take no room on the disk."""
    directory.mkdir()
    header, end = {}, 0
    for name, shape in size.shapes():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(file.tell() + end)
    (directory / "config.json").write_text(json.dumps(size.config))
