"""Block formats in NumPy: bytes to f32 for all types we know, f32 to bytes for a few.

Not on a row's path: the reference device, ``inspect``, requantising and tests use it. The layouts are those of
ggml (ggml-common.h, struct block_*); the products are taken in the order of its reference code, in f32, so that
values are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace.errors import BadFile, Unsupported
from headrace.formats.tensor import BLOCKS, row_nbytes

Bytes: TypeAlias = NDArray[np.uint8]
F32: TypeAlias = NDArray[np.float32]

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The codebook of IQ4_NL and IQ4_XS (ggml-common.h, kvalues_iq4nl)."""

_AT_ONCE = 1 << 20
"""Weights expanded at a time, so that what lies between stays in a few MB."""


class NumPy:
    """What the formats ask of an array library; ``kernels/torch_formats.py`` has the same in PyTorch."""

    def f16(self, b: Bytes) -> F32:
        """Two columns of bytes to one of f32."""
        return np.ascontiguousarray(b).view("<f2").astype(np.float32)

    def bf16(self, b: Bytes) -> F32:
        return (b.view("<u2").astype(np.uint32) << 16).view(np.float32)

    def f32(self, b: Bytes) -> F32:
        return b.view("<f4").astype(np.float32, copy=False)

    def unsigned(self, b: Bytes) -> F32:
        """The bytes' values."""
        return b.astype(np.float32)

    def signed(self, b: Bytes) -> F32:
        return b.view(np.int8).astype(np.float32)

    def shifts(self, step: int, like: Bytes) -> Bytes:
        """0, step, 2 * step ... below 8."""
        return np.arange(0, 8, step, dtype=np.uint8)

    def side_by_side(self, parts: Sequence[Bytes]) -> Bytes:
        return np.hstack(parts)

    def iq4(self, q: Bytes) -> F32:
        return IQ4_VALUES[q]


# Below, ``x`` is the array library and ``b`` the blocks, uint8 [blocks, block bytes].


def _fields(x: Any, b: Any, bits: int, run: int) -> Any:
    """Bit fields by planes: each run of ``run`` bytes holds 8/bits values a byte, lowest bits first as one plane."""
    planes = (b.reshape(len(b), -1, 1, run) >> x.shifts(bits, b)[:, None]) & ((1 << bits) - 1)
    return planes.reshape(len(b), -1)


def _in_order(x: Any, b: Any, bits: int) -> Any:
    """Bit fields byte after byte, lowest bits first."""
    return ((b[:, :, None] >> x.shifts(bits, b)) & ((1 << bits) - 1)).reshape(len(b), -1)


def _q4_0(x: Any, b: Any) -> Any:
    return x.f16(b[:, :2]) * (x.unsigned(_fields(x, b[:, 2:], 4, 16)) - 8)


def _q4_1(x: Any, b: Any) -> Any:
    return x.f16(b[:, :2]) * x.unsigned(_fields(x, b[:, 4:], 4, 16)) + x.f16(b[:, 2:4])


def _q5_0(x: Any, b: Any) -> Any:
    q = _fields(x, b[:, 6:], 4, 16) | (_in_order(x, b[:, 2:6], 1) << 4)
    return x.f16(b[:, :2]) * (x.unsigned(q) - 16)


def _q5_1(x: Any, b: Any) -> Any:
    q = _fields(x, b[:, 8:], 4, 16) | (_in_order(x, b[:, 4:8], 1) << 4)
    return x.f16(b[:, :2]) * x.unsigned(q) + x.f16(b[:, 2:4])


def _q8_0(x: Any, b: Any) -> Any:
    return x.f16(b[:, :2]) * x.signed(b[:, 2:])


def _grouped(q: Any, scale: Any, minimum: Any = None) -> Any:
    """scale * q - minimum, where the scales are [blocks, groups] and a block's q are its groups' side by side."""
    y = q.reshape(*scale.shape, -1) * scale[:, :, None]
    if minimum is not None:
        y -= minimum[:, :, None]
    return y.reshape(len(q), -1)


def _q2_k(x: Any, b: Any) -> Any:
    d, dmin, sub = x.f16(b[:, 80:82]), x.f16(b[:, 82:84]), b[:, :16]
    scale, minimum = d * x.unsigned(sub & 15), dmin * x.unsigned(sub >> 4)
    return _grouped(x.unsigned(_fields(x, b[:, 16:80], 2, 32)), scale, minimum)


def _q3_k(x: Any, b: Any) -> Any:
    low = _fields(x, b[:, 96:104], 4, 8)  # 16 sub-scales: 4 low bits in 8 bytes, then 2 high bits in 4
    sub = x.unsigned(low | (_fields(x, b[:, 104:108], 2, 4) << 4)) - 32
    q = x.unsigned(_fields(x, b[:, 32:96], 2, 32) | (_fields(x, b[:, :32], 1, 32) << 2)) - 4
    return _grouped(q, x.f16(b[:, 108:110]) * sub)


def _k_grouped(x: Any, b: Any, q: Any) -> Any:
    """Q4_K and Q5_K: f16 d and dmin, and twelve bytes of eight 6-bit scales and eight 6-bit minima."""
    first, second, mixed = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scale = x.side_by_side((first & 63, (mixed & 15) | ((first >> 6) << 4)))
    minimum = x.side_by_side((second & 63, (mixed >> 4) | ((second >> 6) << 4)))
    return _grouped(x.unsigned(q), x.f16(b[:, :2]) * x.unsigned(scale), x.f16(b[:, 2:4]) * x.unsigned(minimum))


def _q4_k(x: Any, b: Any) -> Any:
    return _k_grouped(x, b, _fields(x, b[:, 16:], 4, 32))


def _q5_k(x: Any, b: Any) -> Any:
    return _k_grouped(x, b, _fields(x, b[:, 48:], 4, 32) | (_fields(x, b[:, 16:48], 1, 32) << 4))


def _q6_k(x: Any, b: Any) -> Any:
    q = x.unsigned(_fields(x, b[:, :128], 4, 64) | (_fields(x, b[:, 128:192], 2, 32) << 4)) - 32
    return _grouped(q, x.f16(b[:, 208:210]) * x.signed(b[:, 192:208]))


def _iq4_nl(x: Any, b: Any) -> Any:
    return x.f16(b[:, :2]) * x.iq4(_fields(x, b[:, 2:], 4, 16))


def _iq4_xs(x: Any, b: Any) -> Any:
    # Of each of eight sub-scales two high bits in two bytes of four fields, four low bits in four bytes of two.
    sub = x.unsigned(_in_order(x, b[:, 4:8], 4) | (_in_order(x, b[:, 2:4], 2) << 4)) - 32
    return _grouped(x.iq4(_fields(x, b[:, 8:], 4, 16)), x.f16(b[:, :2]) * sub)


EXPAND: Mapping[str, Callable[[Any, Any], Any]] = {
    "F32": lambda x, b: x.f32(b), "F16": lambda x, b: x.f16(b), "BF16": lambda x, b: x.bf16(b), "Q4_0": _q4_0,
    "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k,
    "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
}  # fmt: skip
"""Format -> (array library, blocks) -> f32 [blocks, weights a block]."""


def dequantise(fmt: str, raw: Bytes, n: int, k: int) -> F32:
    """File bytes of n rows of k values -> f32 [n, k]. Unsupported for a type that isn't in the table."""
    if fmt not in EXPAND:
        raise Unsupported(f"The tensor type {fmt} can't be expanded; types we know: {', '.join(EXPAND)}.")
    width, size = BLOCKS[fmt]
    if raw.size != n * row_nbytes(fmt, k):
        raise ValueError(f"{raw.size} bytes given for {n} x {k} of {fmt}")
    blocks = np.ascontiguousarray(raw, np.uint8).reshape(-1, size)
    out = np.empty((len(blocks), width), np.float32)
    step = _AT_ONCE // width
    with np.errstate(all="ignore"):  # a file may hold infinite scales: its values are what they are
        for i in range(0, len(blocks), step):
            out[i : i + step] = EXPAND[fmt](NumPy(), blocks[i : i + step])
    return out.reshape(n, k)


def _to_f32(x: F32) -> Bytes:
    return x.astype("<f4").view(np.uint8)


def _to_f16(x: F32) -> Bytes:
    return x.astype("<f2").view(np.uint8)


def _to_bf16(x: F32) -> Bytes:
    """Round to nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & 1))) >> 16).astype("<u2").view(np.uint8)


def _nibbles(q: F32) -> Bytes:
    """[blocks, 32] values 0..16 -> 16 bytes a block: the first half in the low nibbles, the second in the high."""
    u: Bytes = np.minimum(q.astype(np.uint8), 15)
    low, high = u[:, :16], u[:, 16:] << np.uint8(4)
    return low | high


def _inverse(d: F32) -> F32:
    return np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)


def _to_q4_0(x: F32) -> Bytes:
    """The value farthest from 0 becomes -8."""
    far = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), 1)
    d = far / np.float32(-8)
    return np.hstack((_to_f16(d), _nibbles(x * _inverse(d) + np.float32(8.5))))


def _to_q4_1(x: F32) -> Bytes:
    low = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - low) / np.float32(15)
    return np.hstack((_to_f16(d), _to_f16(low), _nibbles((x - low) * _inverse(d) + np.float32(0.5))))


def _to_q8_0(x: F32) -> Bytes:
    """Rounded half away from zero."""
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    y = x * _inverse(d)
    size = np.abs(y)
    whole = np.floor(size)
    q = np.copysign(whole + (size - whole >= np.float32(0.5)), y)
    return np.hstack((_to_f16(d), q.astype(np.int8).view(np.uint8)))


_SHRINK: dict[str, Callable[[F32], Bytes]] = {
    "F32": _to_f32, "F16": _to_f16, "BF16": _to_bf16, "Q4_0": _to_q4_0, "Q4_1": _to_q4_1, "Q8_0": _to_q8_0,
}  # fmt: skip


def quantise(fmt: str, x: F32) -> Bytes:
    """f32 [..., k] -> file bytes [rows, row bytes], rounded as ggml's reference code does.

    Unsupported for types that we only read; BadFile for NaN or infinity, which no block can hold.
    """
    if fmt not in _SHRINK:
        raise Unsupported(f"Tensors can't be written as {fmt}; choose one of {', '.join(_SHRINK)}.")
    k = x.shape[-1]
    width, size = BLOCKS[fmt]
    blocks = np.ascontiguousarray(x, np.float32).reshape(-1, width)
    if not np.isfinite(blocks).all():
        raise BadFile("The weights hold NaN or infinity, so they can't be quantised; use an undamaged model.")
    out = np.empty((len(blocks), size), np.uint8)
    step = _AT_ONCE // width
    with np.errstate(over="ignore"):
        for i in range(0, len(blocks), step):
            out[i : i + step] = _SHRINK[fmt](blocks[i : i + step])
    return out.reshape(-1, row_nbytes(fmt, k))
