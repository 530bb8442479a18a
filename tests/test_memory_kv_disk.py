"""A KV cache on disk: the same bytes as one in memory, whatever the order of use, within its frames."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import placement, setup
from headrace.engine import Engine, load
from headrace.errors import BadFile, BadRequest, OverBudget, Unavailable
from headrace.formats.files import ScratchFile
from headrace.kernels.device import PAGE, KVShape, Rows
from headrace.memory.kv_disk import DiskKV, least_frames
from headrace.run.types import Sampling
from helpers_chat import LETTERS, chat_model

LAYERS = 3
SHAPES = {1 + i: KVShape(2, 32) for i in range(LAYERS)}


class Device:
    """A device whose cache is 64 bytes a slot: it writes a number there and reads it back."""

    def page_nbytes(self, shape: KVShape) -> int:
        return PAGE * 64

    def kv_layer(self, shape: KVShape, pages: np.ndarray) -> np.ndarray:
        return pages


def cell(table: np.ndarray, slot: int) -> Any:
    assert table[slot // PAGE] != 0, "a page that is needed isn't in memory"
    return ctypes.c_int64.from_address(int(table[slot // PAGE]) + slot % PAGE * 64)


def rows_of(tables: list[list[int]], new: list[int]) -> Rows:
    """A run of some sequences, of each its last ``new`` slots as rows."""
    lists = np.array([s for table in tables for s in table], np.int32)
    slot = np.array([s for table, n in zip(tables, new, strict=True) for s in table[len(table) - n :]], np.int32)
    empty = np.empty(0, np.int32)
    return Rows(slot, slot, slot, empty, empty, empty, empty, lists, empty)


class Checked:
    """A DiskKV, and what its slots must hold."""

    def __init__(self, pages: int, frames: int, folder: Path) -> None:
        self.cache = DiskKV(Device(), SHAPES, pages, frames, folder)  # type: ignore[arg-type]
        self.truth: dict[tuple[int, int], int] = {}
        self.count = 0

    def step(self, layer: int, rows: Rows) -> None:
        assert self.cache.layer(0, rows) is None
        table = self.cache.layer(layer, rows)
        assert np.count_nonzero(self.cache._table) <= self.cache.frames
        for slot in rows.slot.tolist():
            self.count += 1
            self.truth[layer, slot] = self.count
            cell(table, slot).value = self.count
        for slot in rows.lists.tolist():
            assert cell(table, slot).value == self.truth[layer, slot]


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[Any]:
    made: list[Checked] = []

    def make(pages: int, frames: int) -> Checked:
        made.append(Checked(pages, frames, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.cache.close()
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), st.booleans(), st.booleans())
def test_every_slot_reads_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, seed: int, spare: int, orderly: bool, guesses: bool
) -> None:
    """Sequences that grow by prompts and tokens, end, and leave their pages to others; runs in any order."""
    chance = random.Random(seed)
    pages, most, sequences, together = 16, 4, 4, 2
    frames = min(LAYERS * pages, least_frames(LAYERS, pages, together * most, sequences) + spare)
    check = Checked(pages, frames, tmp_path_factory.mktemp("kv"))
    free = list(range(pages - 1, -1, -1))
    live: list[tuple[list[int], list[int]]] = []  # (pages, slots)
    for _ in range(16):
        while len(live) < sequences and len(free) >= most:
            live.append(([free.pop() for _ in range(most)], []))
        block = []
        for at in range(0, len(live), together):
            new = []
            for own, slots in live[at : at + together]:
                count = min(chance.choice([1, 1, 1, 40]), most * PAGE - len(slots))
                if guesses and slots and chance.random() < 0.3:
                    del slots[-1]  # a guess that was wrong: its slot is taken again
                    count += 1
                slots.extend(own[i // PAGE] * PAGE + i % PAGE for i in range(len(slots), len(slots) + count))
                new.append(count)
            block.append(rows_of([list(slots) for _, slots in live[at : at + together]], new))
        order = [(layer, rows) for layer in SHAPES for rows in block]
        if not orderly:  # runs may pass each other at different layers, as in a pipeline
            order = sorted(order, key=lambda step: (step[0] + 2 * chance.random(), id(step[1])))
            order = [s for rows in block for s in order if s[1] is rows]
        for layer, rows in order:
            check.step(layer, rows)
        for one in [s for s in live if len(s[1]) == most * PAGE or chance.random() < 0.1]:
            live.remove(one)
            free.extend(one[0])
    check.cache.close()


def decode(check: Checked, sequences: list[list[int]], blocks: list[list[int]], passes: int) -> list[int]:
    """Passes of one token a sequence; bytes read in each."""
    read = []
    for _ in range(passes):
        before = check.cache.read_bytes
        runs = []
        for members in blocks:
            for s in members:
                sequences[s].append(sequences[s][-1] + 1)
            runs.append(rows_of([sequences[s] for s in members], [1] * len(members)))
        for layer in SHAPES:
            for rows in runs:
                check.step(layer, rows)
        read.append(check.cache.read_bytes - before)
    return read


def test_what_stays_is_not_read_again_and_what_comes_is_read_ahead(checked: Any) -> None:
    """Six sequences of 8 pages in 3 layers: 144 extents a pass, 90 of them in frames."""
    check = checked(60, 90)
    sequences = [list(range(10 * PAGE * s, 10 * PAGE * s + 8 * PAGE - 20)) for s in range(6)]
    for s in range(6):
        rows = rows_of([sequences[s]], [len(sequences[s])])
        for layer in SHAPES:
            check.step(layer, rows)
    late: list[int] = []
    bring = check.cache._bring
    check.cache._bring = lambda e: (late.append(int((check.cache._frame[e] < 0).sum())), bring(e))[1]
    read = decode(check, sequences, [[0, 1], [2, 3], [4, 5]], 8)
    extents = [r // check.cache.stride for r in read[2:]]
    assert all(144 - 90 <= n <= 144 - 90 + 40 for n in extents), extents
    assert sum(late[18:]) <= 0.1 * sum(extents), "read only when it was needed"


def test_a_page_is_written_once(checked: Any) -> None:
    check = checked(8, 14)
    sequence = [0]
    check.step(1, rows_of([sequence], [1]))
    for layer in (2, 3):
        check.step(layer, rows_of([sequence], [1]))
    decode(check, [sequence], [[0]], 4 * PAGE - 1)
    check.cache._settle()
    for extent in list(check.cache._writes):
        check.cache._arrived(check.cache._writes, extent)
    assert check.cache.written_bytes == LAYERS * 4 * check.cache.stride


def test_too_few_frames_are_an_error_with_numbers(checked: Any) -> None:
    check = checked(8, 4)
    rows = rows_of([list(range(5 * PAGE))], [5 * PAGE])
    with pytest.raises(OverBudget, match=r"needs 5 pages .* 4 frames"):
        check.step(1, rows)


def test_a_disk_that_fails_is_told(checked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check = checked(8, 10)
    check.cache._file.close()
    check.cache._file = ScratchFile(Path("/dev/shm") if Path("/dev/shm").is_dir() else Path("/tmp"), 4096)
    monkeypatch.setattr("os.pwritev", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    sequence = list(range(4 * PAGE))
    with pytest.raises(Unavailable, match="No space"):
        for _ in range(5):
            for layer in SHAPES:
                check.step(layer, rows_of([sequence], [4 * PAGE]))


# --- in an engine ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("kv") / "tiny.gguf", blocks=3)


def texts(engine: Engine, count: int) -> list[Any]:
    """Some prompts' texts with their log-probabilities, exactly."""
    bias = tuple((int(t), float(b)) for t, b in LETTERS.items())
    jobs = []
    for i in range(count):
        sampling = Sampling(temperature=1.0, seed=i, bias=bias, logprobs=3)
        jobs.append(engine.submit(f"{i} " + "word " * (11 * i % 37), 24 + 7 * (i % 3), sampling))
    while not all(job.finish for job in jobs):
        engine.work()
    return [(job.tokens, [c.logprob for c in job.choices], job.finish) for job in jobs]


@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
def test_an_engine_writes_the_same_text_with_its_cache_on_disk(
    model: Path, tmp_path: Path, bits: tuple[int, int]
) -> None:
    usual = {"threads": 1, "context": 256, "kv_bits": bits, "sequences": 6, "caches": 6}
    with load(model, **usual) as engine:
        truth = texts(engine, 12)
    for rows, runs in ((3, 4), (2, 1)):
        frames = least_frames(3, 48, rows * 8, 6)
        with load(model, **usual, rows=rows, runs=runs, kv_disk=tmp_path, kv_frames=frames) as engine:
            assert texts(engine, 12) == truth
            cache = engine.parts.computer.cache
            assert isinstance(cache, DiskKV) and cache.read_bytes > 0 and cache.written_bytes > 0
            assert list(tmp_path.iterdir()) == []
            assert engine.parts.budget.items["KV cache"] == cache.nbytes < 48 * 3 * cache.stride


def test_what_cant_be_is_refused_before_loading(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **more: Any) -> None:
        raise AssertionError("it was loaded")

    monkeypatch.setattr(setup, "load_weights", never)
    usual: dict[str, Any] = {"threads": 1, "context": 256, "sequences": 10, "caches": 10, "rows": 3}
    few = least_frames(3, 80, 24, 10) - 1
    with pytest.raises(OverBudget, match=rf"{few} frames .* needs {few + 1} "):
        load(model, **usual, kv_disk=tmp_path, kv_frames=few)
    with pytest.raises(BadRequest, match="--kv-disk"):
        load(model, **usual, kv_frames=100)
    with pytest.raises(BadFile, match="no such folder"):
        load(model, **usual, kv_disk=tmp_path / "none")
    monkeypatch.setattr("headrace.memory.kv_disk.free_bytes", lambda folder: 1 << 20)
    with pytest.raises(Unavailable, match="another folder"):
        load(model, **usual, kv_disk=tmp_path)


def test_a_cache_that_fits_its_frames_stays_in_memory(model: Path, tmp_path: Path) -> None:
    with load(model, threads=1, context=64, sequences=1, kv_disk=tmp_path) as engine:
        assert not isinstance(engine.parts.computer.cache, DiskKV)


def test_room_for_sequences_comes_from_the_disk(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"threads": 1, "context": 256, "sequences": 64, "caches": 0, "rows": 4}
    with load(model, **options, kv_disk=tmp_path) as engine:
        assert engine.head.pool.total == 64 * 8
    one = 3 * 8 * 8192
    monkeypatch.setattr(placement, "free_bytes", lambda folder: 21 * one)
    with load(model, **options, kv_disk=tmp_path) as engine:
        assert engine.head.pool.total == 10 * 8
