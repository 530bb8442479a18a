"""The driver for one process: head, stages and drafter pass their messages through a queue.

One thread, so what happens is a function of what was submitted. A step is carried out when its turn comes and
its end is queued like any message, so cancels and new requests are looked at between layers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.run.head import Head
from headrace.run.stage import Computer, Stage
from headrace.run.types import (
    Cancel,
    Committed,
    Draft,
    Emit,
    Finish,
    HeadEvent,
    Passed,
    Result,
    RunMessage,
    Step,
)


class Drafter(Protocol):
    """Hears what was committed and proposes trees; a state machine like the others."""

    def on_event(self, event: Committed, now: float) -> list[Draft]: ...


class Loopback:
    """Carries effects between one head, its stages (each with a computer) and perhaps a drafter."""

    def __init__(
        self,
        head: Head,
        stages: Sequence[tuple[Stage, Computer]],
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.head = head
        self.stages = list(stages)
        self.drafter = drafter
        self.clock = clock
        self._queue: deque[tuple[int, RunMessage | Cancel | Step | HeadEvent | Committed]] = deque()
        self._out: list[Emit | Finish] = []

    HEAD = -1
    DRAFTER = -2

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

    def turn(self) -> None:
        """Deliver one message, and carry out what it asks for."""
        to, event = self._queue.popleft()
        now = self.clock()
        if to == self.HEAD:
            assert not isinstance(event, RunMessage | Cancel | Step | Committed)
            self._from_head(event, now)
        elif to == self.DRAFTER:
            assert self.drafter is not None and isinstance(event, Committed)
            self._queue.extend((self.HEAD, draft) for draft in self.drafter.on_event(event, now))
        else:
            assert isinstance(event, RunMessage | Cancel | Step)
            self._at_stage(to, event, now)

    def _from_head(self, event: HeadEvent, now: float) -> None:
        for effect in self.head.on_event(event, now):
            if isinstance(effect, RunMessage):
                self._queue.append((0, effect))
            elif isinstance(effect, Cancel):
                # Out of band: a cancel overtakes runs.
                self._queue.extendleft((i, effect) for i in range(len(self.stages)))
            elif isinstance(effect, Committed):
                if self.drafter is not None:
                    self._queue.append((self.DRAFTER, effect))
            else:
                self._out.append(effect)

    def _at_stage(self, at: int, event: RunMessage | Cancel | Step, now: float) -> None:
        stage, computer = self.stages[at]
        effects = stage.on_event(event, now)
        while len(effects) == 1 and isinstance(effects[0], Step) and not self._queue:
            # Nothing else to look at: on to the next layer without a detour through the queue.
            computer.step(effects[0].layer, stage.runs[effects[0].run])
            effects = stage.on_event(effects[0], now)
        for effect in effects:
            if isinstance(effect, Step):
                computer.step(effect.layer, stage.runs[effect.run])
                self._queue.append((at, effect))
            elif isinstance(effect, Result | Passed):
                self._queue.append((self.HEAD, effect))
            else:
                self._queue.append((at + 1, effect))
