"""The OPT models of FlexGen's tables, as the planner sees a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headrace.errors import Unsupported
from headrace.plan.sizes import LayerCost, ModelCost

OPT_SIZES: Mapping[str, tuple[int, int, int]] = {
    "125m": (12, 768, 12), "1.3b": (24, 2048, 32), "2.7b": (32, 2560, 32), "6.7b": (32, 4096, 32),
    "13b": (40, 5120, 40), "30b": (48, 7168, 56), "66b": (64, 9216, 72), "175b": (96, 12288, 96),
}  # fmt: skip
"""Layers, width, heads of OPT (Zhang et al. 2022, table 1); FFN 4 x width, vocabulary 50272, tied table."""


def opt(size: str, bits: float = 16.0) -> ModelCost:
    """OPT of a public size, every matrix stored in ``bits`` a weight (4.5: 4 bits, f16 scale and minimum of 64)."""
    if size not in OPT_SIZES:
        raise Unsupported(f"no OPT of size {size!r}; known: {', '.join(OPT_SIZES)}.")
    count, h, heads = OPT_SIZES[size]
    vocab, scale = 50272, bits / 8
    matrices = (h * h,) * 4 + (4 * h * h,) * 2
    block = LayerCost("block", "block", round(sum(matrices) * scale), sum(matrices), 11 * h, h, heads, h // heads,
                      matrices=matrices)  # fmt: skip
    blocks = tuple(replace(block, key=f"block.{i}") for i in range(count))
    embed = LayerCost("embed", "embed", round(2050 * h * scale), 0, 2 * h)
    output = LayerCost("output", "output", round(vocab * h * scale), vocab * h, 2 * h + vocab)
    return ModelCost(f"opt-{size}", (embed, *blocks, output), h, vocab, tied=True)
