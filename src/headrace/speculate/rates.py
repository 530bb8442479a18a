"""What runs take by their rows, learned from runs."""

from __future__ import annotations

from bisect import bisect_left

PRIOR = 0.3
"""What a further row is thought to cost, of a one-row pass, until it was tried."""


class Rates:
    """Seconds of a pass by its rows, learned: the level from passes of few rows, and each count's share of it.

    prior: what a further row is thought to cost, of a one-row pass, until it was tried.
    """

    def __init__(self, prior: float = PRIOR) -> None:
        self.prior = prior
        self.level = 0.0
        self._shape: dict[int, tuple[int, float]] = {}
        self._known: list[int] = []

    @property
    def most(self) -> int:
        """The most rows seen."""
        return self._known[-1] if self._known else 0

    @property
    def counts(self) -> int:
        """How many different counts of rows were seen."""
        return len(self._known)

    @property
    def known(self) -> bool:
        """Whether passes were seen twice (the first is often a slow one)."""
        return bool(self._known) and self._shape[self._known[0]][0] >= 2

    def note(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        if not self._known or rows < self._known[0]:
            self._shape = {r: (n, s * self.level / seconds) for r, (n, s) in self._shape.items()}
            self.level = seconds
        count, share = self._shape.get(rows, (0, 0.0))
        if count > 1:  # the machine may have been busy with something else
            seconds = min(seconds, 2.5 * share * self.level)
        weight = 1 / min(count + 1, 10)
        if rows == (self._known[0] if self._known else rows):
            self.level += weight * (seconds - self.level)
            self._shape[rows] = count + 1, 1.0
        else:
            self._shape[rows] = count + 1, share + weight * (seconds / self.level - share)
        self._known = sorted(self._shape)

    def cap(self, rows: int, seconds: float) -> None:
        """Fewer rows than these don't take longer: for where a first pass is slow and none of one row may ever come."""
        if self._known and self._known[0] < rows and self.level > seconds:
            self._shape = {
                r: (n, s if r == self._known[0] else s * self.level / seconds) for r, (n, s) in self._shape.items()
            }
            self.level = seconds
        most = seconds / self.level if self.level else 0.0
        self._shape = {r: (n, min(s, most) if r < rows else s) for r, (n, s) in self._shape.items()}

    def __call__(self, rows: int) -> float:
        """On the line between, or through the nearest, two known counts; on ``prior`` a row where only one is known.

        A row's part of a pass is the less the more rows there are, so fewer rows take their part at least.
        """
        known = self._known
        if not known:
            return 0.0
        at = bisect_left(known, rows)
        if at < len(known) and known[at] == rows:
            return self.level * self._shape[rows][1]
        if len(known) == 1:
            return self.level * max(1 + self.prior / known[0] * (rows - known[0]), 0.1)
        at = min(max(at, 1), len(known) - 1)
        low, high = known[at - 1], known[at]
        a, b = self._shape[low][1], self._shape[high][1]
        return self.level * max(a + max(b - a, 0.0) * (rows - low) / (high - low), min(rows / low, 1.0) * a)
