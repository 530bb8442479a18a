"""The plan that decides real runs: what it finds is what runs, budgets hold, what is pinned stays, text stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import headrace
from headrace import measured, planning
from headrace.errors import BadFile, BadRequest, HeadraceError, OverBudget
from headrace.kernels.dispatch import make_device
from headrace.memory.kv_disk import DiskKV
from headrace.memory.stream import Streamed
from headrace.model.layers import Model, load_model
from headrace.options import Choice, Options
from headrace.placement import open_file
from headrace.plan.machine import Compute, Link, Machine, Tier
from headrace.plan.sizes import Workload
from helpers_tiny import tiny_model

DEVICE = make_device(threads=1)
WORK = Workload(48, 16, 8)
CURVE = ((1, 1e10), (16, 4e10), (256, 5e10))


def a_machine(read: float = 1e8, small: float = 1e-5) -> Machine:
    compute = Compute("host", CURVE, 1e10, 5e9, 1e-5, {"Q4_0": CURVE}, {"8/4": (9e9, 4e9)}, 1e-6, 1e-9, 1e-5)
    links = (Link("disk", "host", read, small, "disk"), Link("host", "disk", read / 2, small, "disk"))
    tiers = (Tier("host", 1 << 34, 8e9, 8e9), Tier("disk", 1 << 40, read, read / 2))
    return Machine("test", tiers, links, (compute,))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 40 MB, so that budgets are about weights and not about the interpreter."""
    return tiny_model(tmp_path_factory.mktemp("model") / "big.gguf", fmt="F32", blocks=32, ffn=768, text=True)


@pytest.fixture(scope="module")
def model(big: Path) -> Iterator[Model]:
    with open_file(big, Options()) as file:
        yield load_model(file)


@pytest.fixture
def machine_file(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(a_machine().to_json())
    return path


def planner(model: Model, ram: int, work: Workload = WORK, **changes: object) -> planning.Planner:
    choice = Choice(work, **{k: changes.pop(k) for k in ("objective", "free") if k in changes})  # type: ignore[arg-type]
    options = Options(ram=ram, context=96, choice=choice)
    return planning.Planner(DEVICE, model, replace(options, **changes), a_machine())  # type: ignore[arg-type]


def whole(model: Model) -> int:
    """Bytes that nothing has to stream with."""
    sizes = planning.Sizes(DEVICE, model)
    return sizes.program + sizes.total + (24 << 20)


def test_everything_that_is_found_fits_and_the_best_is_first(model: Model) -> None:
    p = planner(model, whole(model) - (20 << 20), kv_disk=None)
    found = p.all()
    assert len(found) > 50 and any(s.streamed for s in found)
    for s in found:
        memory = s.candidate.prediction.memory
        assert sum(memory["host"].values()) <= p.options.ram
        assert ("packed weights" in memory["disk"]) == (s.streamed > 0)
        assert sum(place.streams for place in s.candidate.plan.places) == s.streamed
    seconds = [s.candidate.seconds for s in found]
    assert seconds == sorted(seconds)


def test_nothing_streams_where_everything_fits(model: Model) -> None:
    best = planner(model, whole(model) + (64 << 20)).best()[0]
    assert best.streamed == 0 and best.options.kv_disk is None


def test_less_memory_is_never_faster(model: Model) -> None:
    most = whole(model) + (8 << 20)
    seconds = [planner(model, most - (i << 20)).all()[0].candidate.seconds for i in range(0, 40, 8)]
    assert seconds == sorted(seconds)
    found, _ = planner(model, most - (32 << 20)).search()
    assert {g.what for g in found.gains} == {"+1 GB of memory", "disk twice as fast"}
    assert all(g.ratio >= 0.99 for g in found.gains) and found.gains[0].ratio > 1.05
    assert len(found.others) == 5 and all(c.why for c in found.others)


def test_what_is_pinned_stays(model: Model) -> None:
    free = frozenset({"caches"})
    p = planner(model, whole(model) - (16 << 20), free=free, rows=40, runs=3, sequences=5)
    assert {(s.options.rows, s.options.runs, s.options.sequences) for s in p.all()} == {(40, 3, 5)}
    places = planning.percent_places(model, (0, 50, 0, 100, 0, 100))
    p = planner(model, whole(model), places=places)
    assert {s.streamed for s in p.all()} == {16}


def test_too_little_memory_is_refused_with_numbers(model: Model) -> None:
    with pytest.raises(OverBudget, match="MiB"):
        planner(model, 80 << 20).all()


def test_percent_to_within_half_a_layer(model: Model) -> None:
    for wc in (0, 33, 50, 99, 100):
        places = planning.percent_places(model, (0, wc, 0, 100, 0, 100))
        stay = sum(p.weights == "host" for p in places[1:-1])
        assert abs(stay / 32 - wc / 100) <= 0.5 / 32 + 1e-9
    with pytest.raises(BadRequest, match="--device-ram"):
        planning.percent_places(model, (20, 80, 0, 100, 0, 100))


@pytest.mark.parametrize("ram", [0.2, 0.6])
def test_the_plan_runs_and_the_text_stays(
    big: Path, model: Model, machine_file: Path, tmp_path: Path, ram: float
) -> None:
    prompts = [[3 + (i * 7 + j) % 200 for j in range(20 + 5 * i)] for i in range(6)]
    with headrace.load(big, threads=1, context=96) as plain:
        wanted = [c.tokens for c in plain.generate(prompts, max_tokens=8, ignore_eos=True)]
    sizes = planning.Sizes(DEVICE, model)
    choice = Choice(Workload(32, 8, 6), free=frozenset({"rows", "runs", "sequences", "caches"}), machine=machine_file)
    limit = sizes.program + (20 << 20) + int(sizes.total * ram)
    with headrace.load(big, threads=1, context=96, ram=limit, choice=choice, packs=tmp_path) as engine:
        assert isinstance(engine.parts.weights, Streamed) and engine.parts.expect is not None
        assert [c.tokens for c in engine.generate(prompts, max_tokens=8, ignore_eos=True)] == wanted
        expected = engine.parts.expect(Workload(32, 8, 6))
        assert expected.tokens_per_s > 0 and expected.total >= engine.parts.expect(Workload(32, 8, 3)).total


def test_a_printed_plan_runs_again(big: Path, model: Model, machine_file: Path, tmp_path: Path) -> None:
    p = planner(model, whole(model) - (24 << 20))
    shape = next(s for s in p.all() if s.options.kv_disk is not None and s.streamed)
    (tmp_path / "plan.json").write_text(json.dumps({"plan": json.loads(shape.candidate.plan.to_json()), "more": 1}))
    plan = planning.read_plan(tmp_path / "plan.json")
    assert plan == shape.candidate.plan
    options = planning.pinned(Options(context=96, packs=tmp_path, kv_disk=tmp_path), plan)
    with headrace.load(big, options, threads=1) as engine:
        order = engine.head.order
        assert (order.rows, order.runs, order.sequences) == (plan.most, shape.options.runs, plan.sequences)
        assert isinstance(engine.parts.computer.cache, DiskKV) and engine.parts.computer.cache.frames == plan.frames
        assert len(engine.parts.weights.order) == shape.streamed
        assert engine.generate([[5, 6, 7]], max_tokens=4, ignore_eos=True)[0].finish == "length"


def test_a_plan_for_another_model_is_refused(big: Path, tmp_path: Path, model: Model) -> None:
    plan = planner(model, whole(model)).best()[0].candidate.plan
    other = tiny_model(tmp_path / "other.gguf", text=True)
    with pytest.raises(HeadraceError, match="34"):
        headrace.load(other, planning.pinned(Options(context=96), plan))
    for text in ("{", "[]", '{"plan": {"version": 9}}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(BadFile, match=r"bad\.json"):
            planning.read_plan(tmp_path / "bad.json")


def test_nothing_is_measured_where_nothing_is_to_be_decided(big: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: object, **more: object) -> Machine:
        raise AssertionError("measured")

    monkeypatch.setattr(measured, "machine", never)
    choice = Choice(Workload(32, 8, 6))
    for ram in (None, 8 << 30):
        with headrace.load(big, threads=1, context=96, ram=ram, choice=choice, caches=6, sequences=6) as engine:
            assert engine.parts.expect is None and engine.head.order.rows == 512


def test_a_configuration_alone_can_be_planned(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "torch_dtype": "float16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_file(tmp_path / "config.json", Options()) as file:
        sizes = [
            sum(
                p.nbytes
                for layer in planning.imagined(file, **kind).layers
                for p in layer.tensors.values()
                if not p.shares
            )
            for kind in ({}, {"requant": "q8"}, {"fmt": "Q4_K"}, {"requant": "q4"})
        ]
        assert sizes == sorted(sizes, reverse=True) or sizes[0] > sizes[1] > sizes[3] > sizes[2]
        model = planning.imagined(file, requant="q4")
        assert model.layers[1].tensors["attn_q"].fmt == "Q4_K" and model.layers[0].tensors["token_embd"].fmt == "Q8_0"
        best = planner(model, 8 << 30, Workload(64, 16, 4)).best()[0]
        assert best.candidate.prediction.tokens_per_s > 0


def test_the_machine_is_kept_and_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured.probe, "BEYOND_CACHES", 1 << 20)
    monkeypatch.setattr(measured.probe, "ROWS", (1, 16))
    monkeypatch.setattr(measured, "FILE_BYTES", 16 << 20)
    monkeypatch.setattr(measured.probe, "WIDTH", 256)
    monkeypatch.setattr(measured.system, "load", lambda: 0.5)
    told: list[str] = []
    assert measured.kept(DEVICE, tmp_path) is None
    first = measured.machine(DEVICE, tmp_path, ["Q8_0"], tell=told.append)
    assert len(told) == 1 and first.name == measured.name_of(DEVICE) and first.computes[0].row > 0
    assert measured.machine(DEVICE, tmp_path, ["Q8_0"], tell=told.append) == first and len(told) == 1
    more = measured.machine(DEVICE, tmp_path, ["Q4_0"], (8, 4))
    assert set(more.computes[0].formats) == {"Q8_0", "Q4_0"} and "8/4" in more.computes[0].attends
    assert measured.kept(DEVICE, tmp_path) == more
    fast = measured.machine(DEVICE, tmp_path, ["Q4_0"], (8, 4), disk_rate=3e9)
    assert fast.tier("disk").read == pytest.approx(3e9) and measured.kept(DEVICE, tmp_path) == more
    # Measured beside others' work it is marked, holds while they go on, and is measured again afterwards.
    monkeypatch.setattr(measured.system, "load", lambda: 3.0)
    busy = measured.machine(DEVICE, tmp_path, ["Q8_0"], again=True)
    assert "3.0 programs a core" in busy.sources["load"] and measured.kept(DEVICE, tmp_path) == busy
    monkeypatch.setattr(measured.system, "load", lambda: 0.5)
    assert measured.kept(DEVICE, tmp_path) is None
    assert "load" not in measured.machine(DEVICE, tmp_path, ["Q8_0"]).sources
    assert measured.where(make_device(threads=3), tmp_path) != measured.where(make_device(threads=2), tmp_path)
    path = measured.where(DEVICE, tmp_path)
    path.write_text("{}")
    assert measured.kept(DEVICE, tmp_path) is None
    with pytest.raises(BadFile, match=path.name):
        measured.read(path)
    assert not list(tmp_path.glob(".probe*"))
