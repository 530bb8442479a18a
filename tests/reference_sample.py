"""The sampling rule in plain Python: what csrc/sample.cpp does, number for number. For tests and for reading.

Everything is double precision without fused operations, so both give the same token; weights for top-p are integers,
so their sum doesn't depend on order. Noise: Gumbel (-log(-log u)), u = (bits + 1/2) / 2^32 with the bits of
Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
"""

from __future__ import annotations

import math
from collections import Counter

from headrace.kernels.device import F32
from headrace.kernels.draw import NOT_FINITE, NOTHING_ALLOWED, Draw, Drawn

_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10
_ROUND = 6755399441055744.0  # 1.5 * 2^52
_INVERSE = [1.0 / math.factorial(k) for k in range(14)]


def exp64(x: float) -> float:
    """As csrc/scalar_math.cpp: ln 2 taken off in two parts, then Taylor."""
    if not x < 709.0:
        return x if x != x else math.inf
    if x < -708.0:
        return 0.0
    n = (x * 1.4426950408889634 + _ROUND) - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    s = _INVERSE[13]
    for k in range(12, -1, -1):
        s = s * r + _INVERSE[k]
    return s * math.ldexp(1.0, int(n))


def log64(x: float) -> float:
    """x > 0. As csrc/scalar_math.cpp: 2 artanh((m - 1) / (m + 1)) of the mantissa, plus the exponent."""
    m, e = math.frexp(x)
    m, e = m * 2.0, e - 1
    if m > 1.4142135623730951:
        m, e = m * 0.5, e + 1
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    p = 0.0
    for k in range(23, 2, -2):
        p = (p + 1.0 / k) * z
    return e * _LN2_HIGH + (2.0 * (s + s * p) + e * _LN2_LOW)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words of Philox4x32-10."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & 0xFFFFFFFF, a >> 32 ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(draw: Draw, token: int) -> float:
    """The noise of one token: key (seed), counter (token / 4, choice, position, 0), word token % 4."""
    words = philox((token >> 2, draw.choice, draw.position, 0), (draw.seed & 0xFFFFFFFF, draw.seed >> 32))
    return -log64(-log64((words[token & 3] + 0.5) * (1.0 / 4294967296.0)))


def sample(logits: F32, draw: Draw) -> Drawn:
    """One row of logits [vocab] -> token, its log-probability, the most likely ones."""
    raw = [float(v) for v in logits]
    if not all(math.isfinite(v) for v in raw):
        return Drawn(NOT_FINITE, 0.0, [])
    token = _choose(raw, draw)
    if draw.logprobs == 0:
        return Drawn(token, 0.0, [])
    top = max(raw)
    lse = top + log64(float(sum(_weight(v - top) for v in raw)) * (1.0 / 1099511627776.0))
    best = sorted(range(len(raw)), key=lambda i: (-raw[i], i))[: draw.logprobs - 1]
    return Drawn(token, 0.0 if token < 0 else raw[token] - lse, [(i, raw[i] - lse) for i in best])


def _choose(raw: list[float], d: Draw) -> int:
    logit = _penalised(raw, d)
    if d.mask is not None:
        logit = {i: v for i, v in logit.items() if int(d.mask[i // 32]) >> i % 32 & 1}
    if not logit:
        return NOTHING_ALLOWED
    if d.temperature <= 0.0:
        return min(logit, key=lambda i: (-logit[i], i))
    logit = {i: v / d.temperature for i, v in logit.items()}
    order = sorted(logit, key=lambda i: (-logit[i], i))
    if d.top_k > 0:
        order = order[: d.top_k]
    if d.top_p < 1.0:
        order = _top_p(order, logit, d.top_p)
    if d.min_p > 0.0:
        order = [i for i in order if exp64(logit[i] - logit[order[0]]) >= d.min_p]
    total = {i: logit[i] + gumbel(d, i) for i in order}
    return min(total, key=lambda i: (-total[i], i))


def _penalised(raw: list[float], d: Draw) -> dict[int, float]:
    """Repetition (Keskar et al., CTRL, 2019), then frequency and presence (OpenAI's API), then bias."""
    logit = dict(enumerate(raw))
    if d.repeat_penalty != 1.0 or d.frequency_penalty != 0.0 or d.presence_penalty != 0.0:
        for i, count in Counter(d.recent.tolist()).items():
            if 0 <= i < len(raw):
                v = logit[i]
                v = v / d.repeat_penalty if v > 0.0 else v * d.repeat_penalty
                logit[i] = v - count * d.frequency_penalty - d.presence_penalty
    for i, value in d.bias:
        if 0 <= i < len(raw):
            logit[i] += value
    return logit


def _weight(below_max: float) -> int:
    """e^below_max in units of 2^-40."""
    return 0 if below_max < -28.0 else round(exp64(below_max) * 1099511627776.0)


def _top_p(order: list[int], logit: dict[int, float], top_p: float) -> list[int]:
    """The shortest prefix that carries top_p of the weight."""
    weights = [_weight(logit[i] - logit[order[0]]) for i in order]
    enough, carried = top_p * float(sum(weights)), 0
    for n, w in enumerate(weights):
        carried += w
        if float(carried) >= enough:
            return order[: n + 1]
    return order
