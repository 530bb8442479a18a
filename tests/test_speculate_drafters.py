"""Drafters: prompt lookup, several as one, and a model's tree with its own cache."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from hash_model import LightDraft, LightModel
from headrace.cluster.loopback import Loopback
from headrace.run.head import Head
from headrace.run.schedule import Order
from headrace.run.stage import Computer, Run, Stage
from headrace.run.types import (
    Cancel,
    Choice,
    Committed,
    Draft,
    Emit,
    Params,
    Request,
    Result,
    RunMessage,
    Sampling,
    Step,
    Submit,
)
from headrace.simulate.driver import Simulation
from headrace.simulate.network import LinkSpec
from headrace.speculate.calibrate import Calibration
from headrace.speculate.control import Measured, Speed
from headrace.speculate.drafters import Merged, NGram
from headrace.speculate.grow import Growth, ModelDrafter
from headrace.speculate.growth import Continuous, Once
from headrace.speculate.pipeinfer import Knobs, Microbatches


def chain(draft: Draft) -> list[int]:
    """Tokens of the first guess and its first children."""
    found, parent = [], -1
    while (at := next((i for i, g in enumerate(draft.guesses) if g.parent == parent), None)) is not None:
        found.append(draft.guesses[at].token)
        parent = at
    return found


def heard(drafter: NGram, tokens: tuple[int, ...]) -> Draft:
    (draft,) = drafter.on_event(Committed(0, 0, tokens), 0.0)
    assert isinstance(draft, Draft) and draft.base == len(tokens) and draft.tail == tokens[-4:]
    return draft


def test_lookup_proposes_what_followed() -> None:
    draft = heard(NGram(depth=4), (1, 2, 3, 4, 5, 6, 7, 1, 2, 3))
    assert chain(draft) == [4, 5, 6, 7]
    assert draft.guesses[0].probability > draft.guesses[0].probability * 0.9


def test_lookup_prefers_long_matches_and_offers_others() -> None:
    text = (9, 2, 3, 70, 8, 8, 1, 2, 3, 80, 5, 5, 3, 90, 4, 1, 2, 3)
    draft = heard(NGram(depth=2, branches=3), text)
    first = [g for g in draft.guesses if g.parent == -1]
    assert [g.token for g in first] == [80, 70, 90]
    assert [g.rank for g in first] == [0, 1, 2]
    assert first[0].probability > first[1].probability > first[2].probability


def test_lookup_goes_round_in_a_loop() -> None:
    assert chain(heard(NGram(depth=7), (5, 6, 7, 5, 6, 7, 5, 6))) == [7, 5, 6, 7, 5, 6, 7]


def test_lookup_has_nothing_to_say_of_new_text_and_forgets_what_is_over() -> None:
    drafter = NGram()
    assert heard(drafter, (1, 2, 3)).guesses == ()
    assert drafter.on_event(Committed(0, 3, (), over=True), 0.0) == []
    assert drafter._texts == {}


def test_merged_drafters_keep_their_numbers() -> None:
    merged = Merged([NGram(longest=2), NGram(longest=4, depth=2)])
    drafts = [e for e in merged.on_event(Committed(0, 0, (1, 2, 3, 1, 2)), 0.0) if isinstance(e, Draft)]
    assert [{g.drafter for g in d.guesses} for d in drafts] == [{0}, {1}]


def test_calibration_believes_the_drafter_first_and_the_trials_later() -> None:
    known = Calibration()
    assert known.probability(0, 0, 0.9) == 0.9
    for i in range(200):
        known.note(0, 0, 0.9, i % 10 == 0)
    assert abs(known.probability(0, 0, 0.9) - 0.1) < 0.04
    assert known.probability(1, 0, 0.9) == 0.9 and known.probability(0, 1, 0.4) == 0.4


def simulate(accuracy: float, request: Request, stages: int = 1) -> tuple[Simulation, list[int]]:
    layers, vocab = 4, 499
    policy = Measured(Speed(lambda r: 4 + 0.1 * r, lambda r: 1 + 0.025 * r), rows=8, most_guesses=96)
    drafter = ModelDrafter(40, Continuous(lambda r: 1 + 0.1 * r, width=3, rows=4), most=96)
    cuts = [0, 2, layers] if stages == 2 else [0, layers]
    draft = [(Stage(a, b, layers), LightDraft(layers, vocab, 1, accuracy, 3)) for a, b in itertools.pairwise(cuts)]
    target = [(Stage(i, i + 1, layers), LightModel(layers, vocab, 1)) for i in range(layers)]
    sim = Simulation(
        Head(20, Order(blocks=12, guesses=8), policy), target, lambda _, r: 1 + 0.025 * r, LinkSpec(0.01, 1e6), 1,
        drafter, draft, lambda _, r: 0.02 * (1 + 0.1 * r),
    )  # fmt: skip
    sim.submit(Submit(request))
    log = sim.run()
    assert sim.check_integrity() == []
    assert drafter.grown == {} and drafter.pool.available == 40
    return sim, [token for _, _, token in log.emitted]


def test_a_drafter_equal_to_the_target_is_always_right() -> None:
    """So its own cache, re-rooting and sampling are right: one wrong slot would change what it proposes."""
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=3), Sampling(repeat_penalty=1.2, repeat_last_n=9)):
        for stages in (1, 2):
            request = Request(0, tuple(range(1, 40)), 60, sampling)
            sim, text = simulate(1.0, request, stages)
            assert text == LightModel(4, 499, 1).plain(request)[0]
            assert sim.head.counts.accepted >= 50


def test_the_draft_model_is_asked_for_the_whole_width() -> None:
    """The chosen token is among the likeliest when greedy, so a width of n needs n of them beside it."""
    drafter = ModelDrafter(40, Continuous(lambda r: 1.0, width=3), most=96)
    effects = drafter.on_event(Committed(0, 0, (1, 2, 3), sampling=Sampling(temperature=0.5)), 0.0)
    runs = [e for e in effects if isinstance(e, RunMessage)]
    asked = [op.sampling for op in runs[0].ops if isinstance(op, Params)]
    assert [(s.logprobs, s.temperature) for s in asked] == [(1 + 3, 0.5)]


def test_a_drafter_that_errs_costs_time_and_nothing_else() -> None:
    request = Request(0, (3, 1, 4, 1, 5), 60)
    right, text = simulate(1.0, request)
    wrong, same = simulate(0.4, request)
    assert text == same == LightModel(4, 499, 1).plain(request)[0]
    assert right.log.emitted[-1][0] < wrong.log.emitted[-1][0]
    assert wrong.head.counts.cancelled > 20


class Refrain(Computer):
    """A model that says the same nine tokens over and over: a computer for one stage of one layer."""

    def step(self, layer: int, run: Run) -> None:
        rows = run.message.rows
        run.choices = tuple(Choice(i, 1 + (rows[i].position + 1) % 9) for i in run.live if rows[i].wanted)


def test_lookup_pays_on_one_machine() -> None:
    """In one process, known tokens wait for the drafter's answer, and each pass gives several."""
    runs = {}
    for name, drafter in (("none", None), ("lookup", NGram())):
        policy = Measured(Speed(lambda r: 1 + 0.1 * r, lambda r: 1 + 0.1 * r), rows=16, most_guesses=96)
        head = Head(20, Order(guesses=16), policy)
        loop = Loopback(head, [(Stage(0, 1, 1), Refrain())], drafter)
        loop.submit(Submit(Request(0, tuple(1 + i % 9 for i in range(20)), 200)))
        text = []
        while not loop.idle:
            text.extend(out.token for out in loop.pump() if isinstance(out, Emit))
        assert text == [1 + i % 9 for i in range(20, 220)]
        runs[name] = head.counts.runs
    assert runs["none"] >= 200 and runs["lookup"] < 60


GROWTHS: dict[str, Callable[[], Growth]] = {
    "chain": lambda: Once(8),
    "tree": lambda: Once(4, 3, 12, 4),
    "ours, narrow": lambda: Continuous(lambda r: 1.0 + r, width=1, floor=0.05),
    "ours, wide": lambda: Continuous(lambda r: 1 + 0.1 * r, width=4, floor=0.05),
    "pipeinfer": lambda: Microbatches(Knobs(4, 3, 0.0, 0.02), width=4, lead=12),
}
Tree = set[tuple[tuple[int, ...], float, int]]


def grown(
    growth: Growth, staged: bool, seed: int, patient: bool, cheap: Callable[[int], float] = lambda r: 1 + 0.1 * r
) -> tuple[list[Tree], int]:
    """What a draft proposes for a text that often repeats itself: (path, stated, rank) for each base; and its runs.

    patient: nothing is committed until the drafter rests; else after any step, so runs are cancelled midway.
    """
    layers, vocab, rnd = 3, 4, Random(seed)
    stage, computer = Stage(0, layers, layers), LightDraft(layers, vocab, seed, 0.7)
    lookup = NGram(branches=1, least=lambda: 2.0) if staged else None
    drafter = ModelDrafter(40, growth, most=96, chunk=9, cheap=lookup, cost=cheap)
    prompt = tuple(rnd.randrange(vocab) for _ in range(20))
    text = LightModel(layers, vocab, seed).plain(Request(0, prompt, 60))[0]
    found: list[Tree] = [set() for _ in range(90)]
    todo: deque[Any] = deque()

    def hear(event: Committed | Result) -> None:
        for effect in drafter.on_event(event, 0.0):
            if not isinstance(effect, Draft):
                todo.appendleft(effect) if isinstance(effect, Cancel) else todo.append(effect)
                continue
            paths: list[tuple[int, ...]] = []
            for guess in effect.guesses:
                paths.append(((*paths[guess.parent], guess.token)) if guess.parent >= 0 else (guess.token,))
                found[effect.base].add((paths[-1], guess.probability, guess.rank))

    def work() -> None:
        event = todo.popleft()
        if isinstance(event, Result):
            hear(event)
            return
        if isinstance(event, Step):
            computer.step(event.layer, stage.runs[event.run])
        todo.extend(stage.on_event(event, 0.0))

    hear(Committed(0, 0, prompt, sampling=Sampling()))
    at = 0
    while at < len(text):
        while todo and (patient or rnd.random() < 0.8):
            work()
        count = rnd.choice((1, 1, 1, 2, 3))
        hear(Committed(0, 20 + at, tuple(text[at : at + count])))
        at += count
    hear(Committed(0, 20 + len(text), (), over=True))
    while todo:
        work()
    assert drafter.grown == {} and drafter.pool.available == 40
    return found, drafter._run


@pytest.mark.parametrize("name", GROWTHS)
def test_a_draft_for_the_draft_changes_no_draft(name: str) -> None:
    """Staged or not, the same trees, and fewer runs; where runs are cut short, nothing that isn't in the whole tree."""
    alone = staged = 0
    for seed in range(1, 4):
        trees, runs = grown(GROWTHS[name](), False, seed, True)
        same, fewer = grown(GROWTHS[name](), True, seed, True)
        assert same == trees and any(trees)
        alone, staged = alone + runs, staged + fewer
        hasty, _ = grown(GROWTHS[name](), True, seed, False)
        other, _ = grown(GROWTHS[name](), True, seed, False, cheap=lambda r: 1.0)
        for some in (hasty, other):
            for base, tree in enumerate(some):
                known = {(path, rank): stated for path, stated, rank in trees[base]}
                assert all(known.get((path, rank), stated) == stated for path, stated, rank in tree)
    assert staged < 0.97 * alone
