"""Deterministic testing of failure: what ``simulate_seeds`` does, and ranks, links, the drafter or the head are lost.

    python benchmarks/simulate_seeds.py --faults [--start 0] [--count 10000]

Each seed has up to four faults at random moments. A rank is killed (its messages end, the loss is noticed a while
later), a link is cut (both sides work on meanwhile), a rank stands still (and either comes back or is given up), the
drafter is lost; the head goes on over the ranks that are left, with stages that know nothing, as the product's
``cluster.members.again`` says. Or the head dies and a new one begins from what was told. The text must be plain
decoding's, told once; nothing may be left over in slots, pages, tables or runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hash_model import LightModel
from headrace.cluster.members import again
from headrace.errors import BadMessage
from headrace.run.head import Head
from headrace.run.stage import Stage
from headrace.run.types import Cancel, Forget, HeadEvent, Request, Result, RunMessage, Submit, Withdraw
from headrace.simulate.driver import Node, Simulation, Stuck
from simulate_seeds import VOCAB, Guessing, Made, cluster, guessing_of, requests_of, verdict

KINDS = ("kill", "kill", "cut", "stop", "drafter", "head")


class Frail(Node):
    """A rank that can be lost. dead: does and hears nothing any more; cut: nothing of it comes through; still_until:
    does nothing until then, and afterwards everything it missed."""

    dead = cut = False
    still_until = 0.0

    def deliver(self, event: RunMessage | Cancel) -> None:
        if self.dead or self.cut:
            return
        if self.still_until > self.pipe.clock.now:
            self.pipe.clock.at(self.still_until, self.deliver, event)
        else:
            super().deliver(event)

    def _finish(self, order: int) -> None:
        if self.dead:
            return
        if self.still_until > self.pipe.clock.now:
            self.pipe.clock.at(self.still_until, self._finish, order)
        else:
            super()._finish(order)


@dataclass
class Fault:
    """at: when it happens; noticed: when the head hears of it; None: never."""

    kind: str
    at: float
    noticed: float | None


def faults_of(rnd: random.Random) -> list[Fault]:
    """Seconds count from the beginning of the epoch that the fault ends."""
    made = []
    for _ in range(rnd.choice((1, 1, 2, 3, 4))):
        kind, at = rnd.choice(KINDS), rnd.random() ** 2 * 80
        delay = 0.0 if kind == "head" else rnd.choice((0.0, 1.0, 15.0)) * rnd.random()
        made.append(Fault(kind, at, None if kind == "stop" and rnd.random() < 0.5 else at + delay))
    return made


class Epoch:
    """One set of ranks, from their start to the next fault."""

    def __init__(
        self, rnd: random.Random, seed: int, layers: int, made: Made, guessing: Guessing, number: int, most: int
    ) -> None:
        self.random = rnd
        self.simulation = cluster(rnd, seed, layers, made, guessing, number, most)
        pipe = self.simulation.pipe
        pipe.nodes = [Frail(n.pipe, n.at, n.stage, n.computer, n.link) for n in pipe.nodes]
        self.size = len(pipe.nodes)

    @property
    def nodes(self) -> list[Frail]:
        return [node for node in self.simulation.pipe.nodes if isinstance(node, Frail)]

    def until(self, end: float) -> bool:
        """Work until then; False when everything was over before."""
        clock, most = self.simulation.clock, 100_000
        while (then := clock.next) is not None and then <= end:
            clock.turn()
            most -= 1
            if not most:
                raise Stuck("not over after 100000 events")
        return then is not None or not self.simulation.head.idle

    def suffer(self, fault: Fault) -> bool:
        """The fault happens; whether ranks are lost by it."""
        others = self.nodes[1:]
        if fault.kind in ("kill", "cut", "stop") and others:
            node = self.random.choice(others)
            if fault.kind == "kill":
                node.dead = True
            elif fault.kind == "cut":
                node.cut = True
            else:
                back = fault.at + 10 * self.random.random() if fault.noticed is None else fault.noticed + 1e9
                node.still_until = back
            return True
        if fault.kind == "drafter" and self.simulation.draft_pipe is not None:
            for node in self.simulation.draft_pipe.nodes:
                node.stage.watch = None
            self.simulation.drafter = _Silent()
            return True
        return fault.kind == "head"


class _Silent:
    """A drafter that is gone."""

    def on_event(self, event: object, now: float) -> list[object]:
        return []


def journal(requests: Sequence[Request], log: Sequence[tuple[float, int, int]], over: set[int]) -> list[HeadEvent]:
    """What a new head is asked for by what the old one told: a request begins where its text ends."""
    out: list[HeadEvent] = []
    for r in requests:
        told = tuple(token for _, seq, token in log if seq == r.id)
        if r.id not in over:
            out.append(Submit(replace(r, tokens=r.tokens + told, max_tokens=r.max_tokens - len(told), continues=None)))
    return out


def run_seed(seed: int, made: Made | None = None) -> str:
    """What went wrong with this seed, in a sentence; "" when all is well."""
    rnd, made = random.Random(seed), made or Made()
    layers, requests = rnd.randint(1, 5), requests_of(rnd)
    plain = {r.id: LightModel(layers, VOCAB, seed).plain(r) for r in requests}
    truth = {r.id: (*r.tokens, *plain[r.id][0]) for r in requests}
    asked: list[tuple[float, HeadEvent]] = []
    for r in requests:
        at = rnd.choice((0.0, rnd.random() * 30))
        asked.append((at, Submit(r)))
        if rnd.random() < 0.15:
            asked.append((at + rnd.random() * 60, Withdraw(r.id)))
    withdrawn = {event.request for _, event in asked if isinstance(event, Withdraw)}
    try:
        emitted, finished, last = _lives(rnd, seed, layers, made, requests, truth, asked)
    except (Stuck, BadMessage, KeyError, AssertionError, IndexError) as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    wrong = verdict(requests, plain, withdrawn, emitted, finished) or leaks(last)
    return f"seed {seed}: {wrong}" if wrong else ""


def _lives(
    rnd: random.Random, seed: int, layers: int, made: Made, requests: Sequence[Request],
    truth: dict[int, tuple[int, ...]], asked: list[tuple[float, HeadEvent]],
) -> tuple[list[tuple[float, int, int]], list[tuple[float, int, str]], Simulation]:  # fmt: skip
    """Epoch after epoch; what was told in all of them, and the last one."""
    emitted: list[tuple[float, int, int]] = []
    finished: list[tuple[float, int, str]] = []
    faults, most, unheard = faults_of(rnd), layers, list[Result]()
    number = 0
    first: list[HeadEvent] = []
    while True:
        epoch = Epoch(rnd, seed, layers, made, guessing_of(rnd, truth), number, most)
        simulation = epoch.simulation
        for event in (*first, *unheard):
            simulation.submit(event)
        for at, event in asked:
            simulation.submit(event, at)
        lost = None
        while faults and lost is None:
            fault = faults.pop(0)
            if not epoch.until(fault.at):
                break
            if (late_by := simulation.clock.now - fault.at) > 0:  # after an earlier one of this epoch
                fault = replace(fault, at=fault.at + late_by, noticed=fault.noticed and fault.noticed + late_by)
            if epoch.suffer(fault) and fault.noticed is not None:
                lost = fault
                epoch.until(fault.noticed)
        if lost is None:
            epoch.until(1e12)
        emitted += simulation.log.emitted
        finished += simulation.log.finished
        if lost is None:
            if not simulation.head.idle:
                raise Stuck("nothing is left to happen, but the head still waits: a deadlock")
            return emitted, finished, simulation
        now = lost.noticed or 0.0
        over = {seq for _, seq, _ in finished}
        begun = [event.request for at, event in asked if at <= now and isinstance(event, Submit)]
        known = [*(e.request for e in first if isinstance(e, Submit)), *begun]
        if lost.kind == "head":
            ids = {r.id for r in known}
            first = journal([r for r in requests if r.id in ids], emitted, over)
        else:
            first = [*again(simulation.head, [])]
            most = max(1, epoch.size - (lost.kind != "drafter"))
        asked = [(at - now, event) for at, event in asked if at > now]
        unheard = [Result(number, run, ()) for run in list(simulation.head.flights)[: rnd.choice((0, 0, 2))]]
        number += 1


def leaks(simulation: Simulation) -> str:
    """What is left at the end that shouldn't be, kept sequences forgotten."""
    head = simulation.head
    wrong = simulation.check_integrity()
    if wrong:
        return wrong[0]
    for seq in list(head.kept):
        simulation.submit(Forget(seq), simulation.clock.now)
    while simulation.clock.turn():
        pass
    if head.pool.available != head.pool.total:
        return f"{head.pool.total - head.pool.available} pages are still held"
    for node in simulation.pipe.nodes:
        if len(node.stage.tables) or node.stage.params:
            return f"stage {node.at} still knows {len(node.stage.tables)} sequences"
    return ""


__all__ = ["Head", "Stage", "run_seed"]
