"""f32 to block formats with scales that keep the squared error small, where ``quantise`` takes them from the extremes.

A few grids are tried for each group of weights, from the whole range to a part of it; each is moved to where the
least squares put it for the codes that it gave, and the best is taken; squares may be weighted by column. Only
operations by element, and sums as one fixed tree: the bytes are the same on every machine, and don't depend on what is
converted beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from headrace.errors import BadFile
from headrace.formats.quant import F32, IQ4_VALUES, Bytes, quantise
from headrace.formats.tensor import BLOCKS, row_nbytes

GROUP = 32
PARTS = (1.0, 0.93, 0.87, 0.8, 0.72)
"""Of a group's range, tried for the first grid."""
STEPS = (1.0, 0.9, 0.8, -1.0, -0.9, -0.8)
"""Of the step that would put the value farthest from 0 at the end of the codes, tried for grids about 0."""
_AT_ONCE = 1 << 11
"""Groups converted at a time: what lies between stays in the cache."""
_NEAREST = np.abs(np.arange(-128, 128, dtype=np.float32)[:, None] - IQ4_VALUES).argmin(axis=1).astype(np.uint8)
"""Code of the value next to -128, -127 ... 127."""
_NEAREST_VALUE = IQ4_VALUES[_NEAREST]

# Below, ``x`` is f32 [weights of a group, groups], and so is ``w``, what an error's square is multiplied by.


def _sum(x: F32) -> F32:
    """Over a group, as a tree."""
    while len(x) > 1:
        half = len(x) // 2
        x = x[:half] + x[half:]
    total: F32 = x[0]
    return total


def _over(a: F32, b: F32) -> F32:
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a), where=b != 0)


def _f16(x: F32) -> F32:
    return x.astype(np.float16).astype(np.float32)


def _bytes16(x: F32) -> Bytes:
    """[groups] -> [groups, 2]"""
    return x.astype("<f2").view(np.uint8).reshape(-1, 2)


def _codes(x: F32, step: F32, low: F32, top: int) -> F32:
    """Of the grid low + step * (0 ... top)."""
    q: F32 = np.clip(np.rint((x - low) * _over(np.ones_like(step), step)), 0, np.float32(top))
    return q


def _affine(x: F32, w: F32, top: int, below: bool) -> tuple[F32, F32]:
    """(step, low) of the best grid found. below: low must not be over 0."""
    n, sx, sxx = _sum(w), _sum(w * x), _sum(w * x * x)
    low, high = x.min(axis=0), x.max(axis=0)
    if below:
        low = np.minimum(low, 0)
    best: tuple[F32, ...] | None = None
    for part in PARTS:
        half = (high - low) * np.float32(part / 2)
        q = _codes(x, half * np.float32(2 / top), (high + low) * np.float32(0.5) - half, top)
        wq = w * q
        sq, sqq, sqx = _sum(wq), _sum(wq * q), _sum(wq * x)
        step: F32 = np.maximum(_over(n * sqx - sq * sx, n * sqq - sq * sq), 0)
        start: F32 = _over(sx - step * sq, n)
        if below:
            over = start > 0
            step, start = np.where(over, _over(sqx, sqq), step), np.where(over, np.float32(0), start)
        lost: F32 = sxx + step * (step * sqq - 2 * sqx + 2 * start * sq) + start * (n * start - 2 * sx)
        best = _better(best, (lost, step, start))
    assert best is not None
    return best[1], best[2]


def _better(best: tuple[F32, ...] | None, other: tuple[F32, ...]) -> tuple[F32, ...]:
    """Where the first number of ``other`` is less, ``other``."""
    if best is None:
        return other
    less = other[0] < best[0]
    return tuple(np.where(less, o, b) for o, b in zip(other, best, strict=True))


def _about_zero(x: F32, w: F32, farthest: int, values: Callable[[F32], F32]) -> F32:
    """The step of the best grid about 0. farthest: its end; values: x over the step -> x on the grid, over the step."""
    far = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], 0)[0] / np.float32(farthest)
    best: tuple[F32, ...] | None = None
    for factor in STEPS:
        v = values(x * _over(np.ones_like(far), far * np.float32(factor)))
        sqq, sqx = _sum(w * v * v), _sum(w * v * x)
        step = _over(sqx, sqq)
        best = _better(best, (-step * sqx, step))
    assert best is not None
    return best[1]


def _nibbles(q: Bytes) -> Bytes:
    """[groups, 32], their lowest four bits -> [groups, 16]: the first half in the low nibbles."""
    low = q & np.uint8(15)
    high: Bytes = low[:, 16:] << np.uint8(4)
    return low[:, :16] | high


def _high(q: Bytes) -> Bytes:
    """Fifth bits of [groups, 32] as 4 bytes."""
    bits: Bytes = np.packbits(q >> 4, axis=1, bitorder="little")
    return bits


def _affine_block(bits: int) -> Callable[[F32, F32], Bytes]:
    """Q4_1, Q5_1: f16 step and low."""

    def pack(x: F32, w: F32) -> Bytes:
        step, low = map(_f16, _affine(x, w, (1 << bits) - 1, False))
        q = _codes(x, step, low, (1 << bits) - 1).T.astype(np.uint8)
        parts = [_bytes16(step), _bytes16(low), *([_high(q)] if bits == 5 else []), _nibbles(q)]
        return np.hstack(parts)

    return pack


def _iq4_nl(x: F32, w: F32) -> Bytes:
    def whole(y: F32) -> Bytes:
        q: Bytes = np.clip(np.rint(y) + 128, 0, 255).astype(np.uint8)
        return q

    step = _f16(_about_zero(x, w, -127, lambda y: _NEAREST_VALUE.take(whole(y))))
    q: Bytes = _NEAREST.take(whole(x * _over(np.ones_like(step), step))).T.astype(np.uint8)
    return np.hstack((_bytes16(step), _nibbles(q)))


def _q5_0(x: F32, w: F32) -> Bytes:
    step = _f16(_about_zero(x, w, -16, lambda y: np.clip(np.rint(y), -16, 15)))
    q = (np.clip(np.rint(x * _over(np.ones_like(step), step)), -16, 15) + 16).T.astype(np.uint8)
    return np.hstack((_bytes16(step), _high(q), _nibbles(q)))


def _k_block(bits: int) -> Callable[[F32, F32], Bytes]:
    """Q4_K, Q5_K: eight groups share an f16 of which their steps are 6-bit multiples, and one for their lows."""

    def pack(x: F32, w: F32) -> Bytes:
        step, low = (v.reshape(-1, 8) for v in _affine(x, w, (1 << bits) - 1, True))
        d, m = (_f16(v.max(axis=1, keepdims=True) / np.float32(63)) for v in (step, -low))
        scale, minimum = (
            np.clip(np.rint(v * _over(np.ones_like(u), u)), 0, 63).astype(np.uint8) for v, u in ((step, d), (-low, m))
        )
        q = _codes(x, (d * scale).reshape(-1), -(m * minimum).reshape(-1), (1 << bits) - 1)
        q8 = np.ascontiguousarray(q.T.astype(np.uint8)).reshape(-1, 8, GROUP)
        first, second = (v[:, :4] | v[:, 4:] >> 4 << 6 for v in (scale, minimum))
        mixed = scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4
        high = np.bitwise_or.reduce(q8 >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)
        low4 = (q8[:, ::2] & 15 | (q8[:, 1::2] & 15) << 4).reshape(-1, 128)
        heads = [_bytes16(d[:, 0]), _bytes16(m[:, 0]), first, second, mixed]
        return np.hstack([*heads, *([high] if bits == 5 else []), low4])

    return pack


FITTED: Mapping[str, Callable[[F32, F32], Bytes]] = {
    "Q4_1": _affine_block(4), "Q5_1": _affine_block(5), "IQ4_NL": _iq4_nl, "Q5_0": _q5_0, "Q4_K": _k_block(4),
    "Q5_K": _k_block(5),
}  # fmt: skip


def fitted(fmt: str, x: F32, weigh: F32 | None = None) -> Bytes:
    """f32 [..., k] -> file bytes [rows, row bytes]; formats that aren't fitted as ``quantise`` does it.

    weigh: [k], over 0, what the squared errors of a column are multiplied by; None: all are alike.

    BadFile for NaN or infinity; Unsupported for formats that are only read.
    """
    if fmt not in FITTED:
        return quantise(fmt, x)
    k = x.shape[-1]
    width, size = BLOCKS[fmt]
    if not np.isfinite(x).all():
        raise BadFile("The weights hold NaN or infinity, so they can't be quantised; use an undamaged model.")
    groups = np.ascontiguousarray(x, np.float32).reshape(-1, GROUP)
    weights = np.ones((k // GROUP, GROUP), np.float32) if weigh is None else weigh.reshape(-1, GROUP)
    out = np.empty((len(groups) * GROUP // width, size), np.uint8)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for i in range(0, len(groups), _AT_ONCE):
            some = np.ascontiguousarray(groups[i : i + _AT_ONCE].T)
            w = np.ascontiguousarray(weights[np.arange(i, i + some.shape[1]) % len(weights)].T)
            at = i * GROUP // width
            out[at : at + some.shape[1] * GROUP // width] = FITTED[fmt](some, w)
    return out.reshape(-1, row_nbytes(fmt, k))
