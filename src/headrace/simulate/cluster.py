"""A cluster as data, and requests simulated on it with a strategy: what ``headrace simulate`` does."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from headrace.kernels.device import PAGE
from headrace.run.head import Head
from headrace.run.policy import GuessPolicy, NoGuesses
from headrace.run.schedule import Order
from headrace.run.stage import Computer, Stage
from headrace.run.trace import Recorder
from headrace.run.types import Request, Submit
from headrace.simulate.acceptance import DraftText, Ranks, TargetText
from headrace.simulate.driver import Simulation
from headrace.simulate.network import GIGABIT, ROW, LinkSpec
from headrace.simulate.report import Report, report
from headrace.speculate.control import Measured, Speed
from headrace.speculate.grow import Growth, ModelDrafter
from headrace.speculate.growth import Continuous, Once
from headrace.speculate.pipeinfer import Knobs, Microbatches, PipeInfer
from headrace.speculate.sync import Synchronous


@dataclass(frozen=True)
class Curve:
    """Relative cost of a run by its rows: (rows, cost) ascending, linear between and beyond the last two."""

    points: tuple[tuple[int, float], ...]

    def __call__(self, rows: int) -> float:
        points = self.points
        at = min(max(bisect_right(points, (rows, float("inf"))), 1), len(points) - 1)
        (r0, c0), (r1, c1) = points[at - 1], points[at]
        return c0 + (c1 - c0) * (rows - r0) / (r1 - r0)


CPU_CURVE = Curve(((1, 1.0), (2, 1.35), (4, 1.8), (8, 3.7), (16, 7.0), (64, 18.0)))
GPU_CURVE = Curve(((1, 1.0), (16, 1.2), (64, 2.2)))


@dataclass(frozen=True)
class Cluster:
    """Nodes in a chain, the last a drafter's where there is one.

    layers: of the target on each of its nodes. layer_time: seconds of one at one row, on each node. curve: of
    both models. draft_layers, draft_time: the drafter's layers and seconds of a one-row step over all of them (few
    layers are quicker to simulate; they only matter for cancelling).
    """

    layers: tuple[int, ...]
    layer_time: tuple[float, ...]
    curve: Curve = CPU_CURVE
    link: LinkSpec = GIGABIT
    width: int = 8192
    draft_layers: int = 2
    draft_time: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.layers)

    def stage_time(self, stage: int, rows: int) -> float:
        return self.layers[stage] * self.layer_time[stage] * self.curve(rows)

    def hop_time(self, rows: int) -> float:
        """A link's own work for a run's activations, without latency."""
        return (rows * (4 * self.width + ROW) + 64) / self.link.rate

    def speed(self) -> Speed:
        """What our policy is told: the same numbers that drive the simulation, as a probe would give them."""
        n = len(self.layers)

        def passing(rows: int) -> float:
            compute = sum(self.stage_time(i, rows) for i in range(n))
            return compute + (n - 1) * (self.hop_time(rows) + self.link.latency) + (n > 1) * self.link.latency

        def entering(rows: int) -> float:
            slowest = max(self.stage_time(i, rows) for i in range(n))
            return max(slowest, self.hop_time(rows)) if n > 1 else slowest

        return Speed(passing, entering, self.layer_time[0])


def even(layers: int, nodes: int) -> tuple[int, ...]:
    """So many layers on so many nodes; those with one more come first."""
    return tuple(layers // nodes + (i < layers % nodes) for i in range(nodes))


# --- strategies -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strategy:
    """How to speculate. make: for a cluster, the head's policy, the drafter's growth (None: no drafter), rows."""

    name: str
    make: Callable[[Cluster], tuple[GuessPolicy, Growth | None, Order]]


def plain() -> Strategy:
    return Strategy("plain", lambda _: (NoGuesses(), None, Order()))


def synchronous(depth: int, beam: int = 1, nodes: int | None = None, width: int = 1) -> Strategy:
    """Drafts of ``depth`` levels: a chain (beam 1, width 1) or the ``nodes`` likeliest of a tree."""
    name = f"sync depth {depth}" + (f" beam {beam} nodes {nodes}" if nodes else "")
    order = Order(guesses=nodes or depth)
    return Strategy(name, lambda _: (Synchronous(512), Once(depth, beam, nodes, width), order))


def pipeinfer(knobs: Knobs) -> Strategy:
    name = f"pipeinfer --draft {knobs.draft} -np {knobs.np} -pa {knobs.pa} -ps {knobs.ps}"
    name += f" -pr {knobs.pr} -pd {knobs.pd}" if knobs.pr or knobs.pd else ""
    return Strategy(
        name, lambda c: (PipeInfer(knobs), Microbatches(knobs), Order(blocks=2 * len(c.layers) + 4, guesses=64))
    )


def ours(floor: float = 0.01, rows: int = 64) -> Strategy:
    def make(cluster: Cluster) -> tuple[GuessPolicy, Growth | None, Order]:
        policy = Measured(cluster.speed(), rows, floor=floor)
        return policy, Continuous(cluster.curve), Order(blocks=4 * len(cluster.layers) + 8, guesses=rows)

    return Strategy("ours", make)


# --- running --------------------------------------------------------------------------------------------


def run_simulation(
    cluster: Cluster,
    ranks: Ranks,
    strategy: Strategy,
    tokens: int = 256,
    prompt: int = 16,
    spans: bool = False,
    prompts: int = 1,
) -> Report:
    """``prompts`` requests at a time, each of ``prompt`` tokens, continued by ``tokens``, in virtual time.

    spans: look at everything (``Report.seen``, and what follows from it).
    """
    policy, growth, order = strategy.make(cluster)
    head = Head(prompts * -(-(prompt + tokens + policy.most_guesses + 2 * PAGE) // PAGE), order, policy)
    total, edge = cluster.total, 0
    stages: list[tuple[Stage, Computer | None]] = []
    for count in cluster.layers:
        last = edge + count == total
        stages.append((Stage(edge, edge + count, total), TargetText(total) if last else None))
        edge += count
    drafter, draft_stages = None, []
    if growth is not None:
        drafter = ModelDrafter(prompts * ((prompt + tokens) // PAGE + 100), growth)
        layers = cluster.draft_layers
        draft_stages = [(Stage(0, layers, layers), DraftText(layers, ranks))]
    each = cluster.draft_time / cluster.draft_layers
    costs = [_table(cluster.curve, t) for t in cluster.layer_time]
    draft_costs = _table(cluster.curve, each)
    seen = Recorder() if spans else None
    unsteady = cluster.link.jitter or cluster.link.stall
    simulation = Simulation(
        head, stages, lambda stage, rows: costs[stage][rows], cluster.link, cluster.width,
        drafter, draft_stages, lambda _, rows: draft_costs[rows], rnd=Random(0) if unsteady else None, seen=seen,
    )  # fmt: skip
    for i in range(prompts):
        simulation.submit(Submit(Request(i, tuple(2 * p for p in range(prompt)), tokens)))
    log = simulation.run()
    return report(strategy.name, simulation, log, seen)


def _table(curve: Curve, each: float, most: int = 1024) -> list[float]:
    return [0.0, *(curve(rows) * each for rows in range(1, most + 1))]
