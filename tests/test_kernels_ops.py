"""Every operation of the CPU device against the NumPy reference device, and its errors."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.kernels.device import KVShape, Rows
from headrace.kernels.ops import Act, Add, Attend, Copy, Gather, Linear, Norm, Op, Rope, Scale, StoreKV
from helpers_kernels import RNG, Cache, Seq, cpu, floats, pack, prompt, random_q4_1, rows_of, run, shuffled_slots
from reference_device import ReferenceDevice

WIDTH = 44


def rows(count: int) -> Rows:
    return rows_of([prompt(list(range(count)), 0, count)])


def both(ops: list[Op], count: int = 5, weights: dict[str, np.ndarray] | None = None, spread: float = 1.0):
    """Results of cpu and reference on the same random x."""
    x = RNG(1).normal(0, spread, (count, WIDTH)).astype(np.float32)
    made = []
    for device in (cpu(), ReferenceDevice()):
        held = {name: floats(device, w) for name, w in (weights or {}).items()}
        made.append(run(device, ops, x, held, rows(count)))
    return made


def close(pair: list[np.ndarray], tolerance: float = 2e-6) -> None:
    got, want = pair
    scale = max(1.0, float(np.abs(want).max()))
    assert got.shape == want.shape
    assert float(np.abs(got - want).max()) < tolerance * scale


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("group", [0, 11, 22])
@pytest.mark.parametrize("bias", [False, True])
def test_norm(kind: str, group: int, bias: bool) -> None:
    size = group or WIDTH
    w = {"w": RNG(2).normal(1, 0.2, size), "b": RNG(3).normal(0, 1, size)}
    close(both([Norm("x", "x", "w", "b" if bias else None, kind, 1e-5, group)], weights=w, spread=3.0), 1e-6)


def test_norm_subtracts_a_large_mean() -> None:
    x = RNG(1).normal(1000, 1, (3, WIDTH)).astype(np.float32)
    got = run(cpu(), [Norm("x", "x", "w", "b", "layer")], x, {k: floats(cpu(), np.ones(WIDTH)) for k in "wb"}, rows(3))
    assert float(np.abs(got.mean(1) - 1).max()) < 1e-3 and float(np.abs(got.std(1) - 1).max()) < 1e-3


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu_erf", "relu"])
@pytest.mark.parametrize("gated", [False, True])
def test_act(kind: str, gated: bool) -> None:
    ops = [Copy("u", "x"), Scale("u", 0.5), Act("x", "x", kind, up="u" if gated else None)]
    close(both(ops, spread=4.0), 1e-6)


def test_add_copy_scale() -> None:
    close(both([Copy("h", "x"), Scale("h", 3.0, softcap=2.5), Add("x", "h"), Scale("x", -0.25)]))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("pairs", [3, 5])
def test_rope(style: str, pairs: int) -> None:
    freqs = tuple(10_000.0 ** (-i / pairs) for i in range(pairs))
    close(both([Rope("x", 4, 11, style, freqs, 1.3)], count=9), 1e-6)


def test_rope_far_out_is_exact() -> None:
    """Angles of a million radians, in f64: the pair stays on its circle at the right place."""
    position = 1_000_003
    r = rows_of([Seq(list(range(2)), [(1, ())])])
    far = Rows(r.token, np.array([position - 1], np.int32), r.slot, r.base, np.array([position - 1], np.int32), r.extra,
               np.array([1], np.int32), np.zeros(position, np.int32), r.wanted)  # fmt: skip
    far = Rows(
        far.token,
        far.position,
        np.zeros(1, np.int32),
        far.base,
        far.base_len,
        far.extra,
        far.extra_len,
        far.lists,
        far.wanted,
    )
    x = np.array([[1.0, 0.0]], np.float32)
    got = run(cpu(), [Rope("x", 1, 2, "half", (1.0,))], x, {}, far)
    assert np.allclose(got, [[np.cos(position - 1), np.sin(position - 1)]], atol=1e-7)


def test_gather_linear_bias_accumulate() -> None:
    rng = RNG(4)
    w = {"t": rng.normal(0, 1, (60, WIDTH)), "p": rng.normal(0, 1, (30, WIDTH)), "m": rng.normal(0, 0.2, (52, WIDTH)),
         "back": rng.normal(0, 0.2, (WIDTH, 52)), "b": rng.normal(0, 1, 52), "c": rng.normal(0, 1, WIDTH)}  # fmt: skip
    ops = [
        Gather("x", "t", scale=3.5), Gather("x", "p", "position", offset=2, accumulate=True, scale=0.5),
        Linear("h", "x", "m", "b"), Act("h", "h", "silu"), Linear("x", "h", "back", "c", accumulate=True),
        Linear("x", "h", "back", accumulate=True),
    ]  # fmt: skip
    close(both(ops, count=7, weights=w), 3e-6)


def test_gated_feed_forward_with_quantised_weights() -> None:
    """Gate, up, activation and the next product are fused; wide enough for several chunks, with a ragged last one."""
    rng = RNG(5)
    wide = 32 * 11
    raw = {"g": random_q4_1(rng, wide, 64), "u": random_q4_1(rng, wide, 64), "d": random_q4_1(rng, 64, wide)}
    shapes = {"g": (wide, 64), "u": (wide, 64), "d": (64, wide)}
    ops = [
        Linear("g", "x", "g"),
        Linear("u", "x", "u"),
        Act("g", "g", "silu", up="u"),
        Linear("x", "g", "d", accumulate=True),
    ]
    for count in (1, 3, 40):
        x = rng.normal(0, 1, (count, 64)).astype(np.float32)
        made = [
            run(d, ops, x, {k: pack(d, "Q4_1", *shapes[k], v) for k, v in raw.items()}, rows(count))
            for d in (cpu(2), ReferenceDevice())
        ]
        assert float(np.abs(made[0] - made[1]).max()) < 0.03 * float(np.abs(made[1]).max())


def test_wanted_rows_and_logits() -> None:
    rng = RNG(6)
    values = {"n": rng.normal(1, 0.1, WIDTH), "out": rng.normal(0, 0.2, (70, WIDTH))}
    ops = [Copy("h", "x", wanted=True), Norm("h", "h", "n"), Linear("logits", "h", "out"), Scale("logits", softcap=5.0)]
    x = rng.normal(0, 1, (6, WIDTH)).astype(np.float32)
    for wanted in ([], [2], [0, 3, 5]):
        r = rows_of([prompt(list(range(6)), 0, 6)], wanted)
        devices = (cpu(2), ReferenceDevice()) if wanted else (cpu(2),)
        made = [run(d, ops, x, {k: floats(d, v) for k, v in values.items()}, r) for d in devices]
        assert made[0].shape == (len(wanted), 70)
        if wanted:
            close(made)


def attention_ops(heads: int, kv: int, dim: int, **more: float) -> list[Op]:
    return [Linear("k", "x", "wk"), Linear("v", "x", "wv"), Linear("q", "x", "wq"), StoreKV("k", "v"),
            Attend("a", "q", heads, kv, dim, dim**-0.5, **more), Linear("x", "a", "wo", accumulate=True)]  # fmt: skip


@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (8, 4), (4, 4)])
@pytest.mark.parametrize(
    ("heads", "kv", "dim", "more"),
    [
        (6, 2, 32, {}),
        (4, 4, 40, {"window": 70}),
        (8, 1, 16, {"softcap": 3.0}),
        (5, 1, 8, {}),
        (2, 1, 96, {"window": 300}),
        (6, 2, 32, {"keep": 0.1, "most": 320}),
        (8, 1, 24, {"keep": 0.35, "most": 320, "softcap": 3.0}),
        (4, 4, 40, {"keep": 0.05, "most": 320, "window": 70}),
    ],
)
def test_attention(bits: tuple[int, int], heads: int, kv: int, dim: int, more: dict) -> None:
    """A prompt over more than one chunk, another sequence beside it, and guesses upon both."""
    rng = RNG(7)
    values = {"wk": (kv * dim, WIDTH), "wv": (kv * dim, WIDTH), "wq": (heads * dim, WIDTH), "wo": (WIDTH, heads * dim)}
    matrices = {k: rng.normal(0, 2 * shape[1] ** -0.5, shape) for k, shape in values.items()}
    slots, other = shuffled_slots(300, 12), list(range(320, 340))
    ops = attention_ops(heads, kv, dim, **more)
    runs = [
        (ops[:4], [prompt(slots, 0, 250), prompt(other, 0, 5)]),
        (ops, [prompt(slots, 250, 290)]),
        (ops, [Seq(slots[:291], [(291, ()), (291, (360,)), (291, (360, 361)), (291, (362,))]),
               Seq(other[:6], [(6, ()), (6, (363,))])]),
    ]  # fmt: skip
    made = []
    for device in (cpu(2), ReferenceDevice()):
        cache = Cache(device, KVShape(kv, dim, *bits), 12, scatter=True)
        held = {k: floats(device, v) for k, v in matrices.items()}
        out = []
        for program, sequences in runs:
            r = rows_of(sequences)
            x = RNG(8).normal(0, 1, (r.count, WIDTH)).astype(np.float32)
            out.append(run(device, program, x, held, r, cache))
        made.append(np.concatenate(out))
    # Where a product's last bit tips K or V to the next step of its format, the two devices differ by that step.
    error = np.abs(made[0] - made[1]) / float(np.abs(made[1]).max())
    assert float(np.quantile(error, 0.5)) < (1e-6 if bits == (16, 16) else 1e-4)
    # Where the last score kept is as good as its neighbour's, they may choose differently.
    worst = error.max(1) if "keep" not in more else np.sort(error.max(1))[:-3]
    assert float(worst.max()) < {16: 1e-3, 8: 1e-2, 4: 5e-2}[min(bits)]


@pytest.mark.parametrize("path", ["portable", "avx2"])
@pytest.mark.parametrize("dim", [32, 64, 80, 9])
def test_rounding_of_k_and_v(path: str, dim: int) -> None:
    """Each format's own rule, exactly."""
    rng = RNG(10)
    for scale in (1.0, 30.0, 1e-3, 0.0):
        x = (rng.normal(0, 1, dim) * scale).astype(np.float32)
        for bits in (16, 8, 4):
            got = x.copy()
            cpu(1, path)._native.round_kv(bits, got)
            for start in range(0, dim, 32):
                assert np.array_equal(got[start : start + 32], rounded(x[start : start + 32], bits)), (bits, start)
    big = np.array([1e6, -1e6, 65504, np.nan], np.float32)
    cpu(1, path)._native.round_kv(16, big)
    assert big[:3].tolist() == [65504, -65504, 65504] and np.isnan(big[3])
    for bits in (8, 4):
        bad = np.array([1.0, np.nan, 2.0], np.float32)
        cpu(1, path)._native.round_kv(bits, bad)
        assert np.isnan(bad).all()  # a broken value breaks its group, and so its request


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    if bits == 16:
        return x.astype(np.float16).astype(np.float32)
    low = x.min() if bits == 4 else np.float32(0)
    span = (x.max() - low) / np.float32(15) if bits == 4 else np.abs(x).max() / np.float32(127)
    d, base = np.float32(np.float16(span)), np.float32(np.float16(low))
    inverse = np.float32(1) / d if d > 0 else np.float32(0)
    q = np.clip(np.rint((x - base) * inverse), *((0, 15) if bits == 4 else (-127, 127)))
    return (q.astype(np.float64) * float(d) + float(base)).astype(np.float32)


def test_what_the_contract_forbids() -> None:
    x = np.zeros((2, WIDTH), np.float32)
    w = floats(cpu(), np.zeros((8, WIDTH)))
    norm = floats(cpu(), np.zeros(WIDTH - 1))
    with pytest.raises(ValueError, match="nothing has written"):
        run(cpu(), [Add("x", "h")], x, {}, rows(2))
    with pytest.raises(ValueError, match="another length"):
        run(cpu(), [Norm("x", "x", "n")], x, {"n": norm}, rows(2))
    with pytest.raises(ValueError, match="another k"):
        run(cpu(), [Linear("h", "x", "w"), Linear("g", "h", "w")], x, {"w": w}, rows(2))
    with pytest.raises(ValueError, match="change a register's width"):
        run(cpu(), [Linear("h", "x", "w"), Copy("x", "h")], x, {"w": w}, rows(2))
    with pytest.raises(ValueError, match="needs a cache"):
        run(cpu(), [StoreKV("x", "x")], x, {}, rows(2))
    with pytest.raises(ValueError, match="isn't \\[rows, width\\]"):
        run(cpu(), [Copy("h", "x")], x, {}, rows(3))
    with pytest.raises(ValueError, match="of a table of 8"):
        run(cpu(), [Gather("x", "w")], x, {"w": w}, rows_of([prompt([1, 2], 0, 2)], vocab=50))
    with pytest.raises(ValueError, match="all rows are read"):
        run(cpu(), [Copy("h", "x", wanted=True), Add("h", "x")], x, {}, rows(2))


def test_rows_are_checked() -> None:
    device, x = cpu(), np.zeros((2, WIDTH), np.float32)
    good = rows(2)
    cache = Cache(device, KVShape(1, WIDTH), 1)
    for field, value, message in (
        ("position", [0, 0], "position isn't"), ("slot", [0, 0], "own slot"), ("base_len", [1, 9], "outside lists"),
        ("wanted", [1, 0], "ascending"), ("lists", [0, -1], "negative slot"), ("token", [0, -3], "negative token"),
    ):  # fmt: skip
        bad = Rows(**{**good.__dict__, field: np.array(value, np.int32)})
        with pytest.raises(ValueError, match=message):
            run(device, [Copy("h", "x")], x, {}, bad)
    with pytest.raises(ValueError, match="beyond the page table"):
        run(device, [StoreKV("x", "x")], x, {}, rows_of([prompt([5, 40], 0, 2)]), cache)
    pages = np.zeros(4, np.uint64)
    cache.layer = device.kv_layer(cache.shape, pages)
    with pytest.raises(ValueError, match="isn't in memory"):
        run(device, [StoreKV("x", "x")], x, {}, good, cache)


def test_tensors_are_checked() -> None:
    device = cpu()
    with pytest.raises(ValueError, match="unknown tensor format"):
        device.packed_nbytes("Q9_9", 8, 32)
    with pytest.raises(ValueError, match="whole number of blocks"):
        device.packed_nbytes("Q4_1", 8, 40)
    with pytest.raises(ValueError, match="vector must be F32"):
        device.packed_nbytes("F16", 1, 32)
    with pytest.raises(ValueError, match="another size"):
        device.pack("F32", 2, 4, np.zeros(31, np.uint8), np.zeros(4096, np.uint8))
    with pytest.raises(ValueError, match="fewer bytes"):
        device.weight("F32", 2, 4, np.zeros(31, np.uint8))
