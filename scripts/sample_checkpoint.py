"""Writes a sample checkpoint in several shards, seeded: a mixture of experts, a dense model, or that in FP8 blocks.

`moe` is Qwen3-MoE-shaped, bf16, about 1 GiB; `dense` is Qwen3-shaped, bf16, about 4 GiB; `fp8` is the same with its
linear weights in FP8 and a factor for each block, as transformers' fine-grained FP8 stores them, about 2 GiB. A shard
holds as many layers as in the releases of those models, so that as many of them lie in two files.

Tensors are made and written one at a time, so the whole is never in memory. A checkpoint that is there whole is kept.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from umem._types import parse_bytes

FP8_BLOCK, FP8_SPREAD = 128, 100.0
_ITEM_BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}

Config = dict[str, Any]

CONFIG: Config = {
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


DENSE_CONFIG: Config = {
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

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}


class Stored(NamedTuple):
    """One tensor of a checkpoint: its name, its shape, and its dtype by the format's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return _ITEM_BYTES[self.dtype] * torch.Size(self.shape).numel()


def moe_tensors(config: Config) -> Iterator[Stored]:
    """What a mixture of experts stores, in the order of the released Qwen3-MoE checkpoints."""
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    yield Stored("model.embed_tokens.weight", (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield Stored(f"{prefix}.input_layernorm.weight", (hidden,))
        for expert in range(experts):
            yield Stored(f"{prefix}.mlp.experts.{expert}.down_proj.weight", (hidden, inner))
            yield Stored(f"{prefix}.mlp.experts.{expert}.gate_proj.weight", (inner, hidden))
            yield Stored(f"{prefix}.mlp.experts.{expert}.up_proj.weight", (inner, hidden))
        yield Stored(f"{prefix}.mlp.gate.weight", (experts, hidden))
        yield from _attention(prefix, config)
    yield from _last(config)


def dense_tensors(config: Config) -> Iterator[Stored]:
    """What a dense model stores, in the order of the released Qwen3 checkpoints."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    yield Stored("model.embed_tokens.weight", (config["vocab_size"], hidden))
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield Stored(f"{prefix}.input_layernorm.weight", (hidden,))
        yield Stored(f"{prefix}.mlp.down_proj.weight", (hidden, inner))
        yield Stored(f"{prefix}.mlp.gate_proj.weight", (inner, hidden))
        yield Stored(f"{prefix}.mlp.up_proj.weight", (inner, hidden))
        yield from _attention(prefix, config)
    yield from _last(config)


def fp8_tensors(config: Config) -> Iterator[Stored]:
    """What the same dense model stores in FP8: each linear weight, and a factor for each of its 128 x 128 blocks."""
    for tensor in dense_tensors(config):
        if not tensor.name.endswith("_proj.weight"):
            yield tensor
            continue
        yield tensor._replace(dtype="F8_E4M3")
        rows, columns = (-(-size // FP8_BLOCK) for size in tensor.shape)
        yield Stored(f"{tensor.name}_scale_inv", (rows, columns), "F32")


def _attention(prefix: str, config: Config) -> Iterator[Stored]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield Stored(f"{prefix}.post_attention_layernorm.weight", (hidden,))
    yield Stored(f"{prefix}.self_attn.k_norm.weight", (head,))
    yield Stored(f"{prefix}.self_attn.k_proj.weight", (keys, hidden))
    yield Stored(f"{prefix}.self_attn.o_proj.weight", (hidden, queries))
    yield Stored(f"{prefix}.self_attn.q_norm.weight", (head,))
    yield Stored(f"{prefix}.self_attn.q_proj.weight", (queries, hidden))
    yield Stored(f"{prefix}.self_attn.v_proj.weight", (keys, hidden))


def _last(config: Config) -> Iterator[Stored]:
    yield Stored("model.norm.weight", (config["hidden_size"],))
    yield Stored("lm_head.weight", (config["vocab_size"], config["hidden_size"]))


class Kind(NamedTuple):
    """A kind of sample: its config, what it stores, and how many layers' bytes a shard has."""

    config: Config
    tensors: Callable[[Config], Iterator[Stored]]
    layers_per_shard: float


#: Qwen3-30B-A3B is released in shards of 4 GB, of 1.21 GB a layer; Qwen3-8B too, of 0.39 GB a layer.
KINDS = {
    "moe": Kind(CONFIG, moe_tensors, 3.3),
    "dense": Kind(DENSE_CONFIG, dense_tensors, 10.4),
    "fp8": Kind(DENSE_CONFIG | {"quantization_config": QUANTIZATION}, fp8_tensors, 10.4),
}


def layers_of_size(kind: str, size_bytes: int, **changes: Any) -> int:
    """The number of layers, one at least, with which a checkpoint of that kind comes closest to a size in bytes.

    `changes` are of the kind's config.
    """
    config = KINDS[kind].config | changes
    return max(1, 1 + round((size_bytes - _bytes_of(kind, config, layers=1)) / _layer_bytes(kind, config)))


def _layer_bytes(kind: str, config: Config) -> int:
    return _bytes_of(kind, config, layers=2) - _bytes_of(kind, config, layers=1)


def _bytes_of(kind: str, config: Config, *, layers: int) -> int:
    return sum(tensor.nbytes for tensor in KINDS[kind].tensors(config | {"num_hidden_layers": layers}))


def write_sample(directory: Path, kind: str = "moe", **changes: Any) -> None:
    """Write the checkpoint, unless it is there whole; `changes` are of the kind's config."""
    config = KINDS[kind].config | changes
    shard_bytes = round(KINDS[kind].layers_per_shard * _layer_bytes(kind, config))
    write_checkpoint(directory, KINDS[kind].tensors(config), shard_bytes=shard_bytes, config=config)


def write_checkpoint(
    directory: Path,
    tensors: Iterable[Stored],
    *,
    shard_bytes: int,
    config: Mapping[str, object] | None = None,
) -> None:
    """Write such tensors in shards of at most `shard_bytes`, unless they are there whole."""
    if (directory / "model.safetensors.index.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    shards: list[list[Stored]] = [[]]
    filled = 0
    for tensor in tensors:
        if filled + tensor.nbytes > shard_bytes and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_shard(directory / file_name, shard)
        weight_map.update({tensor.name: file_name for tensor in shard})
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config, indent=2))
        (directory / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": 0}))
    index = {"metadata": {}, "weight_map": weight_map}
    partial = directory / "index.partial"
    partial.write_text(json.dumps(index))
    os.replace(partial, directory / "model.safetensors.index.json")  # last: it says that the rest is whole


def write_shard(path: Path, shard: list[Stored]) -> None:
    """Write one safetensors file, tensor by tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in shard:
        end = position + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in shard:
            file.write(values_of(tensor).view(torch.uint8).numpy().tobytes())


def values_of(tensor: Stored) -> torch.Tensor:
    """A tensor's numbers, which depend on its name alone: weights about 0.02, norms about 1.

    FP8 weights use most of their range; their factors bring them back to about 0.02.
    """
    generator = torch.Generator().manual_seed(int.from_bytes(tensor.name.encode(), "little") % (1 << 63))
    if tensor.dtype == "F32":
        return torch.empty(tensor.shape).uniform_(0.5, 1.5, generator=generator) * (0.02 / FP8_SPREAD)
    values = torch.empty(tensor.shape, dtype=torch.bfloat16)
    if tensor.dtype == "F8_E4M3":
        return values.normal_(0, FP8_SPREAD, generator=generator).clamp_(-448, 448).to(torch.float8_e4m3fn)
    values.normal_(0, 0.02, generator=generator)
    return values + 1 if "norm" in tensor.name else values


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="moe")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--layers", type=int)
    size.add_argument("--size", type=parse_bytes, help="as 4GiB, to a layer; instead of --layers")
    parser.add_argument("--experts", type=int, help="of a mixture of experts")
    options = parser.parse_args()
    changes = {"num_experts": options.experts} if options.experts and options.kind == "moe" else {}
    if options.size is not None:
        changes["num_hidden_layers"] = layers_of_size(options.kind, options.size, **changes)
    elif options.layers:
        changes["num_hidden_layers"] = options.layers
    write_sample(options.directory, options.kind, **changes)


if __name__ == "__main__":
    main()
