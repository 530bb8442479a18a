"""Block formats against the gguf package: every value equal bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize

from headrace.errors import BadFile, Unsupported
from headrace.formats.quant import dequantise, quantise
from headrace.formats.tensor import BLOCKS, GGML_TYPES, KNOWN, row_nbytes, tensor_nbytes

SCALES = {
    # byte offsets of the f16 numbers in a block
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0],
}  # fmt: skip


def random_blocks(fmt: str, n: int, k: int, seed: int) -> np.ndarray:
    """Random bytes whose scales are finite, of all magnitudes and both signs."""
    rng = np.random.default_rng(seed)
    width, size = BLOCKS[fmt]
    raw = rng.integers(0, 256, (n * k // width, size), dtype=np.uint8)
    for at in SCALES.get(fmt, []):
        scale = (rng.standard_normal(len(raw)) * 10.0 ** rng.integers(-6, 4, len(raw))).astype(np.float16)
        raw[:, at : at + 2] = scale[:, None].view(np.uint8)
    return raw.reshape(n, -1)


@pytest.mark.parametrize("fmt", KNOWN)
def test_values_equal_the_gguf_package(fmt: str) -> None:
    n, k = 37, 768
    raw = random_blocks(fmt, n, k, 7)
    with np.errstate(all="ignore"):
        theirs = dequantize(raw, gguf.GGMLQuantizationType[fmt])
    ours = dequantise(fmt, raw.reshape(-1), n, k)
    assert ours.shape == (n, k) and ours.dtype == np.float32
    np.testing.assert_array_equal(ours.view(np.uint32), np.asarray(theirs, np.float32).view(np.uint32))


@pytest.mark.parametrize("fmt", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("spread", [1e-6, 0.02, 30.0])
def test_rounding_equals_the_gguf_package(fmt: str, spread: float) -> None:
    x = (np.random.default_rng(3).standard_normal((50, 256)) * spread).astype(np.float32)
    x[3, 32:64] = 0.0  # a block of zeros has no scale
    x[4, :32] = 0.25  # nor has a constant one a range
    x[5, :32] = np.arange(32) - 15.5  # ties
    theirs = np.ascontiguousarray(quantize(x, gguf.GGMLQuantizationType[fmt])).view(np.uint8)
    np.testing.assert_array_equal(quantise(fmt, x), theirs.reshape(50, -1))


def test_long_tensors_are_expanded_piece_by_piece() -> None:
    n, k = 3, 1 << 19  # more than one piece
    raw = random_blocks("Q8_0", n, k, 1).reshape(-1)
    whole = dequantise("Q8_0", raw, n, k)
    for i in range(n):
        row = raw.reshape(n, -1)[i]
        np.testing.assert_array_equal(dequantise("Q8_0", row, 1, k)[0], whole[i])


def test_sizes_are_those_of_the_gguf_package() -> None:
    # All but Q8_1, an activation format that no file holds: 36 bytes in ggml-common.h, 40 in the package.
    theirs = {t.value: (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType if t.name != "Q8_1"}
    shared = theirs.keys() & GGML_TYPES.keys()
    assert {i: GGML_TYPES[i] for i in shared} == {i: theirs[i] for i in shared}
    assert set(KNOWN) <= {GGML_TYPES[i][0] for i in shared}
    assert row_nbytes("Q4_K", 512) == 288
    assert tensor_nbytes("Q8_0", (2, 3, 64)) == 6 * 68
    assert tensor_nbytes("F32", ()) == 4
    with pytest.raises(ValueError, match="blocks of 256"):
        row_nbytes("Q4_K", 288)


def test_refusals() -> None:
    with pytest.raises(Unsupported, match="IQ2_XS"):
        dequantise("IQ2_XS", np.zeros(74, np.uint8), 1, 256)
    with pytest.raises(Unsupported, match="Q6_K"):
        quantise("Q6_K", np.zeros((1, 256), np.float32))
    with pytest.raises(BadFile, match="NaN"):
        quantise("Q8_0", np.full((1, 32), np.nan, np.float32))
    with pytest.raises(ValueError, match="bytes given"):
        dequantise("Q8_0", np.zeros(33, np.uint8), 1, 32)
