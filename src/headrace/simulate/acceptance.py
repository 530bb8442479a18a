"""Target and draft for timing runs: no arithmetic, only whether the draft is right, position by position.

Tokens carry the truth: the text's token at position p is 2 p, wrong ones are odd, and what follows a wrong one is
wrong. ``Ranks`` says at which place of the draft's list the right token is, so every strategy meets the same luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Protocol

from headrace.run.stage import Computer, Run
from headrace.run.types import Choice, Row

RUNNERS_UP = (0.38, 0.16, 0.09, 0.06)
"""Of what the first choice leaves, the shares of the second to fifth."""


class Ranks(Protocol):
    """Where the right token of a position is in the draft's list (-1: not there), and what the draft says of each."""

    def rank(self, position: int) -> int: ...

    def stated(self, position: int) -> Sequence[float]: ...


def unit(x: int) -> float:
    """A hash of x, uniform in [0, 1) (SplitMix64's finaliser)."""
    x = (x + 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & (2**64 - 1)
    return (x ^ (x >> 31)) / 2**64


@dataclass(frozen=True)
class Acceptance:
    """First choice right with ``first``, the next four with their shares of the rest; independent by position."""

    first: float
    seed: int = 0

    def chances(self) -> tuple[float, ...]:
        return (self.first, *((1 - self.first) * share for share in RUNNERS_UP))

    def rank(self, position: int) -> int:
        at = unit(position * 1_000_003 + self.seed * 7919)
        for rank, chance in enumerate(self.chances()):
            if at < chance:
                return rank
            at -= chance
        return -1

    def stated(self, position: int) -> Sequence[float]:
        return self.chances()


@dataclass(frozen=True)
class Recorded:
    """A real pair's: ranks[i] and probabilities[i] of the i-th position after ``start``; it begins again at the end."""

    ranks: Sequence[int]
    probabilities: Sequence[Sequence[float]]
    start: int = 0

    def rank(self, position: int) -> int:
        return self.ranks[(position - self.start) % len(self.ranks)]

    def stated(self, position: int) -> Sequence[float]:
        return self.probabilities[(position - self.start) % len(self.ranks)]


def truth(position: int) -> int:
    return 2 * position


def wrong(token: int, rank: int) -> int:
    """A token that is not in the text, one for each (wrong or right) token before it and place in the list."""
    return (token * 48271 + rank * 69621 * 2 + 1) % 0x7FFFFFFE | 1


@dataclass
class TargetText(Computer):
    """A ``Computer`` for the target's last stage. layers: of the whole model."""

    layers: int

    def step(self, layer: int, run: Run) -> None:
        if layer == self.layers - 1:
            rows = run.message.rows
            run.choices = tuple(self.choice(i, rows[i]) for i in run.live if rows[i].wanted)

    def choice(self, i: int, row: Row) -> Choice:
        """What follows a row."""
        return Choice(i, truth(row.position + 1) if row.token == truth(row.position) else wrong(row.token, 0))


@dataclass
class DraftText(TargetText):
    """A ``Computer`` for the drafter's last stage: its list after each row."""

    ranks: Ranks

    def choice(self, i: int, row: Row) -> Choice:
        at = row.position + 1
        place = at + (row.seq << 24)  # every sequence has luck of its own
        right = self.ranks.rank(place) if row.token == truth(row.position) else -1
        top = tuple(
            (truth(at) if rank == right else wrong(row.token, rank), log(max(p, 1e-9)))
            for rank, p in enumerate(self.ranks.stated(place))
        )
        return Choice(i, *top[0], top)
