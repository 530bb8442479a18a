"""Head and stages on several ranks: the same carriers, with messages for others going over a link.

Nothing here knows MPI. Rank 0 has the head and the first stage; each other rank one stage, or the drafter with its
first stage. Every rank looks at what has come before each step, so a cancel is heeded within a layer.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from headrace.cluster.handshake import Control, Failure, Look, Part, Seen, Stop, Want
from headrace.cluster.loopback import Carrier, Clock, Drafter, Event, Loopback
from headrace.cluster.message import Limits, Message
from headrace.cluster.seen import heard, told
from headrace.errors import BadMessage, Failed, HeadraceError, Lost
from headrace.run.head import Head
from headrace.run.stage import Computer, Stage
from headrace.run.trace import Recorder
from headrace.run.types import (
    Cancel,
    Committed,
    Draft,
    Emit,
    Finish,
    Forget,
    HeadEvent,
    Passed,
    Result,
    RunMessage,
    Submit,
    Withdraw,
)

CONTROL = -3
"""The address of messages that are for the rank itself."""
NAP = 0.1
"""Seconds after which a waiting head looks for what a signal handler may have submitted."""
PROMPT = 20e-3
"""Seconds that a token may wait before it is told, for the next one's sake."""


class Arrival(NamedTuple):
    """A message that came. to: an address of ``Carrier``, or CONTROL; an error says what went wrong there."""

    source: int
    to: int
    message: Message | Control | HeadraceError


class Link(Protocol):
    """What carries messages between ranks: ``cluster.mpi.Link``."""

    hosts: tuple[str, ...]
    origins: tuple[int, ...]
    gone: str
    limits: dict[int, Limits]
    sent: Counter[tuple[int, str]]
    asked: Callable[[int, Want], None] | None

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def name(self, rank: int) -> str: ...
    def send(self, rank: int, to: int, message: Message | Control) -> None: ...
    def receive(self) -> Arrival | None: ...
    def wait(self, seconds: float) -> None: ...
    def reform(self) -> bool: ...
    def fail(self, error: HeadraceError) -> None: ...


def for_address(carrier: Carrier, to: int) -> tuple[type, ...]:
    """Kinds of messages that an address takes from other ranks."""
    if to == carrier.HEAD:
        return Result, Passed, Draft
    return (Committed, Result) if to == carrier.DRAFTER else (RunMessage, Cancel)


def again(head: Head, asked: Iterable[Event]) -> list[HeadEvent]:
    """What another head is to be told so that it goes on where this one is, and what this one was yet to hear.

    A sequence begins again with all its tokens: each depends on the ones before it and its position alone.
    """
    begun = [
        replace(
            live.request, tokens=tuple(live.tokens), max_tokens=live.request.max_tokens - live.emitted, continues=None
        )
        for live in head.live.values()
    ]
    new = [event for event in asked if isinstance(event, Submit | Withdraw | Forget)]
    return [*map(Submit, begun), *map(Submit, head.waiting), *new]


class Routed(Carrier):
    """A carrier that is one rank's part. ranks: address -> the rank it is on."""

    link: Link
    ranks: Mapping[int, int]

    def post(self, to: int, event: Event) -> None:
        rank = self.ranks[to]
        if rank == self.link.rank:
            super().post(to, event)
        else:
            assert isinstance(event, RunMessage | Cancel | Result | Passed | Draft | Committed)
            self.link.send(rank, to, event)

    def called(self) -> bool:
        self.take()
        return bool(self._queue)

    def take(self) -> None:
        """Queue what has come: cancels and answers before steps, so that a layer is all they wait for."""
        answers: list[tuple[int, Event]] = []
        while (arrival := self.link.receive()) is not None:
            if arrival.to == CONTROL:
                self.control(arrival)
                continue
            event = arrival.message
            if not isinstance(event, for_address(self, arrival.to)):
                raise BadMessage(
                    f"A {type(event).__name__} came from {self.link.name(arrival.source)} for address {arrival.to}."
                )
            assert isinstance(event, RunMessage | Cancel | Result | Passed | Draft | Committed)
            if isinstance(event, RunMessage):
                self._queue.append((arrival.to, event))
            else:
                answers.append((arrival.to, event))
        self._queue.extendleft(reversed(answers))

    def control(self, arrival: Arrival) -> None:
        if isinstance(arrival.message, Part):
            return  # asked for before a rank was lost
        raise BadMessage(f"A {type(arrival.message).__name__} came from {self.link.name(arrival.source)} out of turn.")


class MpiHead(Routed, Loopback):
    """Rank 0: the head and the first stage; for an engine the same as ``Loopback``."""

    def __init__(
        self,
        link: Link,
        ranks: Mapping[int, int],
        head: Head,
        stages: Sequence[tuple[Stage, Computer]],
        targets: int,
        drafter: Drafter | None = None,
        drafting: bool = False,
        recover: Callable[[Lost], bool] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(head, stages, drafter, clock)
        self.link, self.ranks = link, ranks
        self.targets, self.drafting = targets, drafting or drafter is not None
        self.recover = recover
        self._failure: HeadraceError | None = None
        self._took = 0.0
        """Seconds of the last turn with something to compute."""
        self._until = 0.0
        """When to tell what there is to tell, whatever else there is to do; 0: there is nothing yet."""
        self._silent: set[int] = set()
        """Ranks that haven't told all they have seen."""
        self._asked = 0.0
        self._ahead: dict[int, float] = {}

    @property
    def idle(self) -> bool:
        return not self._queue and self.head.idle

    def pump(self) -> list[Emit | Finish]:
        """As ``Loopback.pump``. Raises Lost, BadMessage or what a rank says, then and at every later call."""
        if self._failure is not None:
            raise self._failure
        try:
            while not self._due() and self._work():
                pass
        except HeadraceError as error:
            self._failure = error
            raise
        out, self._out, self._until = self._out, [], 0.0
        return out

    def _due(self) -> bool:
        """Whether to tell what there is: not before the next run is on its way, for which other ranks wait idle,
        unless that takes long."""
        if not self._out:
            return False
        self._until = self._until or self.clock() + PROMPT - self._took
        return not self._queue or self.clock() >= self._until

    def _work(self) -> bool:
        """One thing, or a while of waiting; False when there is nothing left to do."""
        try:
            self.take()
            if self._queue:
                self._timed_turn()
            elif self.head.idle:
                return False
            else:
                self.link.wait(NAP)
        except Lost as error:
            if self.recover is None or not self.recover(error):
                raise
        return True

    def _timed_turn(self) -> None:
        computes = self._queue[0][0] >= 0
        start = self.clock()
        self.turn()
        if computes:
            self._took = self.clock() - start

    def restart(
        self, ranks: Mapping[int, int], head: Head, stages: Sequence[tuple[Stage, Computer]], targets: int
    ) -> None:
        """Go on with another head and other stages: what was under way is computed again from its tokens.

        Tokens already told are not told again: each depends on the ones before it and its position alone.
        """
        asked = [event for to, event in self._queue if to == self.HEAD]
        events = again(self.head, asked)
        self.ranks, self.head, self.stages, self.targets = ranks, head, list(stages), targets
        self._queue = deque((self.HEAD, event) for event in events)
        self._silent = set()
        if self.seen is not None:
            self.watch(self.seen.anew())

    def look(self) -> Recorder | None:
        """What all ranks have seen; asks them. Raises Lost when one is and there is no going on without it."""
        if self.seen is None:
            return None
        self._silent, self._asked, self._ahead = {*self.ranks.values()} - {self.link.rank}, self.clock(), {}
        for rank in self._silent:
            self.link.send(rank, CONTROL, Look())
        while self._silent:
            try:
                self.take()
                if self._silent:
                    self.link.wait(NAP)
            except Lost as error:
                if self.recover is None or not self.recover(error):
                    raise
        mine = {(self.link.rank, to): n for (to, what), n in self.link.sent.items() if what == "bytes" and to > 0}
        self.seen.hops |= mine
        return self.seen

    def _hear(self, source: int, part: Seen) -> None:
        """Clocks of one host agree; of another's, the answer is taken to come from the middle of the wait for it."""
        assert self.seen is not None
        if source not in self._ahead:
            same = self.link.hosts[source] == self.link.hosts[self.link.rank]
            self._ahead[source] = 0.0 if same else part.now / 1e6 - (self._asked + self.clock()) / 2
        heard(self.seen, source, part, self._ahead[source])
        if not part.more:
            self._silent.discard(source)

    def names(self) -> list[str]:
        count = max(self.ranks) + 1
        named = [f"stage {i}" if i < self.targets else "drafter" for i in range(count)]
        return [f"{name}, {self.link.name(self.ranks[i])}" for i, name in enumerate(named)]

    def control(self, arrival: Arrival) -> None:
        if isinstance(arrival.message, Failure):
            raise Failed(arrival.message.text)
        if isinstance(arrival.message, Seen) and self.seen is not None:
            self._hear(arrival.source, arrival.message)
            return
        super().control(arrival)


class Member(Routed):
    """Another rank: its stage, and the drafter where that is here. ``serve`` until the head says stop."""

    def __init__(
        self,
        link: Link,
        ranks: Mapping[int, int],
        number: int,
        stage: tuple[Stage, Computer] | None,
        targets: int,
        drafts: int = 0,
        drafter: Drafter | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__([stage] if stage else [], drafter, clock, number, targets, drafts)
        self.link, self.ranks = link, ranks
        self.status: int | None = None

    def serve(self) -> int:
        """Work; returns the exit status the head asks for. Raises what went wrong here, or Lost for the head."""
        while self.status is None:
            self.take()
            if self._queue:
                self.turn()
            elif self.status is None:
                self.link.wait(60.0)
        return self.status

    def control(self, arrival: Arrival) -> None:
        if isinstance(arrival.message, Stop) and arrival.source == 0:
            self.status = arrival.message.status
        elif isinstance(arrival.message, Look) and arrival.source == 0 and self.seen is not None:
            for part in told(self.seen, self.link.sent):
                self.link.send(0, CONTROL, part)
        else:
            super().control(arrival)
