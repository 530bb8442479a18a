"""The third driver: head, stages and drafter in virtual time.

Their code is the product's; only time, links and computers are imitated. Cancels travel on links of their own,
so they overtake runs or come before them. A stage's layers are looked at in one go where nothing can come
between, which changes no order and no time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.errors import HeadraceError
from headrace.run.head import Head
from headrace.run.stage import Computer, Stage
from headrace.run.trace import Recorder
from headrace.run.types import Cancel, Committed, Draft, Emit, Finish, HeadEvent, Passed, Result, RunMessage, Step
from headrace.simulate.clock import Clock
from headrace.simulate.network import Link, LinkSpec, nbytes, run_nbytes
from headrace.speculate.drafters import Drafter

StepCost: TypeAlias = Callable[[int, int], float]
"""(stage, rows) -> seconds of one layer."""


class Stuck(HeadraceError):
    """A simulated run that stopped before its requests were answered."""


@dataclass
class Log:
    """What happened. emitted: (time, request, token)."""

    emitted: list[tuple[float, int, int]] = field(default_factory=list)
    finished: list[tuple[float, int, str]] = field(default_factory=list)


class Node:
    """A stage with its computer and its link onward."""

    def __init__(self, pipe: Pipe, at: int, stage: Stage, computer: Computer | None, link: Link | None) -> None:
        self.pipe, self.at, self.stage, self.computer, self.link = pipe, at, stage, computer, link
        self.step: Step | None = None
        self._began = 0.0
        self._each = 0.0
        self._order = 0
        self._run = -1
        self._through = -1

    def deliver(self, event: RunMessage | Cancel) -> None:
        now = self.pipe.clock.now
        self._catch_up(now)
        self._carry(event, now)
        if isinstance(event, Cancel) and self.step is not None and self.step.run == event.run:
            # Looked at after this layer, not after all that were taken in one go.
            self._schedule(self.step.layer, self._began + self._each)

    def _catch_up(self, now: float) -> None:
        """Steps that ended by now."""
        while self.step is not None and self._began + self._each <= now:
            self._carry(self.step, self._began + self._each)

    def _finish(self, order: int) -> None:
        now = self.pipe.clock.now
        while order == self._order and self.step is not None:
            self._carry(self.step, now)

    def _carry(self, event: RunMessage | Cancel | Step, now: float) -> None:
        if isinstance(event, Step):
            self.step = None
        for effect in self.stage.on_event(event, now):
            if isinstance(effect, Step):
                self._start(effect, now)
            elif isinstance(effect, Passed):
                self.pipe.passed(effect)
            else:
                self.pipe.forward(self, effect)

    def _start(self, step: Step, now: float) -> None:
        run = self.stage.runs[step.run]
        if self.computer is not None:
            self.computer.step(step.layer, run)
        rows = len(run.live)
        if self._run != step.run:
            self._run, self._through = step.run, -1
        self.step, self._began = step, now
        if step.layer > self._through:
            self._each = self.pipe.cost(self.at, rows)
            last = self.stage.end - 1 if self.pipe.lazy and len(self.stage.block) == 1 else step.layer
            self._schedule(last, now + self._each * (last + 1 - step.layer))

    def _schedule(self, last: int, end: float) -> None:
        """The steps up to this layer, whose rows don't change meanwhile, end then."""
        self._through = last
        self._order += 1
        self.pipe.clock.at(end, self._finish, self._order)


class Pipe:
    """Stages one after the other, and what carries runs between them and cancels to each."""

    def __init__(
        self,
        clock: Clock,
        stages: Sequence[tuple[Stage, Computer | None]],
        cost: StepCost,
        link: Callable[[], Link],
        width: int,
        result: Callable[[Result], None],
        passed: Callable[[Passed], None],
        lazy: bool = True,
    ) -> None:
        self.clock, self.cost, self.width, self.lazy = clock, cost, width, lazy
        self._result, self.passed = result, passed
        last = len(stages) - 1
        self.nodes = [Node(self, i, s, c, link() if i < last else None) for i, (s, c) in enumerate(stages)]
        self.back = link() if last > 0 else None
        """From the last stage to the head; a lone stage shares the head's node."""
        self.cancels = [None if i == 0 else link() for i in range(len(stages))]

    def send(self, message: RunMessage) -> None:
        self.clock.at(self.clock.now, self.nodes[0].deliver, message)

    def cancel(self, cancel: Cancel) -> None:
        now = self.clock.now
        for node, link in zip(self.nodes, self.cancels, strict=True):
            self.clock.at(now if link is None else link.arrival(now, nbytes(cancel)), node.deliver, cancel)

    def forward(self, node: Node, effect: RunMessage | Result) -> None:
        now = self.clock.now
        if isinstance(effect, Result):
            time = now if self.back is None else self.back.arrival(now, nbytes(effect))
            self.clock.at(time, self._result, effect)
        else:
            assert node.link is not None
            arrival = node.link.arrival(now, run_nbytes(effect, self.width))
            self.clock.at(arrival, self.nodes[node.at + 1].deliver, effect)

    def check_integrity(self) -> list[str]:
        return [line for node in self.nodes for line in node.stage.check_integrity()]


class Simulation:
    """One head, its pipeline and perhaps a drafter with a pipeline of its own (``draft_stages``), in virtual time.

    cost, draft_cost: seconds of a layer. link: of every pair of nodes; width: f32 values a row carries.
    lazy: layers of a lone run are looked at in one go; off when costs are random. seen: looks at everything, the
    drafter's stages numbered after the target's.
    """

    def __init__(
        self,
        head: Head,
        stages: Sequence[tuple[Stage, Computer | None]],
        cost: StepCost,
        link: LinkSpec,
        width: int,
        drafter: Drafter | None = None,
        draft_stages: Sequence[tuple[Stage, Computer | None]] = (),
        draft_cost: StepCost | None = None,
        draft_width: int = 0,
        rnd: random.Random | None = None,
        lazy: bool = True,
        seen: Recorder | None = None,
    ) -> None:
        self.clock = Clock()
        self.head, self.drafter = head, drafter
        self.log = Log()
        if seen is not None:
            head.policy = seen.policy(head.policy)
            for number, (stage, _) in enumerate((*stages, *draft_stages)):
                seen.stage(stage, number, steps=True)

        def wire() -> Link:
            return Link(link, rnd)

        self.pipe = Pipe(self.clock, stages, cost, wire, width, self._to_head, self._to_head, lazy=lazy)
        self.draft_pipe: Pipe | None = None
        if draft_stages:
            assert draft_cost is not None
            self.draft_pipe = Pipe(
                self.clock, draft_stages, draft_cost, wire, draft_width, self._to_drafter, lambda _: None,
                lazy=lazy,
            )  # fmt: skip
        self.to_drafter, self.from_drafter = wire(), wire()

    def submit(self, event: HeadEvent, at: float = 0.0) -> None:
        self.clock.at(at, self._to_head, event)

    def run(self, most: int = 10_000_000) -> Log:
        """To the end. Raises Stuck when it ends with requests unanswered, or takes more than ``most`` events."""
        for _ in range(most):
            if not self.clock.turn():
                break
        else:
            raise Stuck(f"the simulation is not over after {most} events")
        if not self.head.idle:
            raise Stuck("nothing is left to happen, but the head still waits: a deadlock")
        return self.log

    def check_integrity(self) -> list[str]:
        """What is wrong at the end, as sentences."""
        wrong = self.head.check_integrity() + self.pipe.check_integrity()
        return wrong + (self.draft_pipe.check_integrity() if self.draft_pipe else [])

    def _to_head(self, event: HeadEvent) -> None:
        now = self.clock.now
        for effect in self.head.on_event(event, now):
            if isinstance(effect, RunMessage):
                self.pipe.send(effect)
            elif isinstance(effect, Cancel):
                self.pipe.cancel(effect)
            elif isinstance(effect, Committed):
                if self.drafter is not None:
                    self.clock.at(self.to_drafter.arrival(now, nbytes(effect)), self._to_drafter, effect)
            elif isinstance(effect, Emit):
                self.log.emitted.append((now, effect.request, effect.token))
            elif isinstance(effect, Finish):
                self.log.finished.append((now, effect.request, effect.reason))

    def _to_drafter(self, event: Committed | Result) -> None:
        assert self.drafter is not None
        now = self.clock.now
        for effect in self.drafter.on_event(event, now):
            if isinstance(effect, Draft):
                self.clock.at(self.from_drafter.arrival(now, nbytes(effect)), self._to_head, effect)
            elif self.draft_pipe is not None:
                if isinstance(effect, RunMessage):
                    self.draft_pipe.send(effect)
                else:
                    self.draft_pipe.cancel(effect)
