"""Invariant 1 on whole models, as bytes of logits: rows, threads, chunks and CPU paths change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.formats.tensor import KNOWN
from headrace.kernels.device import Rows
from headrace.kernels.dispatch import make_device
from helpers_kernels import paths
from helpers_model import Caches, Loaded, i32, load, logits_of, step
from helpers_tiny import VOCAB, tiny_model

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, VOCAB, 70)]


def device(threads: int, path: str):  # type: ignore[no-untyped-def]
    try:
        return make_device("cpu", threads=threads, cpu=path)
    except Exception as error:  # an aarch64 machine has no AVX2
        pytest.skip(f"{path}: {error}")


def together(loaded: Loaded, others: int, bits: tuple[int, int]) -> np.ndarray:
    """Logits of the last token of TOKENS, its row among ``others`` rows of other sequences in the same run."""
    count = len(TOKENS)
    caches = Caches(loaded, (count + 8) * (others + 1), *bits)
    random = np.random.default_rng(others)
    prompts = [TOKENS, *([int(t) for t in random.integers(0, VOCAB, random.integers(1, 8))] for _ in range(others))]
    at, slots = 0, []
    for prompt in prompts:
        slots.append(np.arange(at, at + len(prompt)))
        at += len(prompt)
        head = prompt[:-1]
        if head:
            step(loaded, rows_of([(head, slots[-1])], every=True), caches)
    return step(loaded, rows_of([(p, s) for p, s in zip(prompts, slots, strict=True)], every=False), caches)[0]


def rows_of(sequences: list[tuple[list[int], np.ndarray]], every: bool) -> Rows:
    """All rows of one sequence, or the last row of each."""
    table, lists, at = [], [], 0
    for tokens, slots in sequences:
        for i in range(len(tokens)) if every else [len(tokens) - 1]:
            table.append((tokens[i], i, slots[i], at, i + 1, 0, 0))
        lists.append(slots)
        at += len(slots)
    token, position, slot, base, base_len, extra, extra_len = (i32(c) for c in zip(*table, strict=True))
    wanted = i32([len(table) - 1] if every else [0])
    return Rows(token, position, slot, base, base_len, extra, extra_len, i32(np.concatenate(lists)), wanted)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("invariance")
    return {fmt: tiny_model(folder / f"{fmt}.gguf", fmt, blocks=2) for fmt in ("Q4_0", "Q4_1", "Q8_0", "F16", "BF16")}


@pytest.mark.parametrize("fmt", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_every_way_to_compute_gives_the_same_bytes(models: dict[str, Path], fmt: str) -> None:
    assert fmt in KNOWN
    truth = logits_of(load(models[fmt], device(1, "portable")), TOKENS, device(1, "portable"), chunk=1)
    for path in paths():
        for threads in (1, 2):
            made = device(threads, path)
            loaded = load(models[fmt], made)
            for chunk in (1, 16, None):
                found = logits_of(loaded, TOKENS, made, chunk=chunk, shuffle=chunk)
                assert found.tobytes() == truth.tobytes(), f"{path}, {threads} threads, chunks of {chunk}"


@pytest.mark.parametrize("bits", [(16, 16), (8, 8), (8, 4)])
@pytest.mark.parametrize("others", [1, 7, 64])
def test_a_row_alone_equals_it_among_others(models: dict[str, Path], others: int, bits: tuple[int, int]) -> None:
    for path in paths():
        made = device(2, path)
        loaded = load(models["Q4_1"], made)
        assert together(loaded, others, bits).tobytes() == together(loaded, 0, bits).tobytes()


@pytest.mark.slow
def test_the_demo_model_in_chunks_of_1_16_and_512() -> None:
    from headrace.config import resolve
    from headrace.store.known import DEMO, fetch

    path = fetch(DEMO, resolve().cache)
    tokens = [int(t) for t in np.random.default_rng(1).integers(100, 40000, 512)]
    truth = None
    for cpu, threads, chunk in (("avx2", 2, 512), ("avx2", 1, 16), ("", 2, 512), ("", 2, 1), ("portable", 2, 512)):
        made = device(threads, cpu)
        found = logits_of(load(path, made), tokens, made, chunk=chunk)[-64:].tobytes()
        truth = truth or found
        assert found == truth, f"{cpu}, {threads} threads, chunks of {chunk}"
