"""What of the library's dequantizers is left as it is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.writers import same_numbers
from umem.adapters.hosts.transformers.quantized import take_declared_blocks

QUANTIZER = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float4_e2m1fn_x2], ids=str)
def test_packed_numbers_in_smaller_blocks(dtype: torch.dtype) -> None:
    """Experts of two FP4 numbers a byte have a scale for each 32 of them, whatever the config declares for FP8."""
    packed = torch.randint(0, 256, (64, 32), dtype=torch.uint8).view(dtype)
    scales = torch.rand(64, 2) + 0.5
    operation = Fp8Dequantize(QUANTIZER)
    expected = operation._dequantize_one(packed, scales, output_dtype=torch.bfloat16)
    take_declared_blocks([operation])
    assert same_numbers(operation._dequantize_one(packed, scales, output_dtype=torch.bfloat16), expected)
    assert expected.shape == (64, 64)


def test_scales_stored_as_bare_exponents() -> None:
    weight = torch.randn(128, 128).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[130]], dtype=torch.uint8)
    operation = Fp8Dequantize(QUANTIZER)
    take_declared_blocks([operation])
    given = operation._dequantize_one(weight, exponents, output_dtype=torch.float32)
    assert same_numbers(given, weight.float() * 8)
