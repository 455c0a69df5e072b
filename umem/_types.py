"""The stored data types, and sizes and times as people write them.

`DType` is umem's own table, because storage and planning work without torch. It covers every dtype of the safetensors
format (0.8) and complex128, which torch files can hold. Numerics (rounding, ranges) are not here.
"""

from __future__ import annotations

import re
from enum import Enum

from umem.errors import SettingsError

__all__ = ["DType", "format_bytes", "parse_bytes", "parse_seconds"]


class DType(Enum):
    """A stored data type: (safetensors name, bits an element, torch name or None, kind).

    Kind is one of `float` (safe to cast to other floats), `coded` (floats of 8 bits and fewer: numbers only together
    with a scale), `int`, `bool`, `complex`. `itemsize` is bytes of one storage item: an element, or a whole byte where
    elements are smaller than one.
    """

    F64 = ("F64", 64, "float64", "float")
    F32 = ("F32", 32, "float32", "float")
    F16 = ("F16", 16, "float16", "float")
    BF16 = ("BF16", 16, "bfloat16", "float")
    F8_E4M3 = ("F8_E4M3", 8, "float8_e4m3fn", "coded")
    F8_E5M2 = ("F8_E5M2", 8, "float8_e5m2", "coded")
    F8_E8M0 = ("F8_E8M0", 8, "float8_e8m0fnu", "coded")
    F8_E4M3FNUZ = ("F8_E4M3FNUZ", 8, "float8_e4m3fnuz", "coded")
    F8_E5M2FNUZ = ("F8_E5M2FNUZ", 8, "float8_e5m2fnuz", "coded")
    F6_E2M3 = ("F6_E2M3", 6, None, "coded")
    F6_E3M2 = ("F6_E3M2", 6, None, "coded")
    F4 = ("F4", 4, "float4_e2m1fn_x2", "coded")
    I64 = ("I64", 64, "int64", "int")
    I32 = ("I32", 32, "int32", "int")
    I16 = ("I16", 16, "int16", "int")
    I8 = ("I8", 8, "int8", "int")
    U64 = ("U64", 64, "uint64", "int")
    U32 = ("U32", 32, "uint32", "int")
    U16 = ("U16", 16, "uint16", "int")
    U8 = ("U8", 8, "uint8", "int")
    BOOL = ("BOOL", 8, "bool", "bool")
    C64 = ("C64", 64, "complex64", "complex")
    C128 = ("C128", 128, "complex128", "complex")

    def __init__(self, label: str, bits: int, torch_name: str | None, kind: str) -> None:
        self.label = label
        self.bits = bits
        self.torch_name = torch_name
        self.kind = kind
        self.itemsize = max(1, bits // 8)

    def storage_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape in storage items: F4 packs two elements of the last dimension a byte, F6 becomes plain bytes."""
        if self.bits >= 8:
            return shape
        if self.bits == 4 and shape and shape[-1] % 2 == 0:
            return (*shape[:-1], shape[-1] // 2)
        count = 1
        for size in shape:
            count *= size
        return (count * self.bits // 8,)

    @classmethod
    def from_torch(cls, dtype: object) -> DType:
        """The table's row of a torch dtype, given as the dtype itself or its name; `SettingsError` if there is none."""
        name = str(dtype).removeprefix("torch.")
        try:
            return _BY_TORCH_NAME[name]
        except KeyError:
            known = ", ".join(sorted(_BY_TORCH_NAME))
            raise SettingsError(f"{dtype} is no dtype that a checkpoint can hold; known: {known}") from None


_BY_TORCH_NAME = {dtype.torch_name: dtype for dtype in DType if dtype.torch_name is not None}

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?\s*$", re.IGNORECASE)
_SECONDS = {"": 1, "ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600}
_TIME = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|min|m|h)?\s*$", re.IGNORECASE)


def format_bytes(count: float | None) -> str:
    """Bytes for people, in binary units: `1.50 GiB`; an unknown size is `?`."""
    if count is None:
        return "?"
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def parse_bytes(text: str | int) -> int:
    """Bytes from `20GiB`, `512 MB`, `1.5T` or a plain number; every unit is binary. `SettingsError` if it is none."""
    if isinstance(text, int):
        return text
    match = _SIZE.match(text)
    if match is None:
        raise SettingsError(f"{text!r} is no size in bytes; write it like 20GiB, 512MiB or 1073741824")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_seconds(text: str | float) -> float:
    """Seconds from `60s`, `2min`, `1.5h` or a plain number of seconds; `SettingsError` if it is none."""
    if isinstance(text, int | float):
        return float(text)
    match = _TIME.match(text)
    if match is None:
        raise SettingsError(f"{text!r} is no time; write it like 60s, 5min or 90")
    return float(match[1]) * _SECONDS[(match[2] or "").lower()]
