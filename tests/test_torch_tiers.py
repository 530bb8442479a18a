"""Device, host and disk: wherever layers, caches and weights lie, the bytes of ``torch:cpu`` alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from headrace.engine import Engine  # noqa: E402
from headrace.errors import BadFile, OverBudget, Unsupported  # noqa: E402
from headrace.formats.index import open_model  # noqa: E402
from headrace.kernels.torch_device import TorchDevice  # noqa: E402
from headrace.memory.budget import Budget  # noqa: E402
from headrace.memory.link import Pace  # noqa: E402
from headrace.model.layers import Model, load_model  # noqa: E402
from headrace.options import Options  # noqa: E402
from headrace.plan.plan import Place  # noqa: E402
from headrace.run import compute, placing, tiers  # noqa: E402
from headrace.run.stage import Stage  # noqa: E402
from headrace.run.types import Append, Cancel, Params, Row, RunMessage, Sampling, Step  # noqa: E402
from headrace.setup import build  # noqa: E402
from headrace.text.tokenizer import Tokenizer  # noqa: E402
from helpers_tiny import HEAD, HEADS, KV_HEADS, VOCAB, WIDTH, tiny_model  # noqa: E402

BLOCKS = 6
PACE = Pace(60e6, 20e-6)
"""12 GB/s beside host memory of 20 GB/s, scaled to a model of 200 kB."""


def place(weights: str, compute: str = "device", kv: str = "device") -> Place:
    return Place(weights, compute, kv, kv)


D, H, K = place("device"), place("host"), place("disk")
DA, HA, KA = (place(w, kv="host") for w in ("device", "host", "disk"))
C, CK = place("host", "host", "host"), place("disk", "host", "host")

PLACEMENTS: dict[str, list[Place]] = {
    "all three": [C, D, H, K, HA, KA, D, H],
    "weights cross": [H] * (BLOCKS + 2),
    "weights from disk, host attention": [C, *[KA] * BLOCKS, D],
    "computed at the host by turns": [D, C, D, CK, DA, CK, C, H],
    "all at the host": [C] * (BLOCKS + 2),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiers") / "t.gguf", "Q4_1", blocks=BLOCKS, text=True)


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with open_model(path) as file:
        yield load_model(file)


class Seen:
    """Logits of every choice, as bytes, and rows of every run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: list[bytes] = []
        real = tiers.choose

        def choose(device: Any, logits: Any, run: Any) -> Any:
            self.logits.append(logits.tobytes())
            return real(device, logits, run)

        for module in (tiers, compute):
            monkeypatch.setattr(module, "choose", choose)


PROMPTS = ["a prompt of some length, longer than one run of sixteen", "and one more", "x"]


def options(places: Sequence[Place] | None, packs: Path, **more: Any) -> Options:
    return Options(
        device="torch:cpu", threads=1, context=128, caches=3, rows=16, runs=2, packs=packs,
        places=None if places is None else tuple(places), **more,
    )  # fmt: skip


def by_row(logits: Sequence[bytes]) -> list[bytes]:
    return sorted(raw[i : i + 4 * VOCAB] for raw in logits for i in range(0, len(raw), 4 * VOCAB))


def test_caches_and_residual_rows_on_the_disk_give_the_same_bytes(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    alone, _ = work(path, options(None, tmp_path))
    truth = seen.logits
    near, cold = Place("device", "device", "disk", "host"), Place("disk", "host", "disk", "host")
    mixed = [C, near, CK, cold, HA, near, D, H]
    for rest, ahead in (("device", True), ("host", True), ("disk", True), ("disk", False)):
        seen.logits = []
        how = options(mixed, tmp_path, kv_disk=tmp_path, activations=rest, overlap=ahead, sequences=3, nexts=2)
        found, sent = work(path, how)
        assert found == alone and by_row(seen.logits) == by_row(truth), (rest, ahead)
    assert sent["to_host", "x"] > 0
    seen.logits = []
    assert work(path, options(None, tmp_path, kv_disk=tmp_path, sequences=3, device_ram=50_000_000))[0] == alone


def work(path: Path, how: Options) -> tuple[list[tuple[int, ...]], dict[tuple[str, str], int]]:
    """Tokens after the prompts, and what crossed the link."""
    with Engine(build(path, how)) as engine:
        done = engine.generate(PROMPTS, max_tokens=4, ignore_eos=True)
        computer = engine.parts.computer
        assert isinstance(computer, tiers.TieredComputer)
        gc.collect()
        assert computer._guests == {}, "runs that are gone left something on the device"
        return [tuple(c.tokens) for c in done], dict(computer.link.sent)


@pytest.mark.parametrize("bits", [(16, 16), (8, 4)])
def test_every_placement_gives_the_bytes_of_the_device_alone(
    bits: tuple[int, int], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    alone, _ = work(path, options(None, tmp_path, kv_bits=bits))
    truth, seen.logits = seen.logits, []
    assert len(truth) > 4
    for name, places in PLACEMENTS.items() if bits == (16, 16) else [("all three", PLACEMENTS["all three"])]:
        found, sent = work(path, options(places, tmp_path, kv_bits=bits, link=PACE))
        assert found == alone and seen.logits == truth, name
        assert ("to_device", "weights") in sent or name == "all at the host"
        seen.logits = []


def test_with_host_attention_only_query_key_value_and_result_cross(path: Path, tmp_path: Path) -> None:
    """Beside the rows' ids and positions, and the logits of those that want a token."""
    tokens, sent = work(path, options([DA] * (BLOCKS + 2), tmp_path, link=PACE))
    sent.pop(("to_device", "load"))
    with open_model(path) as file:
        text = [Tokenizer.from_metadata(file.metadata).encode(p) for p in PROMPTS]
    wanted = sum(len(t) for t in tokens)
    rows = sum(len(t) for t in text) + wanted - len(PROMPTS)  # the last tokens aren't computed on
    assert sent.pop(("to_host", "qkv")) == rows * BLOCKS * (HEADS + 2 * KV_HEADS) * HEAD * 4
    assert sent.pop(("to_device", "attention")) == rows * BLOCKS * HEADS * HEAD * 4
    assert sent.pop(("to_device", "rows")) == rows * 8 + wanted * 4
    assert sent.pop(("to_host", "logits")) == wanted * VOCAB * 4
    assert sent == {}


def test_weights_cross_once_a_block_of_runs(path: Path, tmp_path: Path) -> None:
    _, sent = work(path, options([D, *[H] * BLOCKS, D], tmp_path))
    with open_model(path) as file:
        one = sum(load_model(file).layers[i].nbytes for i in range(1, BLOCKS + 1))
    passes, ahead = divmod(sent["to_device", "weights"], one)
    assert 4 <= passes <= 12 and ahead <= one // 2
    assert ("to_host", "qkv") not in sent and ("to_device", "x") not in sent


def join(model: Model, places: Sequence[Place], own: range, packs: Path, pace: Pace | None = None) -> Any:
    near, host = TorchDevice(), TorchDevice()
    job = placing.Job(model, own, places, (16, 16), 4, 128, 16, 1)
    placing.check_places(model.layers, places)
    return placing.assemble(near, host, host, placing.make_link(near, pace), job, packs)


def message(rows: int) -> RunMessage:
    """A sequence's first tokens, and then guesses that all stand on the last of them."""
    ids = [7 * i % VOCAB for i in range(rows)]
    known = tuple(Row(0, i, ids[i], i, wanted=i == 5) for i in range(6))
    guesses = tuple(Row(0, 6, ids[i], i, True, True) for i in range(6, rows))
    return RunMessage(0, 0, False, (Append(0, tuple(range(6)), tuple(ids[:6])), Params(0, Sampling())), known + guesses)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_rows_cancelled_between_layers_leave_the_others_as_they_are(
    name: str, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, results = Seen(monkeypatch), []
    for places, cancels in ((D,) * len(model.layers), {}), (PLACEMENTS[name], {2: (6, 9), 5: (8,)}):
        computer = join(model, places, range(len(model.layers)), tmp_path)
        stage = Stage(0, len(model.layers), len(model.layers))
        effects = stage.on_event(message(12), 0.0)
        while effects and isinstance(effects[0], Step):
            step = effects[0]
            computer.step(step.layer, stage.runs[step.run])
            if step.layer in cancels:
                stage.on_event(Cancel(0, 0, frozenset(cancels[step.layer])), 0.0)
            effects = stage.on_event(step, 0.0)
        computer.close()
        logits = seen.logits.pop()
        results.append([logits[i : i + 4 * VOCAB] for i in range(0, len(logits), 4 * VOCAB)])
    whole, rest = results  # rows 5 to 11; then 5, 7, 10 and 11 are left
    assert len(whole) == 7 and rest == [whole[i] for i in (0, 2, 5, 6)]


def test_a_stage_in_the_middle_hands_on_the_same_rows(model: Model, tmp_path: Path) -> None:
    found = []
    for places in (PLACEMENTS["all three"], [C] * len(model.layers), [D] * len(model.layers)):
        computer = join(model, places, range(2, 6), tmp_path)
        stage = Stage(2, 6, len(model.layers))
        x = np.random.default_rng(1).normal(0, 1, (12, WIDTH)).astype(np.float32)
        effects = stage.on_event(replace(message(12), x=x), 0.0)
        while isinstance(effects[0], Step):
            computer.step(effects[0].layer, stage.runs[effects[0].run])
            effects = stage.on_event(effects[0], 0.0)
        out = effects[0]
        assert isinstance(out, RunMessage) and out.x is not None
        found.append(out.x.tobytes())
        computer.close()
    assert found[0] == found[1] == found[2]


def test_crossing_layers_hold_the_same_bytes_in_any_order_of_use(model: Model, tmp_path: Path) -> None:
    count = len(model.layers)
    stays, crosses = (join(model, p, range(count), tmp_path) for p in ([D] * count, [H, K, H, K, K, D, H, H]))
    for i in (*range(count), *range(count), 4, 2, 2, 7, 1, 6, 3, *range(count)):
        with stays.weights.hold(i) as truth, crosses.weights.hold(i) as held:
            assert truth.keys() == held.keys()
            assert all(torch.equal(held[n].raw, truth[n].raw) for n in truth)
    for computer in (stays, crosses):
        computer.close()


def test_the_device_budget_is_hard(path: Path, tmp_path: Path) -> None:
    """Each is refused with numbers or kept; a larger one is never refused after a smaller was taken."""
    near = TorchDevice()
    with open_model(path) as file:
        model = load_model(file)
        job = placing.Job(model, range(8), (D,) * 8, (16, 16), 12, 128, 16, 2)
        free = Budget()
        placing.take_device(free, near, job)
        whole = free.used
    taken = None
    for limit in range(whole - 700_000, whole + 50_000, 50_000):
        try:
            parts = build(path, options(None, tmp_path, device_ram=limit))
        except OverBudget as error:
            assert taken is None and "weights" in str(error)
            continue
        taken = taken or limit
        computer = parts.computer
        assert isinstance(computer, tiers.TieredComputer)
        assert (computer.weights.device_nbytes < free.items["weights"]) == (limit < whole)
        parts.close()
    assert taken is not None and taken <= whole - 300_000
    with pytest.raises(OverBudget, match="program"):
        build(path, options([D] * 8, tmp_path, ram=1 << 20))


def test_what_isnt_possible_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    for bad in (
        [D] * 3, [D, place("tape"), *[D] * 6], [D, place("device", "host", "host"), *[D] * 6],
        [D, place("host", "disk", "disk"), *[D] * 6], [D, Place("host", "device", "host", "device"), *[D] * 6],
        [D, Place("host", "host", "device", "device"), *[D] * 6], [D, place("device", kv="disk"), *[D] * 6],
    ):  # fmt: skip
        with pytest.raises(Unsupported, match="places 3 layers" if len(bad) == 3 else r"Layer block\.0 can't be"):
            build(path, options(bad, tmp_path))
    with pytest.raises(Unsupported, match="no memory of its own"):
        build(path, replace(options(None, tmp_path, link=PACE), device="cpu"))
    with pytest.raises(Unsupported, match="tpu"):
        build(path, options(None, tmp_path, host_device="tpu"))
    with pytest.raises(BadFile, match="no such folder for the KV cache"):
        build(path, options([Place("device", "device", "disk", "host")] * 8, tmp_path))
    with pytest.raises(Unsupported, match="nothing to pin"):
        build(path, options([D] * 8, tmp_path, pin_weight=True))
    with pytest.raises(Unsupported, match="choose device, host or disk"):
        build(path, options(None, tmp_path, activations="tape"))


def test_the_cpu_device_may_compute_the_hosts_layers(path: Path, tmp_path: Path) -> None:
    """Its own numbers: near, not the same."""
    places = [D, C, D, CK, C, DA, C, D]
    mixed, sent = work(path, options(places, tmp_path, host_device="cpu"))
    alone, _ = work(path, options(None, tmp_path))
    assert [len(t) for t in mixed] == [len(t) for t in alone]
    assert mixed[0][0] == alone[0][0]
    assert sent["to_host", "x"] >= sent["to_device", "x"] > 0  # rows that want no token needn't enter the last layer
