"""How often guesses are right, measured: by drafter, rank and what the drafter itself said of them."""

from __future__ import annotations

from collections.abc import Iterable
from math import log

BINS = 8
PRIOR = 6.0
"""So many imagined trials speak for the drafter's own probability until real ones outweigh them."""
MEMORY = 400.0
"""Trials after which the old ones count half, so that a change of subject is noticed."""
LEAST = 1e-4


class Calibration:
    """Counts of trials and hits. A trial is a guess whose parent turned out to be on the text."""

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int, int], list[float]] = {}

    def probability(self, drafter: int, rank: int, stated: float) -> float:
        """The measured chance that such a guess is right, given that its parent is."""
        cell = self._cells.get((drafter, rank, int(stated * BINS)))
        if cell is None:
            return min(max(stated, LEAST), 0.999)
        trials, hits = cell
        return min(max((hits + PRIOR * stated) / (trials + PRIOR), LEAST), 0.999)

    def note(self, drafter: int, rank: int, stated: float, hit: bool) -> None:
        cell = self._cells.setdefault((drafter, rank, int(stated * BINS)), [0.0, 0.0])
        cell[0] += 1
        cell[1] += hit
        if cell[0] >= MEMORY:
            cell[0] *= 0.5
            cell[1] *= 0.5

    def score(self, drafter: int, rank: int, stated: float) -> float:
        """log of ``probability``."""
        return log(self.probability(drafter, rank, stated))

    def rows(self) -> Iterable[tuple[int, int, float, float, float]]:
        """(drafter, rank, least stated, trials, hits), for reports."""
        for (drafter, rank, at), (trials, hits) in sorted(self._cells.items()):
            yield drafter, rank, at / BINS, trials, hits
