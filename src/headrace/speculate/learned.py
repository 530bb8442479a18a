"""Our policy over several ranks, with what runs take learned: by a short probe, and from every lone run after it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Protocol

from headrace.run.head import Head
from headrace.run.policy import NoGuesses
from headrace.run.tree import Node
from headrace.run.types import Emit, Finish, HeadEvent, Request, Row, Submit
from headrace.speculate.control import Measured, Speed
from headrace.speculate.grow import Grown
from headrace.speculate.growth import Continuous
from headrace.speculate.rates import Rates

PROBED = (1, 1, 4, 16, 2, 8)
"""Rows of the probe's runs; the first is a warm-up."""
BUDGET = 2.0
"""Seconds after which no further run is probed."""
TRAIN = 4
"""Runs that follow each other, to see how fast they can."""
FIRST = 1 << 40
"""Numbers of the probe's requests, apart from all others."""


class Learned(Measured):
    """See the module's docstring. share: the slowest stage's part of a pass, until it was probed."""

    def __init__(self, share: float, rows: int = 64, most_guesses: int = 1024, floor: float = 0.01) -> None:
        self.rates, self.share = Rates(), share
        super().__init__(Speed(self.rates, lambda rows: self.share * self.rates(rows)), rows, most_guesses, floor)
        self._alone: dict[int, tuple[float, int]] = {}

    def learn(self, rows: int, seconds: float) -> None:
        """A lone run of so many rows took so long."""
        self.rates.note(rows, seconds)
        self._passing, self._entering = cache(self.speed.passing), cache(self.speed.entering)

    def launched(self, run: int, rows: Sequence[tuple[Row, Node | None]], now: float) -> None:
        if self._flying == 0 and all(node is not None for _, node in rows) and rows:
            self._alone[run] = now, len(rows)
        else:
            self._alone.clear()
        super().launched(run, rows, now)

    def returned(self, run: int, rows: int, now: float) -> None:
        super().returned(run, rows, now)
        began, launched = self._alone.pop(run, (0.0, -1))
        if launched == rows:
            self.learn(rows, now - began)


class Loop(Protocol):
    """What drives a head: ``cluster.loopback.Loopback`` and its kin."""

    head: Head
    drafting: bool

    def submit(self, event: HeadEvent) -> None: ...
    def pump(self) -> list[Emit | Finish]: ...


def probe(loop: Loop, policy: Learned) -> None:
    """Measure runs of a few rows, alone and one behind the other, before there is anything to compute."""
    head = loop.head
    kept = head.policy, head.order, loop.drafting
    loop.drafting = False
    start, number = time.monotonic(), FIRST
    try:
        head.policy = NoGuesses()
        for i, rows in enumerate(PROBED):
            if rows * TRAIN > head.pool.available or (i > 1 and time.monotonic() - start > BUDGET):
                continue
            head.order = replace(kept[1], rows=rows, runs=1, blocks=TRAIN, sequences=rows * TRAIN)
            took = _pass(loop, rows, number)
            policy.learn(rows, took)
            number += rows
            if i == 1:
                together = _pass(loop, TRAIN * rows, number)
                number += TRAIN * rows
                policy.share = min(max((together - took) / (TRAIN - 1) / took, 0.05), 1.0)
    finally:
        head.policy, head.order, loop.drafting = kept


def _pass(loop: Loop, rows: int, number: int) -> float:
    """Seconds that so many sequences of one token take."""
    start, left = time.monotonic(), rows
    for i in range(rows):
        loop.submit(Submit(Request(number + i, (i % 32,), 1)))
    while left:
        left -= sum(isinstance(out, Finish) for out in loop.pump())
    return time.monotonic() - start


class Restful(Continuous):
    """Continuous growth that rests while its first choices are hardly ever right, and tries again now and then."""

    RATE, LEAST, AGAIN = 0.05, 0.08, 64

    def __init__(self, rates: Rates, width: int = 5, rows: int = 16, floor: float = 0.01) -> None:
        self.rates = rates
        super().__init__(rates, width, rows, floor)
        self._right, self._count = 0.5, 0

    def judged(self, right: bool) -> None:
        """Whether a first choice was right."""
        self._right += self.RATE * (right - self._right)

    def started(self, grown: Grown, hit: bool) -> None:
        super().started(grown, hit)
        self._count += 1

    def rests(self, grown: Grown) -> bool:
        return self._right < self.LEAST and self._count % self.AGAIN != 0
