"""Fitted blocks: less error than rounding from the extremes, the same bytes whatever is beside them, no broken rows."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from headrace.errors import BadFile
from headrace.formats import fit
from headrace.formats.fit import fitted
from headrace.formats.quant import dequantise, quantise

BITS = {"Q4_1": 4, "Q4_K": 4, "IQ4_NL": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5}
WORST = {"Q4_1": -22.4, "Q4_K": -22.0, "IQ4_NL": -22.2, "Q5_0": -27.4, "Q5_1": -28.4, "Q5_K": -27.8}
"""dB of error that a normal distribution may have; rounding from the extremes gives Q4_1 -22.1 and Q4_0 -20.9."""


def error(x: np.ndarray, fmt: str, raw: np.ndarray) -> float:
    """Squared error as a share of the squares, in dB."""
    y = dequantise(fmt, raw.reshape(-1), *x.shape).astype(np.float64)
    return float(10 * np.log10(((x - y) ** 2).sum() / (x.astype(np.float64) ** 2).sum()))


@pytest.mark.parametrize("fmt", list(BITS))
def test_the_error_is_small(fmt: str) -> None:
    random = np.random.default_rng(0)
    x = (random.standard_normal((64, 512)) * 0.03).astype(np.float32)
    raw = fitted(fmt, x)
    assert error(x, fmt, raw) < WORST[fmt]
    theirs = dequantize(raw, gguf.GGMLQuantizationType[fmt])
    np.testing.assert_array_equal(theirs, dequantise(fmt, raw.reshape(-1), *x.shape))
    if fmt == "Q4_1":
        skewed = random.exponential(0.1, (64, 512)).astype(np.float32)
        for some in (x, skewed, skewed * random.choice((1, 1, 1, 8), skewed.shape).astype(np.float32)):
            assert error(some, fmt, fitted(fmt, some)) < error(some, fmt, quantise(fmt, some)) - 0.3


@pytest.mark.parametrize("fmt", list(BITS))
def test_bytes_depend_on_their_own_row_only(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(1).standard_t(3, (40, 768)).astype(np.float32)
    whole = fitted(fmt, x)
    monkeypatch.setattr(fit, "_AT_ONCE", 24)
    np.testing.assert_array_equal(fitted(fmt, x), whole)
    for i in (0, 7, 39):
        np.testing.assert_array_equal(fitted(fmt, x[i]), whole[i : i + 1])


@pytest.mark.parametrize("fmt", list(BITS))
def test_odd_rows(fmt: str) -> None:
    """Zeros, constants, one large value, nearly no range, the smallest and largest numbers: near what they were."""
    x = np.zeros((9, 256), np.float32)
    x[1:3] = np.array([[0.25], [-3.0]])
    x[3, 5] = 7.0
    x[4] = 1.0 + np.arange(256) * 1e-6
    x[5], x[6] = np.linspace(-1e-7, 1e-7, 256), np.linspace(-3e4, 3e4, 256)
    x[7], x[8] = np.linspace(1, 2, 256), np.linspace(-2, -1, 256)
    y = dequantise(fmt, fitted(fmt, x).reshape(-1), *x.shape)
    assert np.isfinite(y).all() and not y[0].any()
    most = np.abs(x).max(axis=1) * (0.15 if BITS[fmt] == 4 else 0.08) + 1e-7
    assert (np.abs(x - y).max(axis=1) <= most).all()


def test_a_grid_is_found_again() -> None:
    """Weights that were in four bits before come out as they were, but for the rounding of bf16 in between."""
    x = np.random.default_rng(2).standard_normal((32, 512)).astype(np.float32)
    grid = dequantise("Q4_1", quantise("Q4_1", x).reshape(-1), *x.shape)
    bf16 = dequantise("BF16", quantise("BF16", grid).reshape(-1), *x.shape)
    assert error(grid, "Q4_1", fitted("Q4_1", bf16)) < -45


def test_other_formats_and_refusals() -> None:
    x = np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)
    np.testing.assert_array_equal(fitted("Q8_0", x), quantise("Q8_0", x))
    x[2, 3] = np.inf
    with pytest.raises(BadFile, match="NaN or infinity"):
        fitted("Q4_1", x)
