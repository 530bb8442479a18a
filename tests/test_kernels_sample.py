"""The native sampler against the rule in plain Python; Philox against published vectors; the distribution it draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference_sample
from headrace.kernels import _native
from headrace.kernels.cpu import CpuDevice
from headrace.kernels.draw import NOT_FINITE, NOTHING_ALLOWED, Draw

DEVICES = [CpuDevice(1, "portable"), CpuDevice(2)]


def vocab_mask(vocab: int, allowed: list[int]) -> np.ndarray:
    mask = np.zeros((vocab + 31) // 32, np.uint32)
    for i in allowed:
        mask[i // 32] |= np.uint32(1 << i % 32)
    return mask


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [  # Random123's kat_vectors, philox4x32 10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)  # fmt: skip
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]) -> None:
    assert _native.philox(counter, key) == want
    assert reference_sample.philox(counter, key) == want


def test_exp_and_log_are_the_reference_s() -> None:
    rng = np.random.default_rng(0)
    for x in [*rng.uniform(-720, 720, 2000).tolist(), 0.0, -708.0, 709.0]:
        assert _native.exp64(x) == reference_sample.exp64(x)
    for x in [*rng.uniform(0, 1, 2000).tolist(), *np.exp(rng.uniform(-40, 40, 2000)).tolist(), 1.0, 2.0**-33]:
        assert _native.log64(x) == reference_sample.log64(x)


draws = st.builds(
    Draw,
    temperature=st.sampled_from([0.0, -1.0, 0.2, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repeat_penalty=st.sampled_from([1.0, 1.1, 2.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2**32 - 1),
    position=st.integers(0, 2**31 - 1),
    recent=st.lists(st.integers(-1, 80), max_size=20).map(lambda v: np.array(v, np.int32)),
    bias=st.lists(st.tuples(st.integers(0, 80), st.sampled_from([-100.0, -1.5, 2.0])), max_size=3).map(tuple),
    logprobs=st.sampled_from([0, 1, 4, 90]),
)


@settings(max_examples=150, deadline=None)
@given(draw=draws, vocab=st.integers(1, 77), seed=st.integers(0, 10**6), ties=st.booleans(), masked=st.booleans())
def test_native_equals_the_rule(draw: Draw, vocab: int, seed: int, ties: bool, masked: bool) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 4, (1, vocab)).astype(np.float32)
    if ties:
        logits = np.round(logits / 3)
    if masked:
        allowed = np.flatnonzero(rng.random(vocab) < 0.5).tolist()
        draw = Draw(**{**draw.__dict__, "mask": vocab_mask(vocab, allowed)})
    want = reference_sample.sample(logits[0], draw)
    for device in DEVICES:
        assert device.sample(logits, [draw]) == [want]


def test_large_vocabulary_and_many_rows() -> None:
    """Big enough for the sampler's shortcuts (bounds on noise, sorting in blocks) to matter."""
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 1.5, (6, 3001)).astype(np.float32)
    rules = [
        Draw(temperature=1.0, seed=1), Draw(temperature=1.0, top_p=0.9, seed=2),
        Draw(temperature=2.0, top_p=0.999, seed=3),
        Draw(temperature=0.8, top_k=300, top_p=0.8, seed=4), Draw(temperature=1.5, min_p=0.01, seed=5), Draw(),
    ]  # fmt: skip
    for shift in range(2):
        rows = [Draw(**{**r.__dict__, "position": shift}) for r in rules]
        want = [reference_sample.sample(line, r) for line, r in zip(logits, rows, strict=True)]
        assert all(device.sample(logits, rows) == want for device in DEVICES)


def test_frequencies_follow_softmax() -> None:
    logits = np.array([[1.0, 0.0, 2.0, -1.0, 0.5]], np.float32)
    p = np.exp(logits[0] / 0.8)
    p /= p.sum()
    count = np.zeros(5)
    n = 20_000
    for position in range(0, n, 50):
        drawn = DEVICES[1].sample(
            np.repeat(logits, 50, 0), [Draw(temperature=0.8, seed=9, position=position + i) for i in range(50)]
        )
        for d in drawn:
            count[d.token] += 1
    chi2 = float((((count - n * p) ** 2) / (n * p)).sum())
    assert chi2 < 18.5  # 0.1% of a chi square with 4 degrees


def test_noise_depends_on_seed_choice_and_position_only_through_them() -> None:
    logits = np.zeros((1, 1000), np.float32)
    first = Draw(temperature=1.0, seed=2**40 + 1, choice=3, position=7)
    tokens = {DEVICES[0].sample(logits, [Draw(**{**first.__dict__, **change})])[0].token
              for change in ({}, {"seed": 1}, {"choice": 4}, {"position": 8})}  # fmt: skip
    assert len(tokens) == 4
    assert DEVICES[0].sample(logits, [first]) == DEVICES[1].sample(logits, [first])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = np.random.default_rng(0).normal(0, 1, (3, 100)).astype(np.float32)
    logits[1, 99] = bad
    for device in DEVICES:
        good, failed, also = device.sample(logits, [Draw(temperature=1.0, logprobs=3)] * 3)
        assert failed.token == NOT_FINITE and failed.top == []
        assert good.token >= 0 and also.token >= 0 and len(good.top) == 2


def test_a_mask_that_forbids_everything() -> None:
    logits = np.zeros((1, 40), np.float32)
    assert DEVICES[0].sample(logits, [Draw(mask=vocab_mask(40, []))])[0].token == NOTHING_ALLOWED
    with pytest.raises(ValueError, match="mask is shorter"):
        DEVICES[0].sample(logits, [Draw(mask=np.zeros(1, np.uint32))])


def test_log_probabilities_sum_to_one() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (1, 50)).astype(np.float32)
    drawn = DEVICES[0].sample(logits, [Draw(logprobs=51)])[0]
    assert len(drawn.top) == 50 and drawn.top[0] == (drawn.token, drawn.logprob)
    assert sum(math.exp(p) for _, p in drawn.top) == pytest.approx(1.0, abs=1e-12)
