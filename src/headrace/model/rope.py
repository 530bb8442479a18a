"""Rotary frequencies, the same bits on every machine: decimal arithmetic, rounded to f32 at the end.

libm's ``pow`` differs between systems; ``decimal`` is exact integer arithmetic with a stated precision.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal, localcontext
from functools import lru_cache

from headrace.model.spec import RopeSpec

_CONTEXT = Context(prec=40)
_PI = Decimal("3.14159265358979323846264338327950288419717")


def f32(value: Decimal | float) -> float:
    """The f32 nearest to value, as a float."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", float(value)))
    return float(rounded)


@lru_cache(maxsize=64)
def inv_freq(rope: RopeSpec) -> tuple[float, ...]:
    """``rope.dim / 2`` frequencies in radians a position, each an f32 value."""
    with localcontext(_CONTEXT):
        base = Decimal(rope.base)
        plain = [1 / base ** (Decimal(2 * i) / rope.dim) for i in range(rope.dim // 2)]
        scaled = _SCALE[rope.scaling](rope, plain)
        if rope.divisors:
            scaled = [f / Decimal(d) for f, d in zip(scaled, rope.divisors, strict=True)]
        return tuple(f32(f) for f in scaled)


@lru_cache(maxsize=64)
def magnitude(rope: RopeSpec) -> float:
    """What cos and sin are multiplied by: YaRN's (arXiv 2309.00071, eq. 22), else 1."""
    if rope.magnitude is not None:
        return f32(rope.magnitude)
    if rope.scaling != "yarn" or rope.factor <= 1.0:
        return 1.0
    with localcontext(_CONTEXT):
        return f32(Decimal(rope.factor).ln() / 10 + 1)


def _llama3(rope: RopeSpec, plain: list[Decimal]) -> list[Decimal]:
    """Llama 3.1: long wavelengths slowed by factor, short ones kept, a ramp in between."""
    factor, low, high = Decimal(rope.factor), Decimal(rope.low), Decimal(rope.high)
    out = []
    for f in plain:
        turns = rope.original * f / (2 * _PI)  # within the original context
        smooth = min(max((turns - low) / (high - low), Decimal(0)), Decimal(1))
        out.append((1 - smooth) * f / factor + smooth * f)
    return out


def _yarn(rope: RopeSpec, plain: list[Decimal]) -> list[Decimal]:
    """YaRN (arXiv 2309.00071, section 3.2): by how often a dimension turns within the original context."""

    def dimension(turns: float) -> Decimal:
        return rope.dim * (rope.original / (Decimal(turns) * 2 * _PI)).ln() / (2 * Decimal(rope.base).ln())

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = low.to_integral_value(ROUND_FLOOR), high.to_integral_value(ROUND_CEILING)
    low, high = max(low, Decimal(0)), min(high, Decimal(rope.dim - 1))
    span = high - low if high != low else Decimal("0.001")
    out = []
    for i, f in enumerate(plain):
        slowed = min(max((i - low) / span, Decimal(0)), Decimal(1))
        out.append(slowed * f / Decimal(rope.factor) + (1 - slowed) * f)
    return out


_SCALE: Mapping[str, Callable[[RopeSpec, list[Decimal]], list[Decimal]]] = {
    "none": lambda rope, plain: plain, "linear": lambda rope, plain: [f / Decimal(rope.factor) for f in plain],
    "llama3": _llama3, "yarn": _yarn,
}  # fmt: skip
