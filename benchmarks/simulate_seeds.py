"""Deterministic testing: a random cluster, model, load, drafter and policy from one seed, run in virtual time.

    python benchmarks/simulate_seeds.py [--start 0] [--count 100000] [--faults]

The text must be plain decoding's, nothing may be left over, and it must end. One process, one core; prints each failing
seed (``run_seed(seed)`` repeats it) and the rate.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from hash_model import LightDraft, LightModel
from headrace.errors import BadMessage
from headrace.run.head import Head
from headrace.run.policy import GuessPolicy, NoGuesses
from headrace.run.schedule import Order
from headrace.run.stage import Computer, Stage
from headrace.run.tree import Node
from headrace.run.types import Request, Sampling, Submit, Withdraw
from headrace.simulate.driver import Simulation, Stuck
from headrace.simulate.network import LinkSpec
from headrace.speculate.control import Measured, Speed
from headrace.speculate.drafters import Drafter
from headrace.speculate.grow import Growth, ModelDrafter
from headrace.speculate.growth import Continuous, Once
from headrace.speculate.pipeinfer import Knobs, Microbatches, PipeInfer
from headrace.speculate.sync import Synchronous
from scripted import Scripted

VOCAB = 499


class Erratic(NoGuesses):
    """Launches proposed nodes at random: with known rows or in runs of their own, now or later."""

    most_guesses = 40

    def __init__(self, rnd: random.Random, patience: float) -> None:
        self.random, self.patience = rnd, patience

    def place(
        self, tips: Sequence[tuple[int, Node]], sizes: Sequence[int], free: bool, order: Order, now: float
    ) -> list[tuple[int, list[tuple[int, Node]]]]:
        rnd = self.random
        if not sizes and not free and rnd.random() < self.patience:
            return []
        placed = []
        for seq, tip in tips:
            nodes = [(seq, n) for n in tip.subtree() if not n.launched][: rnd.randint(0, 6)]
            if nodes:
                placed.append((rnd.randint(0, min(len(sizes), order.runs - 1)), nodes))
        return placed


@dataclass(frozen=True)
class Made:
    """The parts a test may swap, to plant a bug."""

    head: type[Head] = Head
    stage: type[Stage] = Stage


def requests_of(rnd: random.Random) -> list[Request]:
    """One to four short requests with unlike sampling; some continue an earlier one's cache."""
    made: list[Request] = []
    for i in range(rnd.choice((1, 1, 2, 3, 4))):
        kinds = (
            Sampling(),
            Sampling(temperature=0.8, seed=rnd.randrange(99)),
            Sampling(repeat_penalty=1.1, repeat_last_n=4),
            Sampling(temperature=1.0, presence_penalty=0.5, repeat_last_n=-1),
        )
        tokens = tuple(rnd.randrange(VOCAB) for _ in range(rnd.choice((1, 2, 5, 9, 20))))
        continues = None
        if made and rnd.random() < 0.3:
            continues = made[-1].id
            tokens = (*made[-1].tokens, *tokens)[:40]
        made.append(
            Request(
                i, tokens, rnd.randint(1, 14), rnd.choice(kinds), frozenset({7, 8}), continues, keep=rnd.random() < 0.2
            )
        )
    return made


@dataclass(frozen=True)
class Guessing:
    """Who decides and who drafts. stages: of the draft model; 0: the drafter has none."""

    policy: GuessPolicy
    drafter: Drafter
    stages: int = 0


def guessing_of(rnd: random.Random, truth: Mapping[int, Sequence[int]]) -> Guessing:
    """Mostly erratic choices among scripted trees, else one of the real policies with a drafter that is a model."""
    scripted = Scripted(truth, rnd, rnd.random(), VOCAB)
    kind = rnd.random()
    if kind < 0.6:
        return Guessing(Erratic(rnd, rnd.random()), scripted)
    growth: Growth
    policy: GuessPolicy = Measured(Speed(lambda r: 4 + 0.3 * r, lambda r: 1 + 0.1 * r), rows=8, most_guesses=60)
    if kind < 0.75:
        return Guessing(policy, scripted)
    if kind < 0.85:
        growth = Continuous(lambda r: 1 + 0.2 * r, width=3, rows=4, floor=0.05)
    elif kind < 0.93:
        knobs = Knobs(rnd.randint(1, 6), rnd.randint(1, 3), 0.001, 0.1, rnd.choice((0.0, 0.1)), rnd.choice((0.0, 0.05)))
        policy, growth = PipeInfer(knobs, 60), Microbatches(knobs, width=3, lead=8)
    else:
        policy, growth = Synchronous(60), Once(rnd.randint(1, 4), 2, rnd.randint(1, 6), 3)
    return Guessing(policy, ModelDrafter(40, growth, most=64, chunk=rnd.choice((3, 40))), rnd.randint(1, 2))


def run_seed(seed: int, made: Made | None = None) -> str:
    """What went wrong with this seed, in a sentence; "" when all is well."""
    rnd = random.Random(seed)
    made = made or Made()
    layers, requests = rnd.randint(1, 5), requests_of(rnd)
    plain = {r.id: LightModel(layers, VOCAB, seed).plain(r) for r in requests}
    truth = {r.id: (*r.tokens, *plain[r.id][0]) for r in requests}
    simulation = cluster(rnd, seed, layers, made, guessing_of(rnd, truth))
    withdrawn: set[int] = set()
    for r in requests:
        at = rnd.choice((0.0, rnd.random() * 30))
        simulation.submit(Submit(r), at)
        if rnd.random() < 0.15:
            withdrawn.add(r.id)
            simulation.submit(Withdraw(r.id), at + rnd.random() * 60)
    try:
        log = simulation.run(100_000)
    except (Stuck, BadMessage, KeyError, AssertionError, IndexError) as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    wrong = verdict(requests, plain, withdrawn, log.emitted, log.finished) or next(
        iter(simulation.check_integrity()), ""
    )
    return f"seed {seed}: {wrong}" if wrong else ""


def verdict(
    requests: Sequence[Request],
    plain: Mapping[int, tuple[list[int], str]],
    withdrawn: Collection[int],
    emitted: Sequence[tuple[float, int, int]],
    finished: Sequence[tuple[float, int, str]],
) -> str:
    """What is wrong with what was told; "" when it's plain decoding's text, each token once."""
    texts: dict[int, list[int]] = {r.id: [] for r in requests}
    for _, seq, token in emitted:
        texts[seq].append(token)
    for _, seq, reason in finished:
        text, why = plain[seq]
        whole = (texts[seq], reason) == (text, why)
        part = seq in withdrawn and reason == "cancelled" and texts[seq] == text[: len(texts[seq])]
        if not (whole or part or (reason == "too long" and not texts[seq])):
            return f"sequence {seq} gave {texts[seq]} ({reason}), plain decoding {text} ({why})"
    if len(finished) != len(requests):
        return f"{len(finished)} of {len(requests)} requests were answered"
    return ""


def cluster(
    rnd: random.Random, seed: int, layers: int, made: Made, guessing: Guessing, epoch: int = 0, most: int = 99
) -> Simulation:
    """Random nodes, at most so many, with random speeds and links."""
    count = rnd.randint(1, min(layers, most))
    edges = [0, *sorted(rnd.sample(range(1, layers), count - 1)), layers]
    stages: list[tuple[Stage, Computer | None]] = [
        (made.stage(a, b, layers, epoch), LightModel(layers, VOCAB, seed)) for a, b in pairwise(edges)
    ]
    pages = rnd.randint(4, 14)
    order = Order(
        rows=rnd.choice((1, 2, 8, 40)), runs=rnd.choice((1, 1, 2, 3)), blocks=rnd.randint(1, 6), guesses=8,
        chunk=rnd.choice((1, 3, 40)), sequences=rnd.choice((1, 2, 4)),
    )  # fmt: skip
    speeds = [rnd.choice((0.1, 0.3, 1.0)) for _ in stages]
    stall = rnd.choice((0.0, 0.05))

    def cost(stage: int, rows: int) -> float:
        pause = rnd.random() * 20 if stall and rnd.random() < stall else 0.0
        return speeds[stage] * (0.5 + rnd.random()) * (1 + 0.1 * rows) + pause

    link = LinkSpec(
        rnd.choice((0.0, 0.1, 2.0)), rnd.choice((1e3, 1e6)), rnd.choice((0.0, 0.5, 5.0)), stall, rnd.choice((0.0, 20.0))
    )
    head = made.head(pages, order, guessing.policy, epoch)
    lazy = rnd.random() < 0.3
    fixed, small = speeds[0], rnd.choice((0.02, 0.3))
    draft: list[tuple[Stage, Computer | None]] = []
    if guessing.stages:
        # The draft is the target with errors, on one node or two.
        accuracy = rnd.random()
        cuts = [0, layers // 2, layers] if guessing.stages == 2 and layers > 1 else [0, layers]
        draft = [(Stage(a, b, layers), LightDraft(layers, VOCAB, seed, accuracy, 3)) for a, b in pairwise(cuts)]
    return Simulation(
        head, stages, (lambda _, rows: fixed * (1 + 0.1 * rows)) if lazy else cost, link, 1, guessing.drafter, draft,
        lambda _, rows: small * (1 + 0.1 * rows), rnd=rnd, lazy=lazy,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--faults", action="store_true", help="lose ranks, links, drafters, heads (simulate_faults.py)")
    args = parser.parse_args()
    one = run_seed
    if args.faults:
        from simulate_faults import run_seed as one
    start, failed = time.perf_counter(), 0
    for done, seed in enumerate(range(args.start, args.start + args.count), 1):
        if wrong := one(seed):
            failed += 1
            print(wrong, flush=True)
        if done % 5000 == 0 or done == args.count:
            took = time.perf_counter() - start
            cpu = time.process_time()
            print(
                f"{done} seeds, {failed} failed, {done / took:.0f} a second ({done / cpu:.0f} a CPU second)", flush=True
            )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
