"""The tree of guesses above a sequence's last known token, on the head's side.

A node is proposed (no slot yet), launched (it has a slot and is a row of some run), or answered (the target
has sampled after it). The tip is the node of the last known token; everything above it may be thrown away.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.run.types import Choice, Draft, Row


class Node:
    """A token that is known (the tip) or guessed, at a position of its sequence."""

    __slots__ = (
        "answer", "children", "dead", "drafter", "parent", "position", "probability", "rank", "row", "run", "score",
        "slot", "token",
    )  # fmt: skip

    def __init__(self, token: int, position: int, parent: Node | None = None) -> None:
        self.token = token
        self.position = position
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.slot: int | None = None
        self.run = -1
        self.row = -1
        self.answer: Choice | None = None
        self.probability = 1.0
        self.rank = 0
        self.drafter = 0
        self.dead = False
        """Thrown away: it is no longer in the tree."""
        self.score = 0.0
        """A policy's own note; ours: log of the measured probability, summed from the sequence's start."""

    @property
    def launched(self) -> bool:
        return self.run >= 0

    def subtree(self) -> Iterator[Node]:
        """This node and all above it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def ancestors(self) -> tuple[int, ...]:
        """Slots of the guesses between the tip (not included) and this node (not included), oldest first."""
        slots: list[int] = []
        node = self.parent
        while node is not None and node.parent is not None:
            assert node.slot is not None
            slots.append(node.slot)
            node = node.parent
        return tuple(reversed(slots))

    def as_guess(self, seq: int) -> Row:
        assert self.slot is not None
        return Row(seq, self.position, self.token, self.slot, wanted=True, guess=True, ancestors=self.ancestors())


def graft(tip: Node, known: list[int], draft: Draft) -> list[Node]:
    """Hang a draft's guesses under the tip; those that what is known has overtaken are dropped.

    known: the sequence's tokens, the tip's last. Returns the nodes that are new, parents first.
    A draft is relative to its base; tokens committed since select a path through it, the rest is lost.
    """
    base, tail = draft.base, draft.tail
    if base > len(known) or tuple(known[base - len(tail) : base]) != tail:
        return []
    root, passed = tip, set[Node]()
    for token in reversed(known[base:]):  # the path from the draft's base to the tip, where nothing grows any more
        above, root = root, Node(token, -1)
        root.children[token] = above
        passed.add(root)
    at: list[Node | None] = []  # what each guess became
    added: list[Node] = []
    for guess in draft.guesses:
        below = root if guess.parent < 0 else at[guess.parent]
        node = None if below is None else below.children.get(guess.token)
        if node is None and below is not None and below not in passed:
            node = Node(guess.token, below.position + 1, below)
            node.probability, node.rank, node.drafter = guess.probability, guess.rank, guess.drafter
            below.children[guess.token] = node
            added.append(node)
        at.append(node)
    return added
