"""Our own exp, log, sin, cos, tanh, erf: accuracy in ulps, special values, the same bits on every path."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from headrace.kernels import _native
from headrace.kernels.cpu import CpuDevice

EXP, TANH, ERF = 0, 1, 2
PATHS = ["portable", "avx2"]
"""AVX-512's are those of AVX2."""


def device(path: str) -> CpuDevice:
    try:
        return CpuDevice(1, path)
    except ValueError:
        pytest.skip(f"this CPU has no {path}")


def apply(path: str, which: int, x: NDArray[np.float32]) -> NDArray[np.float32]:
    y = x.copy()
    device(path)._native.math(which, y)
    return y


def ulps(got: NDArray[np.float32], want: NDArray[np.float64]) -> float:
    """Largest error in units of the last place of the exact value as f32."""
    size = np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)
    return float((np.abs(got.astype(np.float64) - want) / size).max())


def sample(low: float, high: float, count: int = 200_003) -> NDArray[np.float32]:
    rng = np.random.default_rng(1)
    return np.concatenate([np.linspace(low, high, count), rng.normal(0, 1, count)]).astype(np.float32)


@pytest.mark.parametrize("path", PATHS)
def test_accuracy_of_single_precision_functions(path: str) -> None:
    x = sample(-87, 88)
    assert ulps(apply(path, EXP, x), np.exp(x.astype(np.float64))) < 1.01
    x = sample(-12, 12)
    assert ulps(apply(path, TANH, x), np.tanh(x.astype(np.float64))) < 1.6
    exact = np.array([math.erf(v) for v in x[::7].tolist()])
    assert ulps(apply(path, ERF, x[::7]), exact) < 2.5


@pytest.mark.parametrize("path", PATHS)
def test_special_values(path: str) -> None:
    inf, nan = np.float32(np.inf), np.float32(np.nan)
    x = np.array([0.0, -0.0, 200.0, -200.0, inf, -inf, nan, -103.0, 1e-30], np.float32)
    exp = apply(path, EXP, x)
    assert exp[0] == 1 and exp[1] == 1 and exp[2] == inf and exp[3] == 0 and exp[4] == inf and exp[5] == 0
    assert np.isnan(exp[6]) and exp[7] > 0 and exp[8] == 1
    tanh, erf = apply(path, TANH, x), apply(path, ERF, x)
    for y in (tanh, erf):
        assert y[0] == 0 and y[1] == 0 and y[2] == 1 and y[3] == -1 and y[4] == 1 and y[5] == -1 and np.isnan(y[6])
    assert tanh[8] == np.float32(1e-30)


def test_paths_give_the_same_bits() -> None:
    device("avx2")
    bits = np.random.default_rng(2).integers(0, 2**32, 300_000, dtype=np.uint32)
    x = np.concatenate([bits.view(np.float32), sample(-110, 110, 50_000)])
    x = x[~np.isnan(x)]
    for which in (EXP, TANH, ERF):
        assert apply("avx2", which, x).tobytes() == apply("portable", which, x).tobytes()


def test_tail_of_an_array_is_like_its_middle() -> None:
    x = sample(-5, 5, 40)
    whole = apply("portable", TANH, x)
    for n in range(1, 24):
        assert apply("portable", TANH, x[:n].copy()).tobytes() == whole[:n].tobytes()


def test_double_precision_exp_and_log() -> None:
    rng = np.random.default_rng(3)
    for x in [*rng.uniform(-700, 700, 3000), *rng.normal(0, 1e-3, 1000), 0.0, -707.9, 708.9]:
        assert _native.exp64(float(x)) == pytest.approx(math.exp(x), rel=4e-16)
    assert _native.exp64(-800.0) == 0.0 and _native.exp64(800.0) == math.inf and math.isnan(_native.exp64(math.nan))
    for x in [
        *rng.uniform(0, 1, 3000),
        *rng.uniform(0.9, 1.1, 2000),
        *np.exp(rng.uniform(-700, 700, 2000)),
        5e-324,
        1.0,
    ]:
        assert _native.log64(float(x)) == pytest.approx(math.log(x), rel=4e-16, abs=1e-320)
    assert _native.log64(1.0) == 0.0


def test_sine_and_cosine_of_large_angles() -> None:
    """Positions to a million; the error must vanish when rounded to f32."""
    two_pi = Fraction("6.283185307179586476925286766559005768394338798750211641949889")
    rng = np.random.default_rng(4)
    for x in [*rng.uniform(-10, 10, 2000), *rng.uniform(0, 1e6, 2000), *map(float, range(0, 1_000_000, 9973)), 0.0]:
        reduced = float(Fraction(float(x)) % two_pi)
        s, c = _native.sincos64(float(x))
        assert abs(s - math.sin(reduced)) < 2e-15 and abs(c - math.cos(reduced)) < 2e-15
