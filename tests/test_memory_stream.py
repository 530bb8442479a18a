"""Streaming: the same bytes as resident, within the budget, refused before loading when nothing fits."""

from __future__ import annotations

import errno
import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import placement, setup
from headrace.engine import load
from headrace.errors import BadFile, OverBudget
from headrace.formats import files, index
from headrace.formats.index import Derived, open_model
from headrace.formats.requant import requantise
from headrace.kernels.dispatch import make_device
from headrace.memory.budget import Budget
from headrace.memory.stream import Streamed, evenly, pack
from headrace.memory.weights import Resident
from headrace.model.layers import Model, load_model
from headrace.options import Options
from headrace.placement import place
from helpers_chat import SMALL, chat_model
from helpers_tiny import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(open_model(tiny_model(tmp_path_factory.mktemp("stream") / "tiny.gguf", "Q4_1", blocks=9)))


def names_and_bytes(weights: Resident | Streamed, layer: int, model: Model) -> dict[str, bytes]:
    """Each tensor's first row, read through the device's own handle."""
    found = {}
    with weights.hold(layer) as held:
        for name, plan in model.layers[layer].tensors.items():
            row = np.empty(plan.k, np.float32)
            for r in (0, plan.n - 1):
                held[name].row(r, row)
                found[f"{name}.{r}"] = row.tobytes()
    return found


def test_what_stays_is_not_in_the_page_cache_too_where_layers_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a memory cgroup the page cache counts: resident layers would be there twice."""
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr(files, "drop_cached", lambda fd, offset, size: dropped.append((offset, offset + size)))
    monkeypatch.setattr(index, "drop_cached", files.drop_cached)
    device = make_device("cpu", threads=1)
    path = tiny_model(tmp_path / "tiny.gguf", "Q4_1", blocks=4)
    with open_model(path) as file:
        Resident(device, load_model(file), range(6))
        assert not dropped
    for opened in (
        open_model(path),
        requantise(open_model(tiny_model(tmp_path / "bf16.gguf", "BF16", blocks=4)), "q8"),
    ):
        with opened as file:
            model = load_model(file)
            pack(device, model, [2], tmp_path / file.digest())
            dropped.clear()
            Resident(device, model, [1, 3])
            source = file.source if isinstance(file, Derived) else file
            for key in ("blk.0.ffn_down.weight", "blk.2.attn_q.weight"):
                t = source.tensors[key]
                assert (
                    sum(high - low for low, high in dropped if t.offset <= low and high <= t.offset + t.nbytes)
                    == t.nbytes
                )


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_streamed_layers_hold_the_same_bytes_in_any_order_of_use(model: Model, buffers: int, tmp_path: Path) -> None:
    device = make_device("cpu", threads=1)
    every = range(len(model.layers))
    blocks = [i for i in every if model.layers[i].kv is not None]
    packed = pack(device, model, blocks, tmp_path)
    resident = Resident(device, model, every)
    truth = {i: names_and_bytes(resident, i, model) for i in every}
    streamed = [blocks[i] for i in evenly(5, len(blocks))]
    weights = Streamed(device, model, every, streamed, packed, buffers)
    for layer in (*every, *every, 4, 2, 8, 8, 1, *every):
        assert names_and_bytes(weights, layer, model) == truth[layer]
    extents = [packed.layers[model.layers[i].key].nbytes for i in streamed]
    assert weights.read_bytes >= 3 * sum(extents)
    assert weights.nbytes < resident.nbytes
    weights.close()


def test_the_reads_ahead_are_bounded_and_counted(model: Model, tmp_path: Path) -> None:
    device = make_device("cpu", threads=1)
    blocks = [i for i, layer in enumerate(model.layers) if layer.kv is not None]
    packed = pack(device, model, blocks, tmp_path)
    weights = Streamed(device, model, blocks, blocks, packed, 2)
    passes = 4
    for _ in range(passes):
        for i in blocks:
            with weights.hold(i):
                pass
    weights.close()
    one = sum(packed.layers[model.layers[i].key].nbytes for i in blocks)
    most_ahead = 2 * max(packed.layers[model.layers[i].key].nbytes for i in blocks)
    assert passes * one <= weights.read_bytes <= passes * one + most_ahead


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), OSError(errno.EACCES, "Permission denied")]
)
def test_a_failing_disk_is_one_error_and_costs_no_buffer(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """Whatever layer's read fails, the error names the file, and the layer can be asked for again."""
    device = make_device("cpu", threads=1)
    blocks = [i for i, layer in enumerate(model.layers) if layer.kv is not None]
    packed = pack(device, model, blocks, tmp_path)
    weights = Streamed(device, model, blocks, blocks, packed, 2)
    truth = {i: names_and_bytes(weights, i, model) for i in blocks}
    read, broken = files._pread, set[int]()

    def failing(fd: int, out: memoryview, offset: int) -> int:
        if offset in broken:
            raise error
        return read(fd, out, offset)

    monkeypatch.setattr(files, "_pread", failing)
    for i in (*blocks, *blocks):
        broken.add(packed.layers[model.layers[i].key].offset)
        names_and_bytes(weights, blocks[blocks.index(i) - 1], model)  # what was read ahead before is dropped
        for _ in range(5):  # more often than there are buffers
            with pytest.raises(BadFile) as e, weights.hold(i):
                pytest.fail("the layer can't be there")
            assert str(packed.path) in str(e.value) and "\n" not in str(e.value)
        broken.clear()
        assert names_and_bytes(weights, i, model) == truth[i]
    weights.close()


def test_a_run_over_a_failing_disk_ends_in_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(fd: int, out: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(setup, "place", lambda *args, **more: [1, 2, 3, 4])
    with load(chat_model(tmp_path / "tiny.gguf", blocks=4), packs=tmp_path, **SMALL) as engine:
        assert isinstance(engine.parts.weights, Streamed)
        monkeypatch.setattr(files, "_pread", failing)
        with pytest.raises(BadFile, match=r"\.pack: reading the file failed \(Input/output error\); check the disk"):
            engine.generate(["abcabc"], max_tokens=40)


@given(st.integers(0, 60), st.integers(1, 60))
def test_evenly(count: int, total: int) -> None:
    count = min(count, total)
    chosen = evenly(count, total)
    assert len(set(chosen)) == count and all(0 <= i < total for i in chosen) and chosen == sorted(chosen)
    gaps = [b - a for a, b in itertools.pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_placement_fits_every_budget_or_refuses(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "resident_now", lambda: 100 << 20)
    device = make_device("cpu", threads=1)
    options = Options(rows=8)
    free = Budget(None)
    assert place(free, device, model, 4, options) == []
    fixed = free.used - free.items["weights"]
    smallest = None
    for limit in range(fixed, free.used + 20000, 10000):
        budget = Budget(limit)
        try:
            streamed = place(budget, device, model, 4, Options(rows=8, ram=limit))
        except OverBudget as error:
            assert smallest is None, "a larger budget was refused after a smaller one was taken"
            assert "--kv-bits" in str(error)
            continue
        smallest = smallest or limit
        assert budget.used <= limit
        assert bool(streamed) == (limit < free.used)
    assert smallest is not None and smallest < free.used


def test_each_layer_is_packed_once_whoever_streams_it(model: Model, tmp_path: Path) -> None:
    """Ranks pack their own layers; a file of the whole model that is there already serves them all."""
    device = make_device("cpu", threads=1)
    blocks = [i for i in range(len(model.layers)) if model.layers[i].kv is not None]
    parts = blocks[:4], blocks[4:7], blocks[7:]
    made = [pack(device, model, part, tmp_path / "ranks") for part in parts]
    assert len({packed.path for packed in made}) == 3
    keys = [key for packed in made for key in packed.layers]
    assert sorted(keys) == sorted(model.layers[i].key for i in blocks)
    before = {packed.path: packed.path.stat().st_mtime_ns for packed in made}
    assert [pack(device, model, part, tmp_path / "ranks").path for part in parts] == list(before)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    whole = pack(device, model, blocks, tmp_path / "shared")
    assert all(pack(device, model, part, tmp_path / "shared").path == whole.path for part in parts)
    assert [p.suffix for p in (tmp_path / "shared").iterdir()] == [".pack"]
    resident = Resident(device, model, parts[1])
    weights = Streamed(device, model, parts[1], parts[1], pack(device, model, parts[1], tmp_path / "shared"))
    for layer in parts[1]:
        assert names_and_bytes(weights, layer, model) == names_and_bytes(resident, layer, model)
    weights.close()
