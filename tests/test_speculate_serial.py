"""Our policy where everything takes turns: what it knows when, and what it then lets travel."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import log

import pytest

from headrace.memory.slots import Lease
from headrace.run.schedule import Order
from headrace.run.tree import Node, graft
from headrace.run.types import Draft, Guess, Row
from headrace.speculate.grow import DONE, Grown, Leaf
from headrace.speculate.serial import FIRST, Frugal, Serial

PROMPT = 24
ORDER = Order(rows=64, guesses=63)


def served(policy: Serial, passes: list[float]) -> tuple[Node, float]:
    """The prompt's pass and then next tokens' passes of so many seconds; the tip and the time."""
    tip, now = Node(7, PROMPT - 1), 0.0
    for run, took in enumerate(passes):
        assert run or policy.ready(0, tip, now)
        rows = PROMPT if run == 0 else 1
        sent = [(Row(0, i, 5, i, wanted=i == rows - 1), tip if i == rows - 1 else None) for i in range(rows)]
        policy.launched(run, sent, now)
        now += took
        policy.returned(run, rows, now)
        policy.judged(0, tip, None, now)
        tip = Node(7, tip.position + 1)
    return tip, now


def chosen(policy: Serial, tip: Node, now: float, chance: float) -> list[Node]:
    """Guesses that travel with the next token, of two chains of 16."""
    guesses = [Guess(9 if i == 0 else 8, i - 1, chance) for i in range(16)]
    guesses += [Guess(10 if i == 0 else 8, 15 + i if i else -1, chance / 8 if i == 0 else chance) for i in range(16)]
    draft = Draft(0, tip.position + 1, (7,), tuple(guesses))
    fresh = graft(tip, [7] * (tip.position + 1), draft)
    assert len(fresh) == 32
    policy.drafted(0, draft, fresh, now)
    tip.run = 99
    return [node for _, nodes in policy.place([(0, tip)], [1], True, ORDER, now) for _, node in nodes]


def placed(policy: Serial, tip: Node, now: float, chance: float = 0.75) -> int:
    return len(chosen(policy, tip, now, chance))


def test_where_weights_stream_the_prompt_says_what_passes_take() -> None:
    resident, streaming = Serial(), Serial()
    streaming.stream()
    tip, now = served(resident, [1.0, 1.0])
    assert not resident.active() and placed(resident, tip, now) == 0
    tip, now = served(streaming, [1.0])
    assert streaming.active()
    assert not streaming.ready(0, tip, now)  # it waits for its draft
    # A further row is thought to cost next to nothing, but a first run with guesses is no wide one.
    assert placed(streaming, tip, now) == FIRST


def gain(cost: Callable[[int], float], chance: float, seed: int, tokens: int = 120) -> float:
    """Tokens a second with guesses over those without, passes of so many rows taking ``cost`` (5% more or less)."""
    draw, policy = random.Random(seed), Serial()
    policy.stream()
    tip, now = served(policy, [cost(PROMPT)])
    made, run, began = 0, 99, now
    while made < tokens:
        guesses = chosen(policy, tip, now, chance)
        rows = 1 + len(guesses)
        policy.launched(
            run, [(Row(0, n.position, 5, 0, wanted=True, guess=n is not tip), n) for n in [tip, *guesses]], now
        )
        for node in guesses:
            node.run = run
        now += cost(rows) * draw.uniform(0.95, 1.05)
        policy.returned(run, rows, now)
        on: Node | None = tip
        while on is not None:
            lucky = draw.random() < chance
            hit = next((c for c in on.children.values() if lucky and c in guesses and c.token != 10), None)
            policy.judged(0, on, hit, now)
            tip, on, made = on, hit, made + 1
        tip, run = Node(7, tip.position + 1), run + 1
    return cost(1) * made / (now - began)


@pytest.mark.parametrize("seed", range(4))
def test_streaming_guesses_as_much_as_rows_are_worth(seed: int) -> None:
    """Reading sets the pace however many rows; up to three rows; or never, where computing sets it from the first."""
    assert gain(lambda rows: 1.67 + 0.002 * rows, 0.75, seed) > 3.0
    assert gain(lambda rows: max(1.67, 0.73 + 0.235 * rows), 0.75, seed) > 1.9  # at best 2.5
    assert gain(lambda rows: 0.2 + 0.8 * rows, 0.75, seed) > 0.85
    assert gain(lambda rows: 0.2 + 0.8 * rows, 0.05, seed) > 0.85


def test_what_streaming_passes_take_is_corrected_by_wider_ones() -> None:
    """The first pass was a slow one: nothing had been read ahead."""
    policy = Serial()
    policy.stream()
    tip, now = served(policy, [5.0])
    for run in range(1, 4):
        sent = [(Row(0, i, 5, i, wanted=True, guess=i > 0), tip) for i in range(40)]
        policy.launched(run, sent, now)
        now += 2.0
        policy.returned(run, 40, now)
    assert 1.5 < policy.rates(40) < 2.5 and policy.rates(1) < 3.0


def test_resident_rows_cost_until_they_were_tried() -> None:
    policy = Serial()
    tip, now = served(policy, [1.0, 0.1, 0.1, 0.1])
    assert policy.active()
    assert 1 <= placed(policy, tip, now) <= 5


def test_a_draft_is_not_grown_where_nothing_would_be_launched() -> None:
    policy = Serial()
    policy.stream()
    served(policy, [1000.0])
    growth = Frugal(policy)
    growth.rates.note(1, 1e-6)
    growth.rates.note(1, 1e-6)
    root = Leaf(7, PROMPT, None)
    root.state = DONE
    likely, hardly = Leaf(8, PROMPT + 1, root), Leaf(9, PROMPT + 1, root)
    likely.score, hardly.score = log(0.5), log(policy.floor / 2)
    heap = [(-likely.score, 0, likely), (-hardly.score, 1, hardly)]
    grown = Grown(0, Lease([], 0), [7] * PROMPT, root, heap=heap)
    assert growth.pick(grown) == [likely]
