"""Packed formats and their matmul: exact values, one set of bits on every path, row count and split."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from headrace.kernels.device import F32, Bytes
from headrace.kernels.ops import Copy, Linear
from helpers_kernels import RNG, cpu, every_device, floats, pack, prompt, rows_of, run

# Elements and bytes of a block, and where its f16 scales are.
BLOCKS = {
    "Q4_0": (32, 18, (0,)), "Q4_1": (32, 20, (0, 2)), "Q5_0": (32, 22, (0,)), "Q5_1": (32, 24, (0, 2)),
    "Q8_0": (32, 34, (0,)), "Q2_K": (256, 84, (80, 82)), "Q3_K": (256, 110, (108,)), "Q4_K": (256, 144, (0, 2)),
    "Q5_K": (256, 176, (0, 2)), "Q6_K": (256, 210, (208,)), "IQ4_NL": (32, 18, (0,)), "IQ4_XS": (256, 136, (0,)),
}  # fmt: skip
FLOATS = {"F32": 4, "F16": 2, "BF16": 2}


def random_blocks(fmt: str, n: int, k: int, seed: int, any_scale: bool = False) -> Bytes:
    """Random file bytes [n, bytes of a row]; scales finite: about 1 / 100, or of any size, denormals too."""
    rng = RNG(seed)
    if fmt in FLOATS:
        x = rng.normal(size=(n, k)).astype(np.float32)
        if fmt == "BF16":
            return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return x.astype(np.float16).view(np.uint8) if fmt == "F16" else x.view(np.uint8)
    elements, size, scales = BLOCKS[fmt]
    raw = rng.integers(0, 256, (n, k // elements, size), dtype=np.uint8)
    for at in scales:
        d = (rng.normal(size=(n, k // elements)) / 100).astype(np.float16)
        if any_scale:
            bits = rng.integers(0, 1 << 16, d.shape).astype(np.uint16)
            d = np.where((bits & 0x7C00) == 0x7C00, bits & 0x83FF, bits).astype(np.uint16).view(np.float16)
        raw[..., at : at + 2] = np.ascontiguousarray(d)[..., None].view(np.uint8)
    return raw.reshape(n, -1)


def values(fmt: str, raw: Bytes, n: int, k: int) -> F32:
    """The gguf package's reading of the same bytes."""
    view = {"F32": np.float32, "F16": np.float16}.get(fmt, np.uint8)
    return dequantize(raw.view(view), gguf.GGMLQuantizationType[fmt]).reshape(n, k).astype(np.float32)


def linear(device: object, weight: object, x: F32, bias: F32 | None = None) -> F32:
    """x @ weight.T (+ bias)."""
    rows = rows_of([prompt(list(range(x.shape[0])), 0, x.shape[0])])
    weights = {"w": weight} | ({} if bias is None else {"b": floats(device, bias)})
    ops = (Copy("h", "x", wanted=True), Linear("logits", "h", "w", bias=None if bias is None else "b"))
    return run(device, ops, x, weights, rows)


def activations(rows: int, k: int, seed: int) -> F32:
    rng = RNG(seed)
    return (rng.normal(size=(rows, k)) * np.exp(rng.normal(size=(rows, k)))).astype(np.float32)


def same(a: F32, b: F32) -> None:
    """Equal bits; any NaN equals any other."""
    nan = np.isnan(a)
    np.testing.assert_array_equal(nan, np.isnan(b))
    np.testing.assert_array_equal(a[~nan].view(np.uint32), b[~nan].view(np.uint32))


@pytest.mark.parametrize("fmt", [*FLOATS, *BLOCKS])
@pytest.mark.parametrize("any_scale", [False, True])
def test_packed_values_are_the_files(fmt: str, any_scale: bool) -> None:
    device = cpu()
    for n, k in ((8, 256), (13, 512), (2, 768)):
        raw = random_blocks(fmt, n, k, n, any_scale)
        weight = pack(device, fmt, n, k, raw)
        ours = np.empty((n, k), np.float32)
        for i in range(n):
            weight.row(i, ours[i])
        np.testing.assert_array_equal(ours, values(fmt, raw, n, k))


@pytest.mark.parametrize("fmt", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_packed_values_of_quantised_weights(fmt: str) -> None:
    """Files as the gguf package writes them."""
    n, k = 24, 320
    raw = quantize(RNG(2).normal(size=(n, k)).astype(np.float32), gguf.GGMLQuantizationType[fmt])
    weight = pack(cpu(), fmt, n, k, raw)
    row = np.empty(k, np.float32)
    for i in range(n):
        weight.row(i, row)
        np.testing.assert_array_equal(row, values(fmt, raw[i : i + 1], 1, k)[0])


@pytest.mark.parametrize("fmt", BLOCKS)
def test_packed_size(fmt: str) -> None:
    """At most the file's bytes + 3%, but for rows up to the next multiple of 8 and the alignment of three planes."""
    elements, size, _ = BLOCKS[fmt]
    for n, k in ((8, elements), (576, 768), (1000, 4096)):
        file = -(-n // 8) * 8 * k // elements * size
        assert file <= cpu().packed_nbytes(fmt, n, k) <= file + 3 * 63
    assert cpu().packed_nbytes(fmt, 576, 768) <= 1.03 * (576 * 768 // elements * size)


@pytest.mark.parametrize("fmt", [*FLOATS, *BLOCKS])
def test_one_set_of_bits(fmt: str) -> None:
    """Every path, thread count and row count; n not a multiple of 8; near the exact product."""
    n, k, count = 21, 512, 13
    raw, x = random_blocks(fmt, n, k, 3), activations(count, k, 4)
    bias = RNG(5).normal(size=n).astype(np.float32)
    expected = None
    for device in every_device():
        weight = pack(device, fmt, n, k, raw)
        whole = linear(device, weight, x, bias)
        expected = whole if expected is None else expected
        same(whole, expected)
        for rows in (1, 2, 3, 4, 5, 7):
            same(linear(device, weight, np.ascontiguousarray(x[6 - rows // 2 :][:rows]), bias),
                 expected[6 - rows // 2 :][:rows])  # fmt: skip
    assert expected is not None
    exact = x.astype(np.float64) @ values(fmt, raw, n, k).astype(np.float64).T + bias
    assert np.abs(expected - exact).max() <= (1e-6 if fmt in FLOATS else 0.02) * np.abs(exact).max()


@pytest.mark.parametrize("fmt", BLOCKS)
def test_extreme_codes_never_saturate(fmt: str) -> None:
    """All codes at their ends and activations at +-127, of one sign, by pairs and by lanes: 16-bit sums hold them."""
    n, k = 16, 512
    x = np.full((5, k), 127, np.float32)
    x[1] *= -1
    x[2, ::2] *= -1
    x[3, 1::2] = 0
    x[4] *= np.arange(k) // 2 % 2 * 2 - 1
    elements, size, scales = BLOCKS[fmt]
    for fill in (0x00, 0xFF, 0x80, 0x7F):
        raw = random_blocks(fmt, n, k, 6).reshape(n, k // elements, size)
        keep = raw.copy()
        raw[:] = fill
        for at in scales:
            raw[..., at : at + 2] = keep[..., at : at + 2]
        exact = x.astype(np.float64) @ values(fmt, raw.reshape(n, -1), n, k).astype(np.float64).T
        scale = np.abs(x.astype(np.float64)) @ np.abs(values(fmt, raw.reshape(n, -1), n, k).astype(np.float64)).T
        outputs = [linear(d, pack(d, fmt, n, k, raw), x) for d in every_device()]
        for y in outputs:
            same(y, outputs[0])
            assert (np.abs(y - exact) <= 1e-5 * scale + 1e-30).all()


@pytest.mark.parametrize("fmt", ["F16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_bad_activations_spoil_only_their_row(fmt: str) -> None:
    """NaN and infinity make all outputs of their row NaN or infinite; zeros, denormals and huge values don't."""
    n, k = 16, 256
    raw, x = random_blocks(fmt, n, k, 7), activations(6, k, 8)
    x[0, 5], x[1, 40], x[2, 9] = np.nan, np.inf, -np.inf
    x[3, :64], x[4, 64:96] = 0, x[4, 64:96] * np.float32(1e-38)
    x[5, 3] = 1e30
    outputs = [linear(d, pack(d, fmt, n, k, raw), x) for d in every_device()]
    for y in outputs:
        same(y, outputs[0])
        assert not np.isfinite(y[:3]).any()
        assert np.isfinite(y[3:]).all()
