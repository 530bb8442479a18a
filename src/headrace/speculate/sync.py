"""Synchronous speculation, the way most engines do it: draft, verify in one pass, and only then draft again."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.run.policy import NoGuesses
from headrace.run.schedule import Order
from headrace.run.tree import Node
from headrace.run.types import Draft


class Synchronous(NoGuesses):
    """A sequence's next token waits for its draft and travels with it; nothing else is launched meanwhile."""

    def __init__(self, most_guesses: int = 64) -> None:
        self.most_guesses = most_guesses
        self._drafted: dict[int, int] = {}
        """How many tokens were known when the sequence's latest draft was made; absent: it never got one."""
        self._known: dict[int, int] = {}

    def ready(self, seq: int, tip: Node, now: float) -> bool:
        known = tip.position + 1
        return self._known.setdefault(seq, known) == known or self._drafted.get(seq, 0) >= known

    def drafted(self, seq: int, draft: Draft, fresh: Sequence[Node], now: float) -> None:
        self._drafted[seq] = max(draft.base, self._drafted.get(seq, 0))

    def place(
        self, tips: Sequence[tuple[int, Node]], sizes: Sequence[int], free: bool, order: Order, now: float
    ) -> list[tuple[int, list[tuple[int, Node]]]]:
        placed = []
        for seq, tip in tips:
            nodes = [(seq, n) for n in tip.subtree() if not n.launched]
            if nodes and self._drafted.get(seq, 0) == tip.position + 1 and sizes:
                placed.append((0, nodes[: order.guesses]))
        return placed

    def over(self, seq: int) -> None:
        self._drafted.pop(seq, None)
        self._known.pop(seq, None)
