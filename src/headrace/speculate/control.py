"""Our policy: launch the guesses whose measured worth is over their measured cost, whenever there is room.

A row's worth is the chance that the text goes through it, times the time by which launching it now rather than
with the next run brings the text forward. Its cost is the time by which one more row delays the run (and all
that follows) times the chance that the text is waiting for that run. So runs are narrow where rows are dear and
wide where they are nearly free; a run that carries a known token takes only guesses worth its delay; and where
guesses don't come true nothing is launched. With one stage this is tree speculation in one pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp

from headrace.run.policy import NoGuesses
from headrace.run.schedule import Order
from headrace.run.tree import Node
from headrace.run.types import Draft, Row
from headrace.speculate.calibrate import Calibration


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
    heap: list[tuple[float, int, Node]] = field(default_factory=list)
    """Guesses that were not launched, the likeliest first."""
    rate: float = 0.0
    """Committed tokens a second, smoothed."""
    last: float = -1.0


class Measured(NoGuesses):
    """See the module's docstring. speed: what runs take; rows: most guesses in a run; eager: weight of worth."""

    def __init__(
        self, speed: Speed, rows: int = 64, most_guesses: int = 1024, floor: float = 0.01, eager: float = 1.0
    ) -> None:
        self.speed, self.rows, self.most_guesses, self.floor, self.eager = speed, rows, most_guesses, floor, eager
        self.calibration = Calibration()
        self._seqs: dict[int, _Seq] = {}
        self._count = 0
        self._passing = [0.0] + [speed.passing(r) for r in range(1, 2 * rows + 2)]
        self._entering = [0.0] + [speed.entering(r) for r in range(1, 2 * rows + 2)]
        self._flying = 0

    # --- learning ---------------------------------------------------------------------------------------

    def drafted(self, seq: int, draft: Draft, fresh: Sequence[Node], now: float) -> None:
        heap = self._seqs.setdefault(seq, _Seq()).heap
        for node in fresh:
            assert node.parent is not None
            node.score = node.parent.score + self.calibration.score(node.drafter, node.rank, node.probability)
            self._count += 1
            heapq.heappush(heap, (-node.score, self._count, node))

    def judged(self, seq: int, tip: Node, chosen: Node | None, now: float) -> None:
        for node in (*tip.children.values(), *((chosen,) if chosen else ())):
            self.calibration.note(node.drafter, node.rank, node.probability, node is chosen)
        state = self._seqs.setdefault(seq, _Seq())
        if state.last >= 0.0:
            # Smoothed over some passes: tokens per second, from the mean time of a token.
            took = now - state.last
            mean = took if state.rate == 0.0 else 0.95 / state.rate + 0.05 * took
            state.rate = 1.0 / max(mean, 1e-9)
        state.last = now
        if chosen is None:
            state.heap.clear()

    def launched(self, run: int, rows: Sequence[tuple[Row, Node | None]], now: float) -> None:
        self._flying += 1

    def returned(self, run: int, rows: int, now: float) -> None:
        self._flying -= 1

    def over(self, seq: int) -> None:
        self._seqs.pop(seq, None)

    # --- choosing ---------------------------------------------------------------------------------------

    def place(
        self, tips: Sequence[tuple[int, Node]], sizes: Sequence[int], free: bool, order: Order, now: float
    ) -> list[tuple[int, list[tuple[int, Node]]]]:
        if not tips or (not sizes and not free):
            return []
        known = sizes[-1] if sizes else 0
        if known >= order.rows or (not sizes and not self._room()):
            return []
        most = min(self.rows, order.guesses, order.rows - known)
        picked = self._pick(tips, known, most)
        return [(max(len(sizes) - 1, 0), picked)] if picked else []

    def _room(self) -> bool:
        """Whether the pipeline isn't full already: its slowest part may not be stage 0."""
        return self._flying <= self._passing[1] / self._entering[1] + 1

    def _pick(self, tips: Sequence[tuple[int, Node]], known: int, most: int) -> list[tuple[int, Node]]:
        picked: list[tuple[int, Node]] = []
        inside: set[int] = set()
        # Chance (summed over sequences) that text waits for this run; certain where it carries next tokens.
        waiting = float(known)
        heads = dict(tips)
        queue = [(self._worth(seq, tip), seq) for seq, tip in tips]
        queue = [(-w, seq) for w, seq in queue if w > 0.0]
        heapq.heapify(queue)
        while queue and len(picked) < most:
            worth, seq = heapq.heappop(queue)
            p = self._chance(seq, heads[seq])
            node = self._seqs[seq].heap[0][2]
            rows = known + len(picked)
            adds = p if id(node.parent) not in inside and not known else 0.0
            if not self._pays(p, -worth, rows, waiting + adds):
                break
            heapq.heappop(self._seqs[seq].heap)
            picked.append((seq, node))
            inside.add(id(node))
            waiting += adds
            again = self._worth(seq, heads[seq])
            if again > 0.0:
                heapq.heappush(queue, (-again, seq))
        return picked

    def _pays(self, p: float, worth: float, rows: int, waiting: float) -> bool:
        if p < self.floor:
            return False
        if rows == 0:
            return True
        return self.eager * worth > (self._passing[rows + 1] - self._passing[rows]) * waiting

    def _chance(self, seq: int, tip: Node) -> float:
        """Of the sequence's likeliest guess that could be launched; 0 when there is none."""
        state = self._seqs.get(seq)
        if state is None:
            return 0.0
        heap = state.heap
        while heap and (heap[0][2].dead or heap[0][2].launched or heap[0][2] is tip):
            heapq.heappop(heap)
        return exp(heap[0][2].score - tip.score) if heap else 0.0

    def _worth(self, seq: int, tip: Node) -> float:
        """Seconds the sequence gains, on average, when its likeliest guess goes now and not with the next run."""
        p = self._chance(seq, tip)
        if p == 0.0:
            return 0.0
        token = 1.0 / self._seqs[seq].rate if self._seqs[seq].rate else self._passing[1]
        return p * min(self._entering[1], token)
