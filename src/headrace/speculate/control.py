"""Our policy: launch the guesses whose measured worth is over their measured cost, whenever there is room.

A row's worth is the chance that the text goes through it, times the time by which launching it now rather than
with the next run brings the text forward. Its cost is the time by which one more row delays the run (and all
that follows) times the chance that the text is waiting for that run. So runs are narrow where rows are dear and
wide where they are nearly free; a run that carries a known token takes only guesses worth its delay; and where
guesses don't come true nothing is launched. With one stage this is tree speculation in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from math import exp, inf, log

from headrace.run.policy import NoGuesses
from headrace.run.schedule import Order
from headrace.run.tree import Node
from headrace.run.types import Draft, Row
from headrace.speculate.calibrate import Calibration

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Rows a run that are tried."""


@dataclass(frozen=True)
class Speed:
    """What a run of so many rows takes, known from a probe or a plan. All in seconds.

    passing: from the head until its answers are back, alone in the pipeline. entering: until the next run can
    follow it (the slowest stage or link). layer: a layer of stage 0, after which a cancelled run lets go.
    """

    passing: Callable[[int], float]
    entering: Callable[[int], float]
    layer: float = 0.0


@dataclass
class _Seq:
    open: list[Node] = field(default_factory=list)
    """Guesses that were not launched, parents first."""
    going: float = 0.5
    """Chance that a right guess is followed by another that was launched, smoothed."""
    first: float = 0.5
    """Chance that a drafter's first choice was right, smoothed."""
    known: int = 0
    promised: bool = False
    """A draft for what is known is sure to come."""
    drafted: bool = False
    """There is a drafter that speaks of this sequence."""
    asked: float = 0.0
    """When the promise was made."""


class Measured(NoGuesses):
    """See the module's docstring. speed: what runs take; rows: most guesses in a run; floor: least chance."""

    def __init__(self, speed: Speed, rows: int = 64, most_guesses: int = 1024, floor: float = 0.01) -> None:
        self.speed, self.rows, self.most_guesses, self.floor = speed, rows, most_guesses, floor
        self.calibration = Calibration()
        self._seqs: dict[int, _Seq] = {}
        self._passing, self._entering = cache(speed.passing), cache(speed.entering)
        self._flying = 0
        self._late = 0.0
        self._delay = 0.0
        """Mean time until a promised draft comes."""
        self._arrives = 0.0
        """When the last run launched is expected back."""

    # --- learning ---------------------------------------------------------------------------------------

    def drafted(self, seq: int, draft: Draft, fresh: Sequence[Node], now: float) -> None:
        state = self._seqs.setdefault(seq, _Seq())
        if draft.base >= state.known:
            if state.promised:
                self._delay += 0.1 * (now - state.asked - self._delay)
            state.promised, state.asked = draft.more, now
            state.drafted = True
        for node in fresh:
            assert node.parent is not None
            node.score = node.parent.score + self.calibration.score(node.drafter, node.rank, node.probability)
            state.open.append(node)

    def judged(self, seq: int, tip: Node, chosen: Node | None, now: float) -> None:
        for node in (*tip.children.values(), *((chosen,) if chosen else ())):
            self.calibration.note(node.drafter, node.rank, node.probability, node is chosen)
        state = self._seqs.setdefault(seq, _Seq())
        state.known, state.promised, state.asked = tip.position + 2, state.drafted, now
        state.first += 0.05 * ((chosen is not None and chosen.rank == 0) - state.first)
        state.going += 0.02 * ((chosen is not None and chosen.launched) - state.going)
        if chosen is None or not chosen.launched:
            # All that is under way is dead, and will be gone in a moment.
            self._arrives = now

    def launched(self, run: int, rows: Sequence[tuple[Row, Node | None]], now: float) -> None:
        self._flying += 1
        if rows:
            self._arrives = now + self._arrival(len(rows), self._arrives - now)

    def returned(self, run: int, rows: int, now: float) -> None:
        self._flying -= 1

    def over(self, seq: int) -> None:
        self._seqs.pop(seq, None)

    # --- choosing ---------------------------------------------------------------------------------------

    def ready(self, seq: int, tip: Node, now: float) -> bool:
        """Waiting for one more level of guesses must bring the text forward by more than the wait."""
        state = self._seqs.get(seq)
        if state is None or not state.promised:
            return True
        found = self._candidates(seq, tip)
        stop = max(1.0 - state.going, 0.05)
        leaves = {id(node.parent) for _, _, _, node in found}
        p = max((p for _, p, _, node in found if id(node) not in leaves), default=1.0) * state.first
        coming = [p * stop * state.first**i for i in range(4)]
        worth = sorted([*(entry[0] for entry in found), *coming], reverse=True)
        sums = [0.0, *accumulate(worth)]
        self._horizon(stop)
        at_once, _ = self._riders(sums, 1, stop, len(found))
        later, _ = self._riders(sums, 1, stop, len(found) + 1)
        return later + self._delay * (stop + sums[-1]) >= at_once

    def place(
        self, tips: Sequence[tuple[int, Node]], sizes: Sequence[int], free: bool, order: Order, now: float
    ) -> list[tuple[int, list[tuple[int, Node]]]]:
        if not tips or (not sizes and not free):
            return []
        known = sizes[-1] if sizes else 0
        if known >= order.rows or (not sizes and not self._room()):
            return []
        most = min(self.rows, order.guesses, order.rows - known)
        picked = self._pick(tips, known, most, now)
        return [(max(len(sizes) - 1, 0), picked)] if picked else []

    def _room(self) -> bool:
        """Whether the pipeline isn't full already: its slowest part may not be stage 0."""
        return self._flying <= self._passing(1) / self._entering(1) + 1

    def _pick(self, tips: Sequence[tuple[int, Node]], known: int, most: int, now: float) -> list[tuple[int, Node]]:
        """The likeliest guesses, as many as let the text go on soonest."""
        ranked: list[tuple[float, float, int, Node]] = []
        for seq, tip in tips:
            ranked.extend(self._candidates(seq, tip))
        if not ranked:
            return []
        ranked.sort(key=lambda entry: -entry[0])
        sums = [0.0, *accumulate(entry[0] for entry in ranked)]
        stop = max(sum(1.0 - self._seqs[seq].going for seq, _ in tips if seq in self._seqs) / len(tips), 0.05)
        self._horizon(stop)
        if known:
            count = self._riders(sums, known, known * stop, most)[1]
        else:
            count = self._width(sums, 0.0, self._arrives - now, most)[1]
        return [(seq, node) for _, _, seq, node in ranked[:count]]

    def _horizon(self, stop: float) -> None:
        """When a token comes whose guess is never launched: a pass finds that out and another computes it, after
        the right guesses before it, of which there are 1 / stop on average, entered one by one.

        The factor 1.5 was fitted in the simulator (docs/log.md)."""
        self._late = 2.0 * self._passing(1) + 1.5 * self._entering(1) / stop

    def _width(self, sums: list[float], start: float, ahead: float, most: int, first: int = 0) -> tuple[float, int]:
        """Rows a run, if all runs from now on had that many, by which the text's end in the tree comes soonest.

        sums: running sums of each guess's chance to be the last right one, likeliest first; those before ``first``
        travel already. A run starts ``start`` seconds from now and can't overtake one whose answers come
        ``ahead`` seconds from now. Returns (sum of chance times arrival, rows).
        """
        total = len(sums) - 1
        best = (inf, 0)
        for rows in WIDTHS:
            if rows > most or (rows > 1 and rows >= 2 * (total - first)):
                break
            arrives = max(start + self._passing(rows), ahead + self._entering(rows))
            step, late, cost, at = self._entering(rows), self._late, 0.0, first
            while at < total and arrives < late:
                end = min(at + rows, total)
                cost += (sums[end] - sums[at]) * arrives
                arrives += step
                at = end
            best = min(best, (cost + (sums[total] - sums[at]) * late, rows))
        return best

    def _riders(self, sums: list[float], known: int, ending: float, most: int) -> tuple[float, int]:
        """How many guesses should travel with ``known`` rows, after ``ending`` of which (in chance) the text misses.

        Returns (sum of chance times arrival, guesses)."""
        best = (inf, 0)
        for riders in (0, *WIDTHS):
            if riders > min(most, len(sums) - 1):
                break
            rows = known + riders
            arrives = self._passing(rows)
            rest, _ = self._width(sums, self._entering(rows), arrives, self.rows, riders)
            best = min(best, ((ending + sums[riders]) * arrives + (rest if riders < len(sums) - 1 else 0.0), riders))
        return best

    def _arrival(self, rows: int, ahead: float) -> float:
        """When a run's answers would be here, in seconds from now: it can't overtake the run ahead."""
        return max(self._passing(rows), ahead + self._entering(rows))

    def _candidates(self, seq: int, tip: Node) -> list[tuple[float, float, int, Node]]:
        """(worth, chance, sequence, node) of the sequence's guesses that could be launched, above the floor."""
        state = self._seqs.get(seq)
        if state is None:
            return []
        state.open = [n for n in state.open if not (n.dead or n.launched)]
        stop, least = 1.0 - state.going, log(self.floor) + tip.score
        found = []
        for node in state.open:
            if node.score >= least and node is not tip:
                p = exp(node.score - tip.score)
                found.append((p * stop, p, seq, node))
        return found
