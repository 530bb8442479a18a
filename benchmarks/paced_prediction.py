"""What the simulator says of paced ranks (``paced.py``): the product's code, this machine's overheads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from headrace import drafting
from headrace.cluster import message
from headrace.run.head import Head
from headrace.run.schedule import Order
from headrace.run.stage import Stage
from headrace.run.types import Append, Params, Request, Row, RunMessage, Sampling, Submit
from headrace.simulate.acceptance import DraftText, Recorded, TargetText
from headrace.simulate.cluster import CPU_CURVE as CURVE
from headrace.simulate.driver import Simulation
from headrace.simulate.network import LinkSpec
from headrace.speculate.learned import Learned

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


class Shared(Simulation):
    """Head and first stage are one thread: what comes for the head waits for the layer that is being computed."""

    thought = 0.0
    """Seconds that the head has really taken."""
    grown = 0.0
    """Seconds that the drafter has."""

    def _to_head(self, event: Any) -> None:
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


def link_of(ways: Sequence[float]) -> LinkSpec:
    """What a message takes at once, and by how much a receiver that has heard nothing for long is slower to see it."""
    slopes = [(way - ways[0]) / silence for way, silence in zip(ways[1:], SILENCES[1:], strict=True)]
    return LinkSpec(max(ways[0], 1e-6), 1e9, listen=max(0.0, statistics.median(slopes)))


def predict(
    wish: drafting.Wish, blocks: Sequence[int], job: dict[str, Any], link: LinkSpec, pair: Recorded,
    handled: float = 0.0, thinking: tuple[float, float] | None = None,
) -> float:  # fmt: skip
    """Tokens/s of a strategy on stages of so many blocks. handled: seconds of a run's messages at a stage.

    thinking: seconds of head and of drafter for each of their runs; None: as they take in a first simulation.
    """
    targets, total, each = len(blocks), BLOCKS + 2, job["layer"]
    layers = [*blocks]
    layers[0] += 1
    layers[-1] += 1
    hops = targets - (targets == 1)
    passes = {rows: total * each * CURVE(rows) + hops * link.latency for rows in (1, 2, 4, 8, 16)}
    policy = policy_of(wish, max(layers) / total, passes)
    order = Order(rows=64, sequences=1)
    head = Head(80, drafting.order_of(wish, order, targets), policy)
    stages, edge = [], 0
    for count in layers:
        last = edge + count == total
        stages.append((Stage(edge, edge + count, total), TargetText(total) if last else None))
        edge += count
    drafter, drafts = None, []
    if wish:
        some: Any = SimpleNamespace(pages=24, share=job["draft_step"] / (total * each), words=None)
        drafter = drafting.drafter_of(wish, some)
        drafts = [(Stage(0, 8, 8), DraftText(8, pair))]
    thinks, grows = thinking or (0.0, 0.0)
    besides = [handled + (thinks if i == 0 else 0.0) for i in range(targets)]
    simulation = Shared(
        head, stages, lambda at, rows: each * CURVE(rows) + besides[at] / layers[at], link, WIDTH, drafter, drafts,
        lambda _, rows: (job["draft_step"] * CURVE(rows) + grows) / 8,
    )  # fmt: skip
    simulation.submit(Submit(Request(0, tuple(2 * p for p in range(len(job["prompt"]))), job["tokens"])))
    times = [time for time, _, _ in simulation.run().emitted]
    if thinking is None and handled:
        steps = getattr(drafter, "_run", 0)
        took = simulation.thought / head.counts.runs, simulation.grown / max(1, steps)
        return predict(wish, blocks, job, link, pair, handled, took)
    return (len(times) - 1) / (times[-1] - times[0])


def settings(blocks: Sequence[int], job: dict[str, Any], pair: Recorded) -> list[drafting.Wish]:
    """The best synchronous one, PipeInfer's best, ours; drafts are of a model in name only."""

    link = LinkSpec(2e-4, 1e9)  # nothing is known of it yet

    def best(policy: str, knobs: list[dict[str, float]]) -> drafting.Wish:
        tried = [drafting.Wish(model=Path("-"), policy=policy, knobs=k) for k in knobs]
        return max(tried, key=lambda wish: predict(wish, blocks, job, link, pair))

    narrow: list[dict[str, float]] = [{"draft": d, "np": 1, "pa": 0.001, "ps": 0.2} for d in (1, 2, 3, 4)]
    wide: list[dict[str, float]] = [{"draft": d, "np": 2, "pa": 0.001, "ps": 0.03} for d in (2, 3, 4)]
    sync: list[dict[str, float]] = [{"draft": d} for d in range(1, 9)]
    return [best("sync", sync), best("pipeinfer", narrow + wide), drafting.Wish(model=Path("-"))]
