"""Block formats in PyTorch: a tensor's file bytes to f32 on any device, equal bit for bit to formats/quant.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from headrace.formats.quant import EXPAND, IQ4_VALUES
from headrace.formats.tensor import BLOCKS, row_nbytes

Tensor: TypeAlias = Any


class Torch:
    """As ``formats.quant.NumPy``."""

    def f16(self, b: Tensor) -> Tensor:
        return b.contiguous().view(torch.float16).float()

    def bf16(self, b: Tensor) -> Tensor:
        return b.view(torch.bfloat16).float()

    def f32(self, b: Tensor) -> Tensor:
        return b.view(torch.float32)

    def unsigned(self, b: Tensor) -> Tensor:
        return b.float()

    def signed(self, b: Tensor) -> Tensor:
        return b.contiguous().view(torch.int8).float()

    def shifts(self, step: int, like: Tensor) -> Tensor:
        return torch.arange(0, 8, step, dtype=torch.uint8, device=like.device)

    def side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts), 1)

    def iq4(self, q: Tensor) -> Tensor:
        return torch.from_numpy(IQ4_VALUES).to(q.device)[q.int()]


def expand(fmt: str, raw: Tensor, k: int) -> Tensor:
    """File bytes of whole rows of k values, uint8 [bytes], on a device -> f32 [rows, k] there."""
    return EXPAND[fmt](Torch(), raw.reshape(-1, BLOCKS[fmt][1])).reshape(-1, k)


def nbytes(fmt: str, n: int, k: int) -> int:
    """Bytes of a [n, k] tensor in file order."""
    return n * row_nbytes(fmt, k)


def expanding_nbytes(fmt: str, weights: int) -> int:
    """The most bytes ``expand`` holds at a time for so many weights, its result included: measured by a test."""
    return weights * {"F32": 4, "F16": 6, "BF16": 4}.get(fmt, 14)
