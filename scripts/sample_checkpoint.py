"""Writes a sample checkpoint, bf16, in several shards, seeded: Qwen3-MoE-shaped (about 1 GiB) or Qwen3-shaped (dense).

Tensors are made and written one at a time, so the whole is never in memory. A checkpoint that is there whole is kept.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch

SHARD_BYTES = 256 << 20

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 65536,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}


def tensors(layers: int, experts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order of the released Qwen3-MoE checkpoints."""
    hidden, inner, head = 1024, 512, 64
    yield "model.embed_tokens.weight", (65536, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for expert in range(experts):
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", (hidden, inner)
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (inner, hidden)
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.gate.weight", (experts, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.self_attn.k_proj.weight", (4 * head, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, 16 * head)
        yield f"{prefix}.self_attn.q_norm.weight", (head,)
        yield f"{prefix}.self_attn.q_proj.weight", (16 * head, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (4 * head, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (65536, hidden)


DENSE_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 33,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32768,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}


def dense_tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, in the order of the released Qwen3 checkpoints."""
    hidden, inner, head = 2048, 8192, 128
    yield "model.embed_tokens.weight", (32768, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.k_norm.weight", (head,)
        yield f"{prefix}.self_attn.k_proj.weight", (4 * head, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, 16 * head)
        yield f"{prefix}.self_attn.q_norm.weight", (head,)
        yield f"{prefix}.self_attn.q_proj.weight", (16 * head, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (4 * head, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (32768, hidden)


def write_sample(directory: Path, *, layers: int = 4, experts: int = 64) -> None:
    """Write the checkpoint, unless it is there whole; no experts: a dense model."""
    if experts:
        config = CONFIG | {"num_hidden_layers": layers, "num_experts": experts}
        write_checkpoint(directory, tensors(layers, experts), config=config)
    else:
        write_checkpoint(directory, dense_tensors(layers), config=DENSE_CONFIG | {"num_hidden_layers": layers})


def write_checkpoint(
    directory: Path,
    named: Iterable[tuple[str, tuple[int, ...]]],
    *,
    config: Mapping[str, object] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write tensors of these names and shapes in shards of at most `shard_bytes`, unless they are there whole."""
    if (directory / "model.safetensors.index.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in named:
        size = 2 * torch.Size(shape).numel()
        if filled + size > shard_bytes and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(directory / file_name, shard)
        weight_map.update({name: file_name for name, _ in shard})
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 0}))
    index = {"metadata": {}, "weight_map": weight_map}
    partial = directory / "index.partial"
    partial.write_text(json.dumps(index))
    os.replace(partial, directory / "model.safetensors.index.json")  # last: it says that the rest is whole


def write_shard(path: Path, shard: list[tuple[str, tuple[int, ...]]]) -> None:
    """Write one safetensors file, tensor by tensor; each tensor's numbers depend on its name alone."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shard:
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in shard:
            generator = torch.Generator().manual_seed(int.from_bytes(name.encode(), "little") % (1 << 63))
            values = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            if "norm" in name:
                values += 1
            file.write(values.view(torch.int16).numpy().tobytes())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64, help="0: a dense model")
    options = parser.parse_args()
    write_sample(options.directory, layers=options.layers, experts=options.experts)
