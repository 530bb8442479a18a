"""Which guesses are launched, and when: the interface the head asks, and the policy that launches none.

Policies with a drafter live in ``speculate``. A policy is plain data and pure arithmetic; it may learn from
what the head tells it (runs launched and returned, answers judged), with the times the head was given.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.run.schedule import Order
from headrace.run.tree import Node
from headrace.run.types import Draft, Row


class GuessPolicy:
    """What the head asks and tells; as it stands here, nothing is guessed.

    ``most_guesses``: slots a sequence may hold for guesses at a time.
    """

    most_guesses = 0

    def ready(self, seq: int, tip: Node, now: float) -> bool:
        """Whether what is known up to the tip may be launched now, or should wait for a draft to travel with it.

        Asked again at every event; a policy may wait only for what is sure to come (see ``Draft``).
        """
        return True

    def drafted(self, seq: int, draft: Draft, fresh: Sequence[Node], now: float) -> None:
        """A draft came; ``fresh``: the nodes it added to the sequence's tree, parents first."""

    def place(
        self, tips: Sequence[tuple[int, Node]], sizes: Sequence[int], free: bool, order: Order, now: float
    ) -> list[tuple[int, list[tuple[int, Node]]]]:
        """Guesses for the block being composed: (run index, [(seq, node)]), parents before children.

        tips: (seq, tip) of sequences whose tip is launched; sizes: known rows in each run so far; a run index
        at or past len(sizes) makes a run. A node's parent must be launched, or placed before it; a node goes no
        earlier than its parent's run. free: stage 0 has nothing to do.
        """
        return []

    def launched(self, run: int, rows: Sequence[tuple[Row, Node | None]], now: float) -> None:
        """A run was sent."""

    def returned(self, run: int, rows: int, now: float) -> None:
        """A run came back; ``rows``: those not cancelled."""

    def judged(self, seq: int, tip: Node, chosen: Node | None, now: float) -> None:
        """The target has answered after ``tip``: ``chosen`` was right (or no guess was); others are in tip.children."""

    def over(self, seq: int) -> None:
        """A sequence is finished."""


class NoGuesses(GuessPolicy):
    """Plain decoding."""
