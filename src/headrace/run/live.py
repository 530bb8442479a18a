"""What the head keeps of a sequence and of a run while they are under way."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.memory.slots import Lease
from headrace.run.tree import Node
from headrace.run.types import Request


@dataclass
class Live:
    """A sequence being computed. tokens: prompt and committed; launched: how many of them have a row."""

    request: Request
    lease: Lease
    tokens: list[int]
    launched: int = 0
    emitted: int = 0
    slots: list[int] = field(default_factory=list)
    tip: Node = field(init=False)

    def __post_init__(self) -> None:
        self.tip = Node(self.tokens[-1], len(self.tokens) - 1)

    @property
    def seq(self) -> int:
        return self.request.id


@dataclass
class Counts:
    """Since the start. Guesses: launched, accepted (had a row when the text reached them), cancelled under way."""

    runs: int = 0
    launched: int = 0
    accepted: int = 0
    cancelled: int = 0


@dataclass
class Flight:
    """A run under way: for each row its sequence and, when its answer matters, its node."""

    rows: list[tuple[int, Node | None]]
    gone: set[int] = field(default_factory=set)
    last: bool = True
    """The last run of its block, and that block still counts as in flight; a block of dead guesses doesn't."""
