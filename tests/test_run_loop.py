"""The one loop: head and stages give plain decoding's text under any schedule, guesses and cancels."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hash_model import HashModel
from headrace.cluster.loopback import Loopback
from headrace.errors import BadRequest
from headrace.kernels.device import PAGE
from headrace.run.head import Head
from headrace.run.policy import NoGuesses
from headrace.run.schedule import Demand, Order, fill
from headrace.run.stage import Stage
from headrace.run.types import Committed, Draft, Emit, Finish, Guess, Request, Sampling, Submit, Withdraw

LAYERS = 6


def stages_of(cuts: list[int], pages: int) -> list[tuple[Stage, HashModel]]:
    edges = [0, *cuts, LAYERS]
    return [(Stage(a, b, LAYERS), HashModel(pages * PAGE, LAYERS)) for a, b in pairwise(edges)]


def drive(loop: Loopback, requests: list[Request]) -> dict[int, list[int]]:
    """Submit everything, run to the end, check integrity; returns each request's tokens."""
    for request in requests:
        loop.submit(Submit(request))
    text: dict[int, list[int]] = {r.id: [] for r in requests}
    while not loop.idle:
        for out in loop.pump():
            if isinstance(out, Emit):
                text[out.request].append(out.token)
    assert loop.head.idle
    assert loop.head.check_integrity() == []
    for stage, _ in loop.stages:
        assert stage.check_integrity() == []
        assert len(stage.tables) == len(loop.head.kept)
    return text


def plain(requests: list[Request]) -> dict[int, list[int]]:
    """One request at a time, one stage, one row after the other."""
    text = {}
    for request in requests:
        loop = Loopback(Head(64, Order(rows=1)), stages_of([], 64))
        text.update(drive(loop, [request]))
    return text


class Oracle:
    """A scripted drafter: trees in which the true token is there with a probability, among wrong ones."""

    def __init__(self, truth: dict[int, list[int]], seed: int, accuracy: float) -> None:
        self.truth, self.random, self.accuracy = truth, random.Random(seed), accuracy
        self.known: dict[int, list[int]] = {}

    def on_event(self, event: Committed, now: float) -> list[Draft]:
        if event.start == 0:
            self.known[event.seq] = []
        known = self.known[event.seq]
        known.extend(event.tokens)
        if event.over:
            return []
        full = self.truth[event.seq]
        guesses: list[Guess] = []
        parent, on_path = -1, True
        for depth in range(self.random.randint(0, 6)):
            at = len(known) + depth
            right = full[at] if on_path and at < len(full) else 1
            for rank in range(self.random.randint(0, 2)):
                guesses.append(Guess(self.random.randrange(997), parent, 0.1, rank))
            true = self.random.random() < self.accuracy
            guesses.append(Guess(right if true else self.random.randrange(997), parent, 0.5))
            parent, on_path = len(guesses) - 1, on_path and true
        return [Draft(event.seq, len(known), tuple(known[-2:]), tuple(guesses))]


class Eager(NoGuesses):
    """Launches every proposed node at once, some along with known rows and some in runs of their own."""

    most_guesses = 64

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def place(self, tips, sizes, free, order, now):  # type: ignore[no-untyped-def]
        placed = []
        for seq, tip in tips:
            nodes = [n for n in tip.subtree() if not n.launched][: self.random.randint(0, 9)]
            if nodes:
                placed.append(
                    (self.random.randint(0, max(0, min(len(sizes), order.runs - 1))), [(seq, n) for n in nodes])
                )
        return placed


requests_strategy = st.lists(
    st.tuples(st.integers(1, 70), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=5
)


def make_requests(shapes: list[tuple[int, int, int]], seed: int) -> list[Request]:
    rnd = random.Random(seed)
    kinds = (
        Sampling(),
        Sampling(temperature=0.8, seed=seed),
        Sampling(repeat_penalty=1.1, repeat_last_n=5),
        Sampling(temperature=1.0, presence_penalty=0.5, repeat_last_n=-1, seed=seed),
    )
    return [
        Request(i, tuple(rnd.randrange(997) for _ in range(p)), n, kinds[k], frozenset({5}))
        for i, (p, n, k) in enumerate(shapes)
    ]


@settings(max_examples=40, deadline=None)
@given(
    shapes=requests_strategy,
    cuts=st.sets(st.integers(1, LAYERS - 1), max_size=3),
    rows=st.integers(1, 40),
    runs=st.integers(1, 4),
    blocks=st.integers(1, 4),
    chunk=st.integers(1, 40),
    pages=st.integers(8, 24),
    accuracy=st.floats(0, 1),
    seed=st.integers(0, 10**6),
)
def test_any_schedule_gives_plain_text(shapes, cuts, rows, runs, blocks, chunk, pages, accuracy, seed):  # type: ignore[no-untyped-def]
    requests = make_requests(shapes, seed)
    truth = plain(requests)
    order = Order(rows=rows, runs=runs, blocks=blocks, guesses=8, chunk=chunk)
    full = {r.id: [*r.tokens, *truth[r.id]] for r in requests}
    head = Head(pages, order, Eager(seed))
    loop = Loopback(head, stages_of(sorted(cuts), pages), Oracle(full, seed, accuracy))
    assert drive(loop, requests) == truth


def test_guesses_are_launched_accepted_and_cancelled() -> None:
    """The property above would hold vacuously if nothing were ever guessed."""
    requests = make_requests([(9, 20, 0)], 3)
    requests = [Request(r.id, r.tokens, 20, r.sampling) for r in requests]
    truth = plain(requests)
    full = {r.id: [*r.tokens, *truth[r.id]] for r in requests}
    results = {"runs": 0, "guesses": 0, "cancelled": 0}
    policy = Eager(1)
    loop = Loopback(Head(16, Order(blocks=3), policy), stages_of([2, 4], 16), Oracle(full, 1, 0.7))

    def launched(run, rows, now):  # type: ignore[no-untyped-def]
        results["runs"] += 1
        results["guesses"] += sum(row.guess for row, _ in rows)

    policy.launched = launched  # type: ignore[method-assign]
    send = loop.head._send_cancels

    def count(cancels, effects):  # type: ignore[no-untyped-def]
        results["cancelled"] += sum(map(len, cancels.values()))
        send(cancels, effects)

    loop.head._send_cancels = count  # type: ignore[method-assign]
    assert drive(loop, requests) == truth
    assert results["guesses"] > 20
    assert results["cancelled"] > 5
    plain_runs = 20
    assert results["runs"] < 3 * plain_runs


@settings(max_examples=20, deadline=None)
@given(at=st.integers(0, 60), seed=st.integers(0, 1000))
def test_withdrawing_gives_everything_back(at: int, seed: int) -> None:
    requests = make_requests([(40, 20, 0), (10, 20, 1)], seed)
    requests = [Request(r.id, r.tokens, 20, r.sampling) for r in requests]
    truth = plain(requests)
    full = {r.id: [*r.tokens, *truth[r.id]] for r in requests}
    loop = Loopback(
        Head(16, Order(rows=8, chunk=8, blocks=2), Eager(seed)), stages_of([3], 16), Oracle(full, seed, 0.5)
    )
    for r in requests:
        loop.submit(Submit(r))
    text: dict[int, list[int]] = {0: [], 1: []}
    for i in range(100000):
        if i == at:
            loop.submit(Withdraw(0))
        if loop.idle and i > at:
            break
        if not loop.idle:
            loop.turn()
        for out in loop._out:
            if isinstance(out, Emit):
                text[out.request].append(out.token)
        loop._out = []
    assert loop.head.idle and loop.head.check_integrity() == []
    assert text[1] == truth[1]
    assert text[0] == truth[0][: len(text[0])]
    assert loop.head.pool.available == 16
    assert all(len(stage.tables) == 0 for stage, _ in loop.stages)


def test_a_conversation_keeps_its_cache() -> None:
    first = Request(0, tuple(range(40)), 10, keep=True)
    head = Head(16, Order())
    loop = Loopback(head, stages_of([3], 16))
    text = drive(loop, [first])[0]
    turn = (*first.tokens, *text, 7, 8, 9)
    second = Request(1, turn, 10, continues=0)
    loop.submit(Submit(second))
    computed = 0
    again: list[int] = []
    while not loop.idle:
        for out in loop.pump():
            if isinstance(out, Emit):
                again.append(out.token)
        computed = max(computed, max((len(f.rows) for f in head.flights.values()), default=0))
    assert again == plain([Request(1, turn, 10)])[1]
    assert computed <= 4
    assert head.check_integrity() == [] and head.pool.available == 16


def test_a_request_that_can_never_fit_is_answered() -> None:
    loop = Loopback(Head(2, Order()), stages_of([], 2))
    loop.submit(Submit(Request(0, tuple(range(60)), 10)))
    assert [out for out in loop.pump() if isinstance(out, Finish)] == [Finish(0, "too long")]


@settings(max_examples=150, deadline=None)
@given(
    demands=st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=20),
    rows=st.integers(1, 30),
    runs=st.integers(1, 5),
    chunk=st.integers(1, 30),
)
def test_fill_is_within_its_order(demands: list[tuple[int, bool]], rows: int, runs: int, chunk: int) -> None:
    asked = [Demand(i, known if prompt else min(known, 1), prompt) for i, (known, prompt) in enumerate(demands)]
    block = fill(asked, Order(rows=rows, runs=runs, chunk=chunk))
    assert len(block) <= runs
    assert all(1 <= sum(s.known for s in run) <= rows for run in block)
    given_rows: dict[int, int] = {}
    for run in block:
        for share in run:
            assert 0 < share.known <= chunk
            given_rows[share.seq] = given_rows.get(share.seq, 0) + share.known
    assert all(n <= asked[seq].known for seq, n in given_rows.items())
    if any(d.known for d in asked):
        assert block
    nexts = [d.seq for d in asked if d.known and not d.prompt]
    if any(asked[s].prompt for s in given_rows) and len(block) < runs:
        assert set(nexts) <= set(given_rows)


if __name__ == "__main__":
    pytest.main([__file__])


@pytest.mark.parametrize("name", ["temperature", "repeat_penalty", "frequency_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [10**400, float("inf"), float("nan"), "1", None])
def test_sampling_takes_finite_numbers(name: str, value: object) -> None:
    """A whole number beyond all floats (JSON allows it) once was a TypeError."""
    with pytest.raises(BadRequest, match=f"{name} is .*finite number"):
        Sampling(**{name: value})  # type: ignore[arg-type]


def test_sampling_refuses_by_name() -> None:
    for name, value in (("top_k", 1.5), ("top_k", 2**31), ("top_p", 0.0), ("min_p", 1.1), ("repeat_penalty", 0),
                        ("repeat_last_n", -2), ("seed", -1), ("choice", None), ("logprobs", 22)):  # fmt: skip
        with pytest.raises(BadRequest, match=f"{name} is"):
            Sampling(**{name: value})  # type: ignore[arg-type]
    Sampling(temperature=2, top_k=0, top_p=1, min_p=0, repeat_penalty=1, repeat_last_n=-1, seed=2**64 - 1, logprobs=21)
