"""What the simulator says of paced ranks (``paced.py``): the product's code, this machine's overheads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from headrace import drafting
from headrace.cluster import message
from headrace.cluster.pulse import LEAST, Silences
from headrace.run.head import Head
from headrace.run.schedule import Order
from headrace.run.stage import Stage
from headrace.run.types import (
    Append,
    Choice,
    Committed,
    Draft,
    Params,
    Request,
    Result,
    Row,
    RunMessage,
    Sampling,
    Submit,
)
from headrace.simulate.acceptance import TargetText
from headrace.simulate.cluster import CPU_CURVE as CURVE
from headrace.simulate.driver import Simulation
from headrace.simulate.network import Link, LinkSpec
from headrace.speculate.learned import Learned
from pair import Drafts

BLOCKS, WIDTH = 30, 576
SILENCES = (0.0, 0.008, 0.064, 0.2)
"""Seconds before a message whose way is probed."""


def even(targets: int) -> list[int]:
    """Blocks of each target rank, so that their layers with embedding and output are about as many."""
    layers = [(BLOCKS + 2) // targets + (i < (BLOCKS + 2) % targets) for i in range(targets)]
    order = [*layers[1:-1], layers[0], layers[-1]]  # the longer ones in the middle
    inner, ends = sorted(order, reverse=True)[: targets - 2], sorted(order)[:2]
    return [ends[1] - 1, *inner, ends[0] - 1]


def learned(share: float, passes: dict[int, float], rows: int) -> Learned:
    """Our policy, knowing what passes take and no more."""
    policy = Learned(share, rows)
    for count, seconds in sorted(passes.items()):
        policy.learn(count, seconds)
        policy.learn(count, seconds)
    return policy


def policy_of(wish: drafting.Wish, share: float, passes: dict[int, float]) -> Any:
    if wish.policy == "ours":
        return learned(share, passes, int(min(wish.most, 64)))
    return drafting.rank_policy(wish, share)


@dataclass
class Written(TargetText):
    """The target's last stage: the recorded text."""

    text: Sequence[int]

    def choice(self, i: int, row: Row) -> Choice:
        right = row.token == self.text[row.position] if row.position + 1 < len(self.text) else False
        return Choice(i, self.text[row.position + 1] if right else 0)


@dataclass
class Drafted(TargetText):
    """The drafter's last stage: what the draft really says, on the text and off it."""

    drafts: Drafts
    tokens: dict[int, int] = field(default_factory=dict)
    """By slot."""

    def step(self, layer: int, run: Any) -> None:
        self.tokens.update((row.slot, row.token) for row in run.message.rows)
        super().step(layer, run)

    def choice(self, i: int, row: Row) -> Choice:
        path = (*(self.tokens[slot] for slot in row.ancestors), row.token) if row.guess else ()
        said = self.drafts.after(row.position - len(path), path)
        return Choice(i, said.token, said.logprob, said.top)


class Ear:
    """When a waiting rank notices what has come (``cluster.pulse``), ``ways`` as in ``Ways``."""

    def __init__(self, ways: Ways) -> None:
        self.silences, self.ways, self.moved = Silences(), ways, 0.0
        self._last = 0.0

    def hears(self, now: float, busy: bool) -> float:
        """A message is there: the time of the poll that finds it, not before what came before."""
        self._last = max(self._last, now if busy else self._polls(now))
        return self._last

    def _polls(self, now: float) -> float:
        silence, quiet = now - self.moved, 0.0
        while quiet < silence:
            nap = self.silences.nap(quiet)
            quiet = quiet + nap if nap else min(quiet + LEAST, silence)
        return self.moved + quiet + self.ways.extra(silence)

    def heard(self, now: float) -> None:
        if now > self.moved:
            self.silences.ended(now - self.moved)
            self.moved = now


class Ways:
    """Pings, seconds of a message's way after each of ``SILENCES``, the silence having been learned."""

    def __init__(self, pings: Sequence[Sequence[float]]) -> None:
        self.medians = [statistics.median(each) for each in pings]
        self._off = [way - median for each, median in zip(pings, self.medians, strict=True) for way in each]
        self._random = Random(0)

    def extra(self, silence: float) -> float:
        """Beyond the way after no silence: caches are cold, and no two ways are alike."""
        cold = float(np.interp(silence, SILENCES, self.medians)) - self.medians[0]
        return max(cold + self._random.choice(self._off), 0.0)


class Mouth(Link):
    """A link whose sender knows that it has just said something."""

    def __init__(self, spec: LinkSpec, ear: Ear) -> None:
        super().__init__(spec)
        self._ear = ear

    def arrival(self, now: float, nbytes: int) -> float:
        self._ear.moved = now
        return super().arrival(now, nbytes)


class Shared(Simulation):
    """Ranks: a message waits for the layer that is being computed, or for the rank to look; the first has the head."""

    thought = 0.0
    """Seconds that the head has really taken."""
    grown = 0.0
    """Seconds that the drafter has."""

    def listen(self, ways: Ways) -> None:
        """Before anything happens: messages between ranks take what they take."""
        spec, pipe = LinkSpec(max(ways.medians[0], 1e-6), 1e9), self.pipe
        self.ears = [Ear(ways) for _ in range(len(pipe.nodes) + 1)]
        for i, node in enumerate(pipe.nodes):
            node.link = node.link and Mouth(spec, self.ears[i])
            if i:
                node.deliver = partial(self._come, i, node.deliver)  # type: ignore[method-assign]
                pipe.cancels[i] = Mouth(spec, self.ears[0])
        pipe.back = pipe.back and Mouth(spec, self.ears[-2])
        self.to_drafter, self.from_drafter = Mouth(spec, self.ears[0]), Mouth(spec, self.ears[-1])

    def _come(self, rank: int, hear: Callable[[Any], None], event: Any) -> None:
        """A message is at a rank; it hears it when it looks."""
        time = self.ears[rank].hears(self.clock.now, self._busy(rank))
        self.clock.at(time, self._heard, rank, hear, event)

    def _heard(self, rank: int, hear: Callable[[Any], None], event: Any) -> None:
        if not self._busy(rank):
            self.ears[rank].heard(self.clock.now)
        hear(event)

    def _busy(self, rank: int) -> bool:
        nodes = [*self.pipe.nodes, *(self.draft_pipe.nodes if self.draft_pipe else ())]
        return nodes[rank].step is not None

    def _to_head(self, event: Any) -> None:
        if isinstance(event, Draft | Result):
            self._come(0, self._at_head, event)
        else:
            self._at_head(event)

    def _at_head(self, event: Any) -> None:
        node, now = self.pipe.nodes[0], self.clock.now
        end = node._began + node._each
        while node.step is not None and end <= now:
            end += node._each
        if node.step is not None and end > now + 1e-9:
            self.clock.at(end, self._think, event)
        else:
            self._think(event)

    def _think(self, event: Any) -> None:
        start = time.perf_counter()
        super()._to_head(event)
        self.thought += time.perf_counter() - start

    def _to_drafter(self, event: Any) -> None:
        if isinstance(event, Committed):
            self._come(-1, self._grow, event)
        else:
            self._grow(event)

    def _grow(self, event: Any) -> None:
        start = time.perf_counter()
        super()._to_drafter(event)
        self.grown += time.perf_counter() - start


def handling() -> float:
    """Seconds that a stage's messages cost: unpacking one, hearing it, packing it again."""
    rows = (Row(0, 0, 5, 0, wanted=True),)
    stage = Stage(1, 2, 4)
    took = []
    for i in range(50):
        op = Append(0, (i,), (5,))
        ops = (Params(0, Sampling()), op) if i == 0 else (op,)
        rows = (Row(0, i, 5, i, wanted=True),)
        data = message.pack(RunMessage(0, i, False, ops, rows, None, np.zeros((1, WIDTH), np.float32)))
        start = time.perf_counter()
        found = message.unpack(memoryview(data), message.Limits(50_000, 64, WIDTH))
        assert isinstance(found, RunMessage)
        stage.on_event(found, 0.0)
        stage.runs[i].rows  # noqa: B018 (it is made when first asked for)
        for effect in stage.on_event(SimpleNamespace(layer=1, run=i), 0.0):  # type: ignore[arg-type]
            if isinstance(effect, RunMessage):
                message.pack(effect)
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def predict(
    wish: drafting.Wish, blocks: Sequence[int], job: dict[str, Any], pings: Sequence[Sequence[float]], drafts: Drafts,
    handled: float = 0.0, probed: tuple[dict[int, float], float] | None = None,
    steps: dict[int, float] | None = None, thinking: tuple[float, float] | None = None,
) -> tuple[float, dict[str, int]]:  # fmt: skip
    """Tokens/s of a strategy on stages of so many blocks, and the head's counts.

    handled: seconds of a run's messages at a stage.
    probed: what passes take and the slowest stage's share, as the ranks' probe said; None: as it follows from the job.
    steps: seconds of a drafter's step by its rows, as far as they were seen; None: as they should be.
    thinking: seconds of head and of drafter for each of their runs; None: as they take in a first simulation.
    """
    targets, total, each = len(blocks), BLOCKS + 2, job["layer"]
    layers = [*blocks]
    layers[0] += 1
    layers[-1] += 1
    hops = targets - (targets == 1)
    ways = Ways(pings)
    passes = {rows: total * each * CURVE(rows) + hops * ways.medians[0] for rows in (1, 2, 4, 8, 16)}
    policy = policy_of(wish, max(layers) / total, passes) if probed is None else policy_of(wish, probed[1], probed[0])
    order = Order(rows=64, sequences=1)
    head = Head(80, drafting.order_of(wish, order, targets), policy)
    stages, edge = [], 0
    for count in layers:
        last = edge + count == total
        stages.append((Stage(edge, edge + count, total), Written(total, drafts.text) if last else None))
        edge += count
    drafter, draft_stages = None, []
    if wish:
        some: Any = SimpleNamespace(pages=24, share=job["draft_step"] / (total * each), words=None)
        drafter = drafting.drafter_of(wish, some)
        draft_stages = [(Stage(0, 8, 8), Drafted(8, drafts))]
    thinks, grows = thinking or (0.0, 0.0)
    seen = sorted((steps or {1: job["draft_step"]}).items())
    shares = [seconds / (job["draft_step"] * CURVE(rows)) for rows, seconds in seen]

    def slower(rows: int) -> float:
        return float(np.interp(rows, [at for at, _ in seen], shares))

    besides = [handled + (thinks if i == 0 else 0.0) for i in range(targets)]
    simulation = Shared(
        head, stages, lambda at, rows: each * CURVE(rows) + besides[at] / layers[at], LinkSpec(), WIDTH, drafter,
        draft_stages, lambda _, rows: (slower(rows) * job["draft_step"] * CURVE(rows) + grows) / 8,
    )  # fmt: skip
    simulation.listen(ways)
    simulation.submit(Submit(Request(0, tuple(job["prompt"]), job["tokens"])))
    times = [time for time, _, _ in simulation.run().emitted]
    if thinking is None and handled:
        took = simulation.thought / head.counts.runs, simulation.grown / max(1, getattr(drafter, "_run", 0))
        return predict(wish, blocks, job, pings, drafts, handled, probed, steps, took)
    return (len(times) - 1) / (times[-1] - times[0]), vars(head.counts)


def settings(blocks: Sequence[int], job: dict[str, Any], drafts: Drafts) -> list[drafting.Wish]:
    """The best synchronous one, PipeInfer's best, ours; drafts are of a model in name only."""

    pings = [[2e-4]] * len(SILENCES)  # nothing is known of them yet

    def best(policy: str, knobs: list[dict[str, float]]) -> drafting.Wish:
        tried = [drafting.Wish(model=Path("-"), policy=policy, knobs=k) for k in knobs]
        return max(tried, key=lambda wish: predict(wish, blocks, job, pings, drafts)[0])

    narrow: list[dict[str, float]] = [{"draft": d, "np": 1, "pa": 0.001, "ps": 0.2} for d in (1, 2, 3, 4)]
    wide: list[dict[str, float]] = [{"draft": d, "np": 2, "pa": 0.001, "ps": 0.03} for d in (2, 3, 4)]
    sync: list[dict[str, float]] = [{"draft": d} for d in range(1, 9)]
    return [best("sync", sync), best("pipeinfer", narrow + wide), drafting.Wish(model=Path("-"))]
