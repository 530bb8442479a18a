"""The two orders pass through the same stage code and give the bytes of plain decoding.

(a) a block of ragged runs, layer by layer, over layers fetched and dropped around each use; (b) a pipeline of three
stages with a scripted drafter: wrong guesses, cancels that come before their run and after it, tombstones.
What is compared is every committed row's logits, bit for bit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace.cluster.loopback import Loopback
from headrace.formats.index import open_model
from headrace.kernels.device import Device, Weight
from headrace.kernels.dispatch import make_device
from headrace.memory.buffers import allocate
from headrace.memory.kv import HostKV, kv_shapes
from headrace.memory.weights import Resident, Weights, pack_tensor
from headrace.model.layers import Model, load_model
from headrace.run import compute
from headrace.run.compute import DeviceComputer
from headrace.run.head import Head
from headrace.run.policy import NoGuesses
from headrace.run.schedule import Order
from headrace.run.stage import Computer, Run, Stage
from headrace.run.types import (
    Cancel,
    Choice,
    Committed,
    Draft,
    Emit,
    Guess,
    HeadEvent,
    Request,
    Sampling,
    Submit,
)
from helpers_tiny import VOCAB, tiny_model

PAGES = 32


class Recording(DeviceComputer):
    """Keeps the logits of every row that wanted some: (sequence, position, token ids before) -> bytes."""

    logits: dict[tuple[int, int, int], bytes]

    def _answer(self, run: Run, logits: np.ndarray) -> tuple[Choice, ...]:
        choices = super()._answer(run, logits)
        for choice, row in zip(choices, logits, strict=True):
            r = run.message.rows[choice.row]
            self.logits[r.seq, r.position, r.slot] = row.tobytes()
        return choices


def computer(model: Model, own: Sequence[int], weights: Weights, threads: int = 1) -> Recording:
    device = make_device("cpu", threads=threads)
    shapes = {i: s for i, s in kv_shapes(model.layers, (16, 16)).items() if i in own}
    made = Recording(device, model.layers, own, model.spec.width, weights, HostKV(device, shapes, PAGES))
    made.logits = {}
    return made


class Delaying(Loopback):
    """Delivers each cancel at a moment of its own: at once, or after so many other messages."""

    def __init__(self, *args: object, seed: int = 0) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.random = random.Random(seed)
        self.late: list[tuple[int, int, Cancel]] = []
        self.early = self.after = 0

    def turn(self) -> None:
        for entry in list(self.late):
            if entry[0] <= 0:
                self.late.remove(entry)
                self._queue.appendleft(entry[1:])
        self.late = [(wait - 1, to, cancel) for wait, to, cancel in self.late]
        if self._queue and isinstance(self._queue[0][1], Cancel) and self.random.random() < 0.5:
            to, cancel = self._queue.popleft()
            assert isinstance(cancel, Cancel)
            self.late.append((self.random.randint(1, 30), to, cancel))
            return
        if self._queue and isinstance(self._queue[0][1], Cancel):
            to, cancel = self._queue[0]
            stage = self.stages[to][0]
            self.early += cancel.run > stage.newest
            self.after += cancel.run <= stage.newest and cancel.run not in stage.runs
        if self._queue:
            super().turn()

    @property
    def idle(self) -> bool:
        return not self._queue and not self.late


class Scripted:
    """Drafts the true continuation for a few tokens, with wrong tokens beside and at the end."""

    def __init__(self, truth: dict[int, list[int]]) -> None:
        self.truth = truth
        self.random = random.Random(5)
        self.known: dict[int, int] = {}

    def on_event(self, event: Committed, now: float) -> list[Draft]:
        self.known[event.seq] = known = event.start + len(event.tokens)
        if event.over:
            return []
        guesses: list[Guess] = []
        parent = -1
        for token in self.truth[event.seq][known : known + self.random.randint(1, 4)]:
            guesses.append(Guess((token + 1) % VOCAB, parent, 0.2, 1))
            guesses.append(Guess(token, parent, 0.7))
            parent = len(guesses) - 1
        guesses.append(Guess(self.random.randrange(VOCAB), parent, 0.5))
        return [Draft(event.seq, known, event.tokens[-1:], tuple(guesses))]


class LaunchAll(NoGuesses):
    """Every proposed node at once, in a run of its own."""

    most_guesses = 40

    def place(self, tips, sizes, *rest):  # type: ignore[no-untyped-def]
        placed = []
        for seq, tip in tips:
            nodes = [n for n in tip.subtree() if not n.launched and n.position < tip.position + 6]
            if nodes:
                placed.append((len(sizes), [(seq, n) for n in nodes]))
        return placed


def requests() -> list[Request]:
    lengths = (3, 40, 17, 90)
    rnd = random.Random(1)
    kinds = (Sampling(), Sampling(temperature=0.9, seed=7), Sampling(repeat_penalty=1.2), Sampling(temperature=0.7))
    return [Request(i, tuple(rnd.randrange(VOCAB) for _ in range(n)), 12, kinds[i]) for i, n in enumerate(lengths)]


def run(loop: Loopback, asked: Sequence[Request]) -> tuple[dict[int, list[int]], dict[tuple[int, int], bytes]]:
    """-> each request's tokens, and the logits of each committed row by (sequence, position)."""
    for request in asked:
        loop.submit(Submit(request))
    tokens: dict[int, list[int]] = {r.id: [] for r in asked}
    committed: dict[tuple[int, int], bytes] = {}
    last = loop.stages[-1][1]
    assert isinstance(last, Recording)
    while not loop.idle:
        before = dict(loop.head.live)
        loop.turn()
        for out in loop._out:
            if isinstance(out, Emit):
                tokens[out.request].append(out.token)
                live = before[out.request]
                slot = live.slots[out.position - 1]
                committed[out.request, out.position - 1] = last.logits[out.request, out.position - 1, slot]
        loop._out = []
    assert loop.head.idle and loop.head.check_integrity() == []
    assert all(stage.check_integrity() == [] for stage, _ in loop.stages)
    return tokens, committed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path: Path = tiny_model(tmp_path_factory.mktemp("two") / "tiny.gguf", blocks=7)
    return load_model(open_model(path))


@pytest.fixture(scope="module")
def plain(model: Model) -> tuple[dict[int, list[int]], dict[tuple[int, int], bytes]]:
    """One row at a time, one sequence at a time, everything resident."""
    every = range(len(model.layers))
    tokens, logits = {}, {}
    for request in requests():
        made = computer(model, every, Resident(make_device("cpu", threads=1), model, every))
        loop = Loopback(Head(PAGES, Order(rows=1)), [(Stage(0, len(every), len(every)), made)])
        t, c = run(loop, [request])
        tokens.update(t)
        logits.update(c)
    assert len(logits) == 4 * 12
    return tokens, logits


class FetchEachTime:
    """Layers read from the model file before each use and dropped after it: the smallest memory, no prefetch."""

    lasting = False

    def __init__(self, device: Device, model: Model) -> None:
        self._device, self._model = device, model
        self.fetched = 0

    @contextmanager
    def hold(self, layer: int) -> Iterator[Mapping[str, Weight]]:
        plans = self._model.layers[layer].tensors
        held: dict[str, Weight] = {}
        for name, plan in plans.items():
            buffer = allocate(self._device.packed_nbytes(plan.fmt, plan.n, plan.k))
            pack_tensor(self._device, self._model, plan, buffer)
            self.fetched += buffer.nbytes
            held[name] = self._device.weight(plan.fmt, plan.n, plan.k, buffer)
        try:
            yield held
        finally:
            held.clear()

    def stays(self, layer: int) -> bool:
        return False

    def close(self) -> None:
        return None


def test_a_block_over_fetched_and_dropped_layers(model: Model, plain) -> None:  # type: ignore[no-untyped-def]
    every = range(len(model.layers))
    weights = FetchEachTime(make_device("cpu", threads=1), model)
    made = computer(model, every, weights, threads=2)
    loop = Loopback(Head(PAGES, Order(rows=24, runs=4, chunk=19)), [(Stage(0, len(every), len(every)), made)])
    tokens, logits = run(loop, requests())
    assert tokens == plain[0]
    assert logits == plain[1]
    one_pass = sum(layer.nbytes for layer in model.layers)
    passes = weights.fetched / one_pass
    assert passes < 30, "a layer is fetched once a block, not once a run or a row"


def test_a_guessing_pipeline(model: Model, plain) -> None:  # type: ignore[no-untyped-def]
    count = len(model.layers)
    edges = (0, 3, 6, count)
    stages = []
    for a, b in itertools.pairwise(edges):
        own = range(a, b)
        stages.append((Stage(a, b, count), computer(model, own, Resident(make_device("cpu", threads=1), model, own))))
    truth = {r.id: [*r.tokens, *plain[0][r.id]] for r in requests()}
    counts = {"guesses": 0, "cancelled": 0, "tombstones": 0}
    policy = LaunchAll()
    head = Head(PAGES, Order(rows=16, runs=2, blocks=6, chunk=16), policy)
    policy.launched = lambda run, rows, now: counts.__setitem__(  # type: ignore[method-assign]
        "guesses", counts["guesses"] + sum(row.guess for row, _ in rows)
    )
    loop = Delaying(head, stages, Scripted(truth), seed=3)
    handle = head.on_events

    def watched(events: Sequence[HeadEvent], now: float):  # type: ignore[no-untyped-def]
        effects = handle(events, now)
        for effect in effects:
            if isinstance(effect, Cancel):
                counts["cancelled"] += len(effect.rows)
                flight = head.flights.get(effect.run)
                counts["tombstones"] += flight is not None and len(flight.gone) == len(flight.rows)
        return effects

    head.on_events = watched  # type: ignore[method-assign]
    tokens, logits = run(loop, requests())
    assert tokens == plain[0]
    assert logits == plain[1]
    assert counts["guesses"] > 40 and counts["cancelled"] > 10 and counts["tombstones"] > 0
    assert loop.early > 0 and loop.after > 0


@pytest.mark.parametrize("short", [0.0, 1e9])
def test_layers_computed_in_one_call_are_those_computed_one_by_one(
    model: Model, monkeypatch: pytest.MonkeyPatch, short: float
) -> None:
    """A lone run passes its layers in one call, or in as many as the time allows."""
    monkeypatch.setattr(compute, "SHORT", short)
    count = len(model.layers)
    found = []
    for together in (True, False):
        own = range(count)
        made = computer(model, own, Resident(make_device("cpu", threads=1), model, own))
        went: list[int] = []
        real = type(made).steps if together else Computer.steps

        def steps(layer: int, through: int, run: Run, real=real, made=made, went=went) -> int:  # type: ignore[no-untyped-def]
            went.append(real(made, layer, through, run) + 1 - layer)
            return went[-1] + layer - 1

        monkeypatch.setattr(made, "steps", steps)
        loop = Loopback(Head(PAGES, Order(rows=16, chunk=16)), [(Stage(0, count, count), made)])
        found.append(run(loop, [Request(0, tuple(range(1, 30)), 6)]))
        assert max(went) == (count - 2 if together and short else 1)
    assert found[0] == found[1] and len(found[0][1]) == 6
