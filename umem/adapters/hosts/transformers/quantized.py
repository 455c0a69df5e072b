"""The library's own dequantizers, made to take block sizes as the checkpoint declares them.

The library tells the size of a block from the numbers of rows and of scales: it refuses a matrix whose last block is
cut short, or takes its blocks for smaller ones. Where the config declares a size, that holds here.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from umem.adapters.precision import dequantized

__all__ = ["take_declared_blocks"]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def take_declared_blocks(operations: Iterable[Any]) -> None:
    """Have those of the operations that dequantize FP8 blocks use the size that their config declares."""
    for operation in operations:
        config = getattr(getattr(operation, "hf_quantizer", None), "quantization_config", None)
        block = getattr(config, "weight_block_size", None)
        if block is not None and type(operation).__name__ == "Fp8Dequantize":
            operation._dequantize_one = partial(_dequantize, operation._dequantize_one, tuple(block))


def _dequantize(
    undeclared: Any,
    block: tuple[int, int],
    quantized: torch.Tensor,
    scales: torch.Tensor,
    output_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`Fp8Dequantize._dequantize_one`; formats other than FP8 with floating-point scales are left to it."""
    if quantized.dtype not in _FP8 or not scales.is_floating_point():
        result: torch.Tensor = undeclared(quantized, scales, output_dtype=output_dtype)
        return result
    usual = scales.dtype if scales.element_size() >= 2 else torch.bfloat16
    return dequantized(quantized, scales, block, output_dtype or usual)
