"""How a drafter's tree grows: always and likeliest first (ours), or once per pass (synchronous speculation)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import exp, log

from headrace.speculate.grow import DEAD, DONE, NEW, Grown, Leaf


class Continuous:
    """The likeliest leaves first, as many a step as add most chance per time; the head hears of each step.

    cost: relative time of a step with so many rows. floor: leaves less likely than this aren't worth a step.
    """

    def __init__(self, cost: Callable[[int], float], width: int = 5, rows: int = 16, floor: float = 0.01) -> None:
        self.cost, self.width, self.rows, self.floor = cost, width, rows, floor

    def started(self, grown: Grown, hit: bool) -> None:
        if not hit:
            grown.heap.clear()
            grown.fresh.clear()

    def pick(self, grown: Grown) -> list[Leaf]:
        picked: list[Leaf] = []
        total, base = 0.0, grown.root.score
        while grown.heap and len(picked) < self.rows:
            leaf = grown.heap[0][2]
            if leaf.state != NEW:
                heapq.heappop(grown.heap)
                continue
            p = exp(leaf.score - base)
            n = len(picked)
            if p < self.floor or (n and (total + p) * self.cost(n) <= total * self.cost(n + 1)):
                break
            heapq.heappop(grown.heap)
            picked.append(leaf)
            total += p
        return picked

    def tell(self, grown: Grown) -> list[Leaf] | None:
        told: list[Leaf] = []
        least = log(self.floor) + grown.root.score
        while grown.fresh and -grown.fresh[0][0] >= least:
            leaf = heapq.heappop(grown.fresh)[2]
            if leaf.state != DEAD:
                told.append(leaf)
        return told or None

    def over(self, grown: Grown) -> None:
        return None

    def rests(self, grown: Grown) -> bool:
        return False


class Once:
    """One tree per pass: ``depth`` levels, of each the ``beam`` likeliest expanded, then the ``nodes`` likeliest sent.

    beam 1 and width 1 make a chain. Afterwards the drafter rests until something is committed.
    """

    def __init__(self, depth: int, beam: int = 1, nodes: int | None = None, width: int = 1) -> None:
        self.depth, self.beam, self.width = depth, beam, width
        self.nodes = depth if nodes is None else nodes
        self._level: dict[int, int] = {}

    def started(self, grown: Grown, hit: bool) -> None:
        self._level[grown.seq] = 1
        grown.heap.clear()
        grown.fresh.clear()

    def pick(self, grown: Grown) -> list[Leaf]:
        while self._level[grown.seq] < self.depth:
            level = _level(grown.root, self._level[grown.seq])
            self._level[grown.seq] += 1
            best = heapq.nlargest(self.beam, level, key=lambda leaf: leaf.score)
            if new := [leaf for leaf in best if leaf.state == NEW]:
                return new
        return []

    def tell(self, grown: Grown) -> list[Leaf] | None:
        level = self._level[grown.seq]
        flying = grown.root.state != DONE or any(
            leaf.slot >= 0 and leaf.state not in (NEW, DONE) for leaf in _all(grown.root)
        )
        if level != self.depth or flying:
            return None
        self._level[grown.seq] += 1
        return heapq.nlargest(self.nodes, _all(grown.root), key=lambda leaf: (leaf.score, -leaf.position))

    def over(self, grown: Grown) -> None:
        self._level.pop(grown.seq, None)

    def rests(self, grown: Grown) -> bool:
        return False


def _level(root: Leaf, depth: int) -> list[Leaf]:
    leaves = [root]
    for _ in range(depth):
        leaves = [child for leaf in leaves for child in leaf.children.values()]
    return leaves


def _all(root: Leaf) -> list[Leaf]:
    """Everything above the root."""
    found: list[Leaf] = []
    stack = list(root.children.values())
    while stack:
        leaf = stack.pop()
        found.append(leaf)
        stack.extend(leaf.children.values())
    return found
