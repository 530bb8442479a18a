"""Carriers: what passes messages between head, stages and drafter; and the driver for one process.

One thread, so what happens is a function of what was submitted. A step is carried out when its turn comes and
its end is queued like any message, so cancels and new requests are looked at between layers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from headrace.run.head import Head
from headrace.run.stage import Computer, Stage
from headrace.run.trace import Recorder
from headrace.run.types import (
    Cancel,
    Committed,
    Draft,
    Emit,
    Finish,
    HeadEvent,
    Result,
    RunMessage,
    Step,
)

Event: TypeAlias = RunMessage | Cancel | Step | HeadEvent | Committed
Clock: TypeAlias = Callable[[], float]


class Drafter(Protocol):
    """Hears what was committed and proposes trees; a state machine like the others.

    Its RunMessages and Cancels are for its own stages, whose Results it hears.
    """

    def on_event(self, event: Committed | Result, now: float) -> Sequence[Draft | RunMessage | Cancel]: ...


class Carrier:
    """Carries effects between some stages (each with a computer) and perhaps a drafter.

    Addresses: HEAD, DRAFTER, and stages by number, the target's first and the drafter's after them. ``stages`` are
    those of this process, from number ``first`` on; ``targets`` and ``drafts`` count all there are.
    """

    HEAD = -1
    DRAFTER = -2

    def __init__(
        self,
        stages: Sequence[tuple[Stage, Computer]],
        drafter: Drafter | None,
        clock: Clock,
        first: int = 0,
        targets: int | None = None,
        drafts: int = 0,
    ) -> None:
        self.stages = list(stages)
        self.first = first
        self.targets = len(stages) - drafts if targets is None else targets
        self.drafts = drafts
        self.drafter = drafter
        self.clock = clock
        self.seen: Recorder | None = None
        self._queue: deque[tuple[int, Event]] = deque()

    def watch(self, seen: Recorder) -> None:
        """Let everything here be seen from now on."""
        self.seen = seen
        here = enumerate(self.stages, self.first)
        self.stages = [(seen.stage(stage, at), seen.computer(computer, at)) for at, (stage, computer) in here]

    def post(self, to: int, event: Event) -> None:
        """Send a message; a cancel overtakes runs."""
        if isinstance(event, Cancel):
            self._queue.appendleft((to, event))
        else:
            self._queue.append((to, event))

    def called(self) -> bool:
        """Whether there is something to look at before the next layer."""
        return bool(self._queue)

    def turn(self) -> None:
        """Deliver one message, and carry out what it asks for."""
        to, event = self._queue.popleft()
        now = self.clock()
        if to == self.DRAFTER:
            assert self.drafter is not None and isinstance(event, Committed | Result)
            for effect in self.drafter.on_event(event, now):
                if isinstance(effect, Draft):
                    self.post(self.HEAD, effect)
                else:
                    self._into(self.targets, self.drafts, effect)
        else:
            assert isinstance(event, RunMessage | Cancel | Step)
            self._at_stage(to, event, now)

    def _into(self, first: int, count: int, effect: RunMessage | Cancel) -> None:
        """A head's or a drafter's message into its stages: runs to the first of them, cancels to all."""
        if isinstance(effect, RunMessage):
            self.post(first, effect)
        else:
            for i in range(first, first + count):
                self.post(i, effect)

    def _at_stage(self, at: int, event: RunMessage | Cancel | Step, now: float) -> None:
        stage, computer = self.stages[at - self.first]
        effects = stage.on_event(event, now)
        while len(effects) == 1 and isinstance(effects[0], Step) and not self.called():
            # Nothing else to look at: on to the next layers without a detour through the queue.
            layer, number, through = effects[0]
            done = computer.steps(layer, through, stage.runs[number])
            effects = stage.on_event(Step(done, number), now)
        for effect in effects:
            if isinstance(effect, Step):
                computer.step(effect.layer, stage.runs[effect.run])
                self._queue.append((at, effect))
            elif isinstance(effect, RunMessage):
                self.post(at + 1, effect)
            elif at < self.targets:
                self.post(self.HEAD, effect)
            elif isinstance(effect, Result):
                self.post(self.DRAFTER, effect)


class Loopback(Carrier):
    """One head with everything it needs in this process. The last ``drafts`` stages are the drafter's."""

    def __init__(
        self,
        head: Head,
        stages: Sequence[tuple[Stage, Computer]],
        drafter: Drafter | None = None,
        clock: Clock = time.monotonic,
        drafts: int = 0,
    ) -> None:
        super().__init__(stages, drafter, clock, drafts=drafts)
        self.head = head
        self.drafting = drafter is not None
        self._out: list[Emit | Finish] = []

    def submit(self, event: HeadEvent) -> None:
        """A request, or the end of one; taken up at the next ``pump``."""
        self._queue.append((self.HEAD, event))

    @property
    def idle(self) -> bool:
        return not self._queue

    def pump(self) -> list[Emit | Finish]:
        """Work until something is to be told, or nothing is left to do; returns what is to be told."""
        while self._queue and not self._out:
            self.turn()
        out, self._out = self._out, []
        return out

    def watch(self, seen: Recorder) -> None:
        super().watch(seen)
        self.head.policy = seen.policy(self.head.policy)

    def look(self) -> Recorder | None:
        """What was seen so far, wherever stages are."""
        return self.seen

    def names(self) -> list[str]:
        """Of all stages, the target's first, as a trace shows them."""
        return [f"stage {i}" for i in range(self.targets)] + ["drafter"] * self.drafts

    def close(self) -> None:
        """Nothing is held here."""

    def turn(self) -> None:
        if self._queue[0][0] != self.HEAD:
            super().turn()
            return
        events: list[HeadEvent] = []
        while self._queue and self._queue[0][0] == self.HEAD:
            event = self._queue.popleft()[1]
            assert not isinstance(event, RunMessage | Cancel | Step | Committed)
            events.append(event)
        for effect in self.head.on_events(events, self.clock()):
            if isinstance(effect, RunMessage | Cancel):
                self._into(0, self.targets, effect)
            elif isinstance(effect, Committed):
                if self.drafting:
                    self.post(self.DRAFTER, effect)
            else:
                self._out.append(effect)
