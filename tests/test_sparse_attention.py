"""``--attn-sparsity``: the top fraction of values by weight, on every device; 1 is the exact path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace
from headrace.errors import BadRequest
from headrace.formats.index import open_model
from headrace.formats.sparse import sparsely
from headrace.kernels.device import KVShape
from headrace.kernels.ops import FEWEST, Attend
from headrace.model.layers import load_model
from helpers_kernels import RNG, Cache, Seq, cpu, prompt, rows_of, shuffled_slots
from helpers_tiny import tiny_model

HEADS, KV, DIM = 4, 2, 16


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, keep: float) -> np.ndarray:
    """The rule, for the last position alone. q [heads, dim], k and v [positions, kv_heads, dim], all f64."""
    count = len(k)
    kept = max(FEWEST, int(keep * (count - 1)))
    out = []
    for h, query in enumerate(q):
        scores = k[:, h // (HEADS // KV)] @ query * scale
        best = [*sorted(range(count - 1), key=lambda p: -scores[p])[:kept], count - 1]
        weights = np.exp(scores[best] - scores.max())
        out.append(weights @ v[best, h // (HEADS // KV)] / weights.sum())
    return np.array(out)


def devices() -> list[Any]:
    found: list[Any] = [cpu(1, "portable"), cpu(2)]
    try:
        from headrace.kernels.torch_device import TorchDevice

        found.append(TorchDevice())
    except ImportError:
        pass
    return found


class Layer:
    """A cache whose K and V are exact in f16, and one attention over it."""

    def __init__(self, device: Any, count: int, op: Attend) -> None:
        rng = RNG(3)
        self.op, self.device = op, device
        self.k, self.v = (rng.normal(0, 1, (count, KV, DIM)).astype(np.float16).astype(np.float32) for _ in "kv")
        self.q = rng.normal(0, 2, (count, HEADS, DIM)).astype(np.float32)
        self.cache = Cache(device, KVShape(KV, DIM), -(-count // 32) + 4, scatter=True)
        self.slots = shuffled_slots(count, 99)

    def run(self, sequences: Sequence[Seq], at: Sequence[int]) -> np.ndarray:
        """Rows that stand at these positions of one sequence."""
        from headrace.kernels.ops import Copy, Linear, StoreKV
        from helpers_kernels import floats, run

        wide = HEADS * DIM
        x = np.concatenate([a[list(at)].reshape(len(at), -1) for a in (self.q, self.k, self.v)], 1)
        pick = {
            name: floats(self.device, np.eye(x.shape[1], dtype=np.float32)[start : start + size])
            for name, start, size in (("q", 0, wide), ("k", wide, KV * DIM), ("v", wide + KV * DIM, KV * DIM))
        }
        pick["out"] = floats(self.device, np.eye(wide, dtype=np.float32))
        ops = [
            *(Linear(n, "x", n) for n in "qkv"), StoreKV("k", "v"), self.op,
            Copy("a", "a", wanted=True), Linear("logits", "a", "out"),
        ]  # fmt: skip
        return run(self.device, ops, x, pick, rows_of(sequences), self.cache)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.03])
def test_the_rule(keep: float) -> None:
    """A prompt of 600 over three chunks, in one run and then one by one; guesses upon it; against the plain sum."""
    count = 600
    for device in devices():
        layer = Layer(device, count, Attend("a", "q", HEADS, KV, DIM, 0.25, keep=keep, most=640))
        got = [layer.run([prompt(layer.slots, 0, 590)], range(590))]
        for p in range(590, 596):
            got.append(layer.run([prompt(layer.slots, p, p + 1)], [p]))
        guesses = layer.slots[596:]
        got.append(layer.run([Seq(layer.slots[:596], [(596, guesses[: i + 1]) for i in range(4)])], range(596, 600)))
        found = np.concatenate(got)
        for p in (0, 1, 32, 33, 34, 100, 255, 256, 300, 511, 512, 589, 590, 595, 596, 599):
            want = attention(layer.q[p].astype(np.float64), layer.k[: p + 1].astype(np.float64),
                             layer.v[: p + 1].astype(np.float64), 0.25, keep)  # fmt: skip
            assert np.abs(found[p] - want.reshape(-1)).max() < 2e-5, (device.name, p)


def test_values_that_arent_chosen_are_not_looked_at() -> None:
    """Whatever a low-weight position's value is, the row's bits stay; a chosen one's change them."""
    for device in devices():
        layer = Layer(device, 300, Attend("a", "q", HEADS, KV, DIM, 0.25, keep=0.1, most=300))
        layer.run([prompt(layer.slots, 0, 299)], range(299))
        before = layer.run([prompt(layer.slots, 299, 300)], [299])
        scores = np.einsum("pgd,ghd->ghp", layer.k[:299], layer.q[299].reshape(KV, HEADS // KV, DIM))
        order = np.argsort(scores.max(1), -1)  # least wanted first, [KV, positions]
        for g, changes in ((0, False), (1, True)):
            p = int(order[g, -1] if changes else next(p for p in order[g] if scores[:, :, p].max() < 0))
            layer.v[p] += 64
            layer.run([prompt(layer.slots, p, p + 1)], [p])
            after = layer.run([prompt(layer.slots, 299, 300)], [299])
            assert (after.tobytes() != before.tobytes()) == changes, (device.name, g)


def test_a_fraction_of_one_is_the_exact_path() -> None:
    for device in devices():
        layers = [Layer(device, 300, Attend("a", "q", HEADS, KV, DIM, 0.25, **more)) for more in ({}, {"keep": 1.0})]
        a, b = (layer.run([prompt(layer.slots, 0, 300)], range(300)) for layer in layers)
        assert a.tobytes() == b.tobytes()


def test_a_row_that_isnt_finite_fails_alone() -> None:
    for device in devices():
        layer = Layer(device, 300, Attend("a", "q", HEADS, KV, DIM, 0.25, keep=0.1, most=300))
        both = [prompt(layer.slots, 0, 299), prompt([330], 0, 1)]
        good = layer.run(both, range(300))
        layer.q[299, 1, 3] = np.nan
        bad = layer.run(both, range(300))
        broken = ~np.isfinite(bad).all(1)
        assert broken.nonzero()[0].tolist() == [299]
        assert bad[~broken].tobytes() == good[~broken].tobytes()


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 700), st.floats(0.01, 0.99), st.integers(1, 40))
def test_scratch_holds_whatever_is_run(count: int, keep: float, chunk: int) -> None:
    device = cpu(2)
    op = Attend("a", "q", HEADS, KV, DIM, 0.25, keep=keep, most=count)
    layer = Layer(device, count, op)
    bound = device.scratch_nbytes([replace(op, dst="x", src="x")], HEADS * DIM, count, {})
    for start in range(0, count, chunk * 20):
        end = min(count, start + chunk * 20)
        layer.run([prompt(layer.slots, start, end)], range(start, end))
    assert device.arena_nbytes <= bound + 4 * count * 6 * HEADS * DIM + (1 << 16)
    if count > 1:
        layer.op = replace(op, most=count - 1)
        with pytest.raises(ValueError, match="room for"):
            layer.run([prompt(layer.slots, count - 1, count)], [count - 1])


# --- as a model -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("sparse") / "t.gguf", "Q8_0", blocks=3, text=True)


PROMPTS = ["a prompt that is long enough for it to be more than thirty-two positions", "another one", "x"]


def test_it_is_a_model_of_its_own(path: Path) -> None:
    with open_model(path) as file:
        sparse = sparsely(file, 0.25, 100)
        assert sparse.metadata["general.name"] == "t-sparse0.25"
        assert sparse.digest() not in (file.digest(), sparsely(file, 0.2, 100).digest())
        assert sparse.identity() == file.identity(), "packed files serve both"
        assert sparsely(file, 1.0, 100) is file
        ops = [op for layer in load_model(sparse).layers for op in layer.ops if isinstance(op, Attend)]
        assert {(op.keep, op.most) for op in ops} == {(0.25, 100)} and len(ops) == 3
        for bad in (0.0, -1.0, 1.5, float("nan")):
            with pytest.raises(BadRequest, match="--attn-sparsity"):
                sparsely(file, bad, 100)


def test_text_depends_on_the_fraction_and_on_nothing_else(path: Path, tmp_path: Path) -> None:
    def texts(**options: Any) -> list[tuple[int, ...]]:
        with headrace.load(path, context=192, **options) as engine:
            assert engine.parts.name == ("t" if options.get("attn_sparsity", 1.0) == 1.0 else "t-sparse0.1")
            return [c.tokens for c in engine.generate(PROMPTS, max_tokens=24, ignore_eos=True)]

    exact, sparse = texts(), texts(attn_sparsity=0.1)
    assert texts(attn_sparsity=1.0) == exact != sparse
    assert texts(attn_sparsity=0.1, rows=3, threads=1) == sparse
    assert texts(attn_sparsity=0.1, rows=16, runs=3, caches=3, sequences=3, kv_disk=tmp_path, kv_frames=30) == sparse
