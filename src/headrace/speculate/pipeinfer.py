"""PipeInfer's policy (its README and abstract, arXiv 2407.11798): microbatches drafted continuously, one run each.

The drafter makes small greedy trees, each on top of the last; every one is launched as soon as it is there. The
knobs are that program's: draft (tokens a microbatch), np (branches), pa (a branch stops under this probability),
ps (a candidate over it splits off), pr (every tree made raises pa, until a guess is accepted), pd (every time
no tree was made lowers it again).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.run.policy import NoGuesses
from headrace.run.schedule import Order
from headrace.run.tree import Node
from headrace.run.types import Draft
from headrace.speculate.grow import DEAD, DONE, FLYING, NEW, Grown, Leaf


@dataclass(frozen=True)
class Knobs:
    draft: int = 16
    np: int = 1
    pa: float = 0.5
    ps: float = 0.1
    pr: float = 0.0
    pd: float = 0.0


@dataclass
class _Making:
    """A sequence's microbatch. end: where the next begins; None: at the root."""

    end: Leaf | None = None
    active: list[Leaf] = field(default_factory=list)
    taken: list[Leaf] = field(default_factory=list)
    branches: int = 1
    made: int = 0
    missed: int = 0
    resting: bool = False
    ready: list[Leaf] = field(default_factory=list)


class Microbatches:
    """The drafter's side. trace: the cutoff at each start of a tree, for tests and reports.

    lead: it rests so many tokens beyond what is known (there, that program's 1000 partitions are the limit).
    """

    def __init__(self, knobs: Knobs, width: int = 5, lead: int = 40) -> None:
        self.knobs, self.width, self.lead = knobs, width, lead
        self.trace: list[float] = []
        self._making: dict[int, _Making] = {}

    def started(self, grown: Grown, hit: bool) -> None:
        grown.heap.clear()
        grown.fresh.clear()
        old = self._making.get(grown.seq)
        if (
            old is None
            or not hit
            or any(leaf.state == DEAD for leaf in (*old.active, *((old.end,) if old.end else ())))
        ):
            # No tree was made before this token, and none of ours was right: what decays goes on decaying.
            self._making[grown.seq] = _Making(missed=old.missed if old and not hit else 0)
        else:
            old.made = old.missed = 0
            old.resting = False

    def over(self, grown: Grown) -> None:
        self._making.pop(grown.seq, None)

    def rests(self, grown: Grown) -> bool:
        return False

    def pick(self, grown: Grown) -> list[Leaf]:
        """Branches whose end must be expanded before the microbatch can go on."""
        m = self._making[grown.seq]
        while not m.resting and not m.ready and grown.root.state == DONE:
            if not m.active:
                if m.end is not None and m.end.position - grown.root.position >= self.lead:
                    return []
                m.active, m.taken, m.branches = [m.end or grown.root], [], 1
                self.trace.append(self.cutoff(m.made, m.missed))
            if any(leaf.state == FLYING for leaf in m.active):
                return []
            if new := [leaf for leaf in m.active if leaf.state == NEW]:
                return new
            self._extend(m)
        return []

    def cutoff(self, made: int, missed: int) -> float:
        return self.knobs.pa + made * self.knobs.pr - missed * self.knobs.pd

    def _extend(self, m: _Making) -> None:
        """Every branch is expanded: take its best next token, split off others, or stop it."""
        knobs, cutoff = self.knobs, self.cutoff(m.made, m.missed)
        going: list[Leaf] = []
        main = m.active[0]
        for leaf in m.active:
            ranked = sorted(leaf.children.values(), key=lambda child: child.rank)
            if not ranked or ranked[0].stated < cutoff:
                continue
            for child in ranked:
                if len(m.taken) == knobs.draft:
                    break
                if child.rank:
                    if child.stated <= knobs.ps or m.branches >= knobs.np:
                        continue
                    m.branches += 1
                m.taken.append(child)
                going.append(child)
        if going and going[0].parent is main:
            m.end = going[0]
        if going and len(m.taken) < knobs.draft and going[0].parent is main:
            m.active = going
            return
        m.active = []
        if m.taken:
            m.ready = m.taken
            m.made += 1
            m.missed = 0
        else:
            m.missed += 1
            m.resting = True

    def tell(self, grown: Grown) -> list[Leaf] | None:
        m = self._making[grown.seq]
        told, m.ready = m.ready, []
        if m.resting and self.knobs.pd > 0:
            m.resting = False
        return told or None


class PipeInfer(NoGuesses):
    """The head's side: each microbatch is a run, launched when it comes, in the order made."""

    def __init__(self, knobs: Knobs, most_guesses: int = 512) -> None:
        self.knobs, self.most_guesses = knobs, most_guesses
        self._batches: dict[int, list[list[Node]]] = {}

    def drafted(self, seq: int, draft: Draft, fresh: Sequence[Node], now: float) -> None:
        if fresh:
            self._batches.setdefault(seq, []).append(list(fresh))

    def place(
        self, tips: Sequence[tuple[int, Node]], sizes: Sequence[int], free: bool, order: Order, now: float
    ) -> list[tuple[int, list[tuple[int, Node]]]]:
        if sizes:
            return []
        for seq, _ in tips:
            batches = self._batches.get(seq, [])
            while batches:
                nodes = [(seq, n) for n in batches.pop(0) if not n.dead and not n.launched]
                if nodes and nodes[0][1].parent is not None and nodes[0][1].parent.launched:
                    return [(0, nodes[: order.guesses])]
        return []

    def over(self, seq: int) -> None:
        self._batches.pop(seq, None)
