"""Invariant 1 in the kernels: a row's bits depend on the row alone; not on path, threads, company or chunking."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.kernels.cpu import CpuDevice
from headrace.kernels.device import KVShape, Rows
from headrace.kernels.ops import Act, Attend, Copy, Gather, Linear, Norm, Op, Rope, StoreKV
from helpers_kernels import (
    RNG,
    Cache,
    Seq,
    cpu,
    every_device,
    floats,
    pack,
    prompt,
    random_q4_1,
    rows_of,
    shuffled_slots,
)

WIDTH, HEADS, KV, DIM, FF, VOCAB = 96, 6, 2, 32, 224, 50
FREQS = tuple(10_000.0 ** (-i / 16) for i in range(16))


def layer_ops(window: int = 0, softcap: float = 0.0, kind: str = "silu", keep: float = 1.0) -> tuple[Op, ...]:
    return (
        Gather("x", "embed"), Norm("h", "x", "norm"), Linear("q", "h", "q"), Linear("k", "h", "k"),
        Linear("v", "h", "v"),
        Rope("q", HEADS, DIM, "half", FREQS), Rope("k", KV, DIM, "half", FREQS), StoreKV("k", "v"),
        Attend("a", "q", HEADS, KV, DIM, DIM**-0.5, window, softcap, keep, 1280),
        Linear("x", "a", "o", accumulate=True),
        Norm("f", "x", "norm"), Linear("g", "f", "gate"), Linear("u", "f", "up"), Act("g", "g", kind, up="u"),
        Linear("x", "g", "down", accumulate=True),
    )  # fmt: skip


class Layer:
    """One decoder layer with Q4_1 matrices on a device, with its cache."""

    def __init__(self, device: CpuDevice, bits: tuple[int, int] = (16, 16), scatter: bool = False, **more: Any) -> None:
        rng = RNG(11)
        shapes = {"q": (HEADS * DIM, WIDTH), "k": (KV * DIM, WIDTH), "v": (KV * DIM, WIDTH), "o": (WIDTH, HEADS * DIM),
                  "gate": (FF, WIDTH), "up": (FF, WIDTH), "down": (WIDTH, FF), "embed": (VOCAB, WIDTH)}  # fmt: skip
        self.weights = {k: pack(device, "Q4_1", *shape, random_q4_1(rng, *shape)) for k, shape in shapes.items()}
        self.weights["norm"] = floats(device, rng.normal(1, 0.1, WIDTH))
        self.bound = device.compile(layer_ops(**more), WIDTH).bind(self.weights)
        self.cache = Cache(device, KVShape(KV, DIM, *bits), 40, scatter)

    def run(self, rows: Rows) -> np.ndarray:
        return self.bound.run(np.zeros((rows.count, WIDTH), np.float32), rows, self.cache.layer)


def one_by_one(layer: Layer, slots: Sequence[int], count: int) -> np.ndarray:
    return np.concatenate([layer.run(rows_of([prompt(slots, p, p + 1)])) for p in range(count)])


def same(a: np.ndarray, b: np.ndarray) -> None:
    assert np.isfinite(a).all()
    assert a.tobytes() == b.tobytes(), f"{np.flatnonzero((a != b).any(1)).tolist()} of {len(a)} rows differ"


VARIANTS = [{}, {"window": 37}, {"softcap": 2.0}, {"kind": "gelu_erf"}, {"keep": 0.1}, {"keep": 0.3, "window": 270}]


@pytest.mark.parametrize("more", VARIANTS)
@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (8, 4)])
def test_prompt_chunks_paths_and_threads(more: dict[str, Any], bits: tuple[int, int]) -> None:
    """A prompt of 300 in chunks of 1, 16 and 300, on each path, on one and two threads."""
    slots = shuffled_slots(300, 20)
    want = one_by_one(Layer(cpu(1), bits, **more), slots, 300)
    for device in every_device():
        for chunk in (16, 300):
            layer = Layer(device, bits, scatter=True, **more)
            got = [layer.run(rows_of([prompt(slots, p, min(300, p + chunk))])) for p in range(0, 300, chunk)]
            same(want, np.concatenate(got))


@pytest.mark.parametrize("company", [1, 7, 63])
def test_a_row_alone_and_among_others(company: int) -> None:
    """One decode step of a long sequence beside other sequences of many lengths, before and after it."""
    slots = shuffled_slots(600, 20)
    lengths = [int(n) for n in RNG(12).integers(1, 9, company)]
    others = [list(range(640 + 10 * i, 640 + 10 * i + n)) for i, n in enumerate(lengths)]
    mine = prompt(slots, 555, 556)
    alone = Layer(cpu(1))
    alone.run(rows_of([prompt(slots, 0, 555)]))
    want = alone.run(rows_of([mine]))
    for device in every_device():
        layer = Layer(device)
        layer.run(rows_of([prompt(slots, 0, 555), *(prompt(o, 0, len(o) - 1) for o in others if len(o) > 1)]))
        company_rows = [prompt(o, len(o) - 1, len(o)) for o in others]
        middle = company // 2
        got = layer.run(rows_of([*company_rows[:middle], mine, *company_rows[middle:]]))
        same(want, got[middle : middle + 1])


@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
def test_guesses_read_what_plain_rows_would(bits: tuple[int, int]) -> None:
    """A chain of guesses across a chunk's border, in one run and beside wrong branches, equals plain decoding."""
    count, border = 262, 253
    slots = list(range(count))
    guesses = [400 + 3 * i for i in range(count - border)]
    token = {g: rows_of([prompt(slots, border + i, border + i + 1)]).token[0] for i, g in enumerate(guesses)}
    want = one_by_one(Layer(cpu(1), bits), slots, count)[border:]
    tree: list[tuple[int, list[int]]] = []
    for i in range(len(guesses)):
        tree += [(border, guesses[: i + 1]), (border, [*guesses[:i], 700 + i])]  # the right one, and a wrong sibling
    plan = rows_of([Seq(slots[:border], tree)])
    tokens = np.array([token.get(int(s), 13) for s in plan.slot], np.int32)
    plan = Rows(**{**plan.__dict__, "token": tokens})
    for device in every_device():
        layer = Layer(device, bits)
        layer.run(rows_of([prompt(slots, 0, border)]))
        same(want, layer.run(plan)[::2])


def test_where_pages_lie_and_which_slots_are_used_does_not_matter() -> None:
    plain = Layer(cpu(1)).run(rows_of([prompt(list(range(290)), 0, 290)]))
    slots = [1279 - s for s in range(290)]
    tokens = rows_of([prompt(list(range(290)), 0, 290)]).token
    rows = Rows(**{**rows_of([prompt(slots, 0, 290)]).__dict__, "token": tokens})
    same(plain, Layer(cpu(2), scatter=True).run(rows))


def test_long_context_is_split_over_chunks() -> None:
    """A single row at 1,200 positions: its partials are made by different threads."""
    slots = list(range(1201))
    results = []
    for device in every_device():
        if device.path == "portable" and device.threads == 2:
            continue  # slow, and nothing new
        layer = Layer(device)
        for start in range(0, 1200, 400):
            layer.run(rows_of([prompt(slots, start, start + 400)]))
        results.append(layer.run(rows_of([prompt(slots, 1200, 1201)])))
    for other in results[1:]:
        same(results[0], other)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux", reason="x86-64 Linux")
def test_float_mode_of_the_caller_does_not_matter() -> None:
    """A caller that flushes denormals (as some libraries do) gets them inside, and its own mode back."""
    libm = ctypes.CDLL("libm.so.6")
    saved, flushing = (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()  # glibc's fenv_t; MXCSR is its last word
    tiny = np.full((1, 8), 1e-39, np.float32)
    program = cpu(1).compile([Copy("h", "x"), Linear("x", "h", "w", accumulate=True)], 8)
    bound, rows = program.bind({"w": floats(cpu(1), np.eye(8, dtype=np.float32))}), rows_of([prompt([0], 0, 1)])
    libm.fegetenv(saved)
    libm.fegetenv(flushing)
    flushing[7] |= 0x8040
    libm.fesetenv(flushing)
    try:
        before = (tiny + tiny)[0, 0]
        got = bound.run(tiny.copy(), rows, None)
        after = (tiny + tiny)[0, 0]
    finally:
        libm.fesetenv(saved)
    assert before == 0 and after == 0
    assert (got == tiny + tiny).all() and got[0, 0] > 0


def test_threads_take_turns_and_devices_come_and_go() -> None:
    slots = list(range(40))
    want = Layer(cpu(1)).run(rows_of([prompt(slots, 0, 40)]))
    shared = cpu(2)
    layers = [Layer(shared) for _ in range(3)]
    found: list[np.ndarray] = []

    def work(layer: Layer) -> None:
        for _ in range(20):
            found.append(layer.run(rows_of([prompt(slots, 0, 40)])))

    threads = [threading.Thread(target=work, args=(layer,)) for layer in layers]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 60 and {f.tobytes() for f in found} == {want.tobytes()}
    for _ in range(50):
        cpu(2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_device_works_after_fork() -> None:
    layer = Layer(cpu(2))
    rows = rows_of([prompt(list(range(300)), 0, 300)])
    want = layer.run(rows)
    child = os.fork()
    if child == 0:
        try:
            ok = layer.run(rows_of([prompt(list(range(300)), 0, 300)])).tobytes() == want.tobytes()
            del layer
            os._exit(0 if ok else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    same(want, layer.run(rows))


def test_scratch_is_stated_and_kept() -> None:
    device = cpu(2)
    layer = Layer(device)
    shapes = {k: ("F32" if k == "norm" else "Q4_1", w.n, w.k) for k, w in layer.weights.items()}
    stated = device.scratch_nbytes(layer_ops(), WIDTH, 300, shapes)
    slots = list(range(1001))
    for start in range(0, 900, 300):
        layer.run(rows_of([prompt(slots, start, start + 300)]))
    assert 0 < device.arena_nbytes <= stated
    for p in range(900, 905):
        layer.run(rows_of([prompt(slots, p, p + 1)]))
    held = device.arena_nbytes
    for p in range(905, 915):
        layer.run(rows_of([prompt(slots, p, p + 1)]))
    assert device.arena_nbytes == held <= stated
