"""Block formats in PyTorch: a tensor's file bytes to f32 on any device, equal bit for bit to formats/quant.py.

Layouts are ggml's (ggml-common.h, struct block_*). Each function takes blocks, uint8 [blocks, block bytes].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from headrace.formats.quant import IQ4_VALUES
from headrace.formats.tensor import BLOCKS, row_nbytes

Tensor: TypeAlias = Any


def f16(b: Tensor) -> Tensor:
    """Two columns of bytes to one of f32."""
    return b.contiguous().view(torch.float16).float()


def _fields(b: Tensor, bits: int, run: int) -> Tensor:
    """Bit fields by planes: each run of ``run`` bytes holds 8/bits values a byte, lowest bits first as one plane."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=b.device)[:, None]
    planes = (b.reshape(len(b), -1, 1, run) >> shifts) & ((1 << bits) - 1)
    return planes.reshape(len(b), -1)


def _high(b: Tensor) -> Tensor:
    """The fifth bit of 32 weights (Q5_0, Q5_1: a 32-bit number a block) in place 4."""
    shifts = torch.arange(8, dtype=torch.uint8, device=b.device)
    return ((b[:, :, None] >> shifts) & 1).reshape(len(b), 32) << 4


def _q4_0(b: Tensor) -> Tensor:
    return f16(b[:, :2]) * (_fields(b[:, 2:], 4, 16).float() - 8)


def _q4_1(b: Tensor) -> Tensor:
    return f16(b[:, :2]) * _fields(b[:, 4:], 4, 16).float() + f16(b[:, 2:4])


def _q5_0(b: Tensor) -> Tensor:
    q = _fields(b[:, 6:], 4, 16) | _high(b[:, 2:6])
    return f16(b[:, :2]) * (q.float() - 16)


def _q5_1(b: Tensor) -> Tensor:
    q = _fields(b[:, 8:], 4, 16) | _high(b[:, 4:8])
    return f16(b[:, :2]) * q.float() + f16(b[:, 2:4])


def _q8_0(b: Tensor) -> Tensor:
    return f16(b[:, :2]) * b[:, 2:].contiguous().view(torch.int8).float()


def _grouped(q: Tensor, scale: Tensor, minimum: Tensor | None = None) -> Tensor:
    """scale * q - minimum, where the scales are [blocks, groups] and a block's q are its groups' side by side."""
    y = q.reshape(*scale.shape, -1) * scale[:, :, None]
    if minimum is not None:
        y = y - minimum[:, :, None]
    return y.reshape(len(q), -1)


def _q2_k(b: Tensor) -> Tensor:
    d, dmin, sub = f16(b[:, 80:82]), f16(b[:, 82:84]), b[:, :16]
    return _grouped(_fields(b[:, 16:80], 2, 32).float(), d * (sub & 15).float(), dmin * (sub >> 4).float())


def _q3_k(b: Tensor) -> Tensor:
    low = _fields(b[:, 96:104], 4, 8)  # 16 sub-scales: 4 low bits in 8 bytes, then 2 high bits in 4
    sub = (low | (_fields(b[:, 104:108], 2, 4) << 4)).float() - 32
    q = (_fields(b[:, 32:96], 2, 32) | (_fields(b[:, :32], 1, 32) << 2)).float() - 4
    return _grouped(q, f16(b[:, 108:110]) * sub)


def _k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Q4_K's and Q5_K's twelve bytes: eight 6-bit scales and eight 6-bit minima -> two of [blocks, 8]."""
    first, second, mixed = b[:, :4], b[:, 4:8], b[:, 8:12]
    scale = torch.cat((first & 63, (mixed & 15) | ((first >> 6) << 4)), 1)
    minimum = torch.cat((second & 63, (mixed >> 4) | ((second >> 6) << 4)), 1)
    return scale.float(), minimum.float()


def _q4_k(b: Tensor) -> Tensor:
    scale, minimum = _k_scales(b[:, 4:16])
    return _grouped(_fields(b[:, 16:], 4, 32).float(), f16(b[:, :2]) * scale, f16(b[:, 2:4]) * minimum)


def _q5_k(b: Tensor) -> Tensor:
    scale, minimum = _k_scales(b[:, 4:16])
    q = _fields(b[:, 48:], 4, 32) | (_fields(b[:, 16:48], 1, 32) << 4)
    return _grouped(q.float(), f16(b[:, :2]) * scale, f16(b[:, 2:4]) * minimum)


def _q6_k(b: Tensor) -> Tensor:
    q = (_fields(b[:, :128], 4, 64) | (_fields(b[:, 128:192], 2, 32) << 4)).float() - 32
    return _grouped(q, f16(b[:, 208:210]) * b[:, 192:208].contiguous().view(torch.int8).float())


def _iq4(q: Tensor) -> Tensor:
    return torch.from_numpy(IQ4_VALUES).to(q.device)[q.int()]


def _iq4_nl(b: Tensor) -> Tensor:
    return f16(b[:, :2]) * _iq4(_fields(b[:, 2:], 4, 16))


def _iq4_xs(b: Tensor) -> Tensor:
    # Two high bits of each of eight sub-scales in a 16-bit number, two bytes of four fields each.
    high = _fields(b[:, 2:4].reshape(-1, 1), 2, 1).reshape(len(b), 8)
    low = torch.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), 2).reshape(len(b), 8)
    return _grouped(_iq4(_fields(b[:, 8:], 4, 16)), f16(b[:, :2]) * ((low | (high << 4)).float() - 32))


def _f32(b: Tensor) -> Tensor:
    return b.view(torch.float32)


def _bf16(b: Tensor) -> Tensor:
    return b.view(torch.bfloat16).float()


_EXPAND: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32, "F16": f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
    "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}  # fmt: skip

FORMATS = tuple(_EXPAND)


def expand(fmt: str, raw: Tensor, k: int) -> Tensor:
    """File bytes of whole rows of k values, uint8 [bytes], on a device -> f32 [rows, k] there."""
    return _EXPAND[fmt](raw.reshape(-1, BLOCKS[fmt][1])).reshape(-1, k)


def nbytes(fmt: str, n: int, k: int) -> int:
    """Bytes of a [n, k] tensor in file order."""
    return n * row_nbytes(fmt, k)


def expanding_nbytes(fmt: str, weights: int) -> int:
    """The most bytes ``expand`` holds at a time for so many weights, its result included: measured by a test."""
    return weights * {"F32": 4, "F16": 6, "BF16": 4}.get(fmt, 14)
