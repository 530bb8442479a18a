"""A drafter that is a model: it grows a tree of likely continuations and re-roots it as the text goes on.

A state machine like the head, with stages of its own (one, or several ranks): it sends them runs and hears
their results. A node is expanded by computing its row; the choice there and the top of its distribution become
its children. What to expand next, and when to tell the head, is a ``Growth``'s decision.

Staged drafting (Spector and Re 2023): a cheaper drafter guesses what will be expanded next, and its guesses' rows
travel along below a node that is computed anyway. A row whose token turns up among the node's children is kept until
the growth asks for that child, which then takes no run; the others go. So the tree is the same and takes fewer runs.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp
from typing import Protocol

from headrace.memory.slots import Lease, SlotPool
from headrace.run.types import (
    Append,
    CacheOp,
    Cancel,
    Choice,
    Committed,
    Draft,
    Free,
    Guess,
    Params,
    Result,
    Row,
    RunMessage,
    Sampling,
)
from headrace.speculate.calibrate import Calibration
from headrace.speculate.drafters import DraftEffect, NGram
from headrace.speculate.rates import PRIOR

NEW, FLYING, DONE, DEAD, AHEAD = range(5)
CHEAP = -1
"""The draft's own drafter, where guesses are counted."""


class Leaf:
    """A token of the drafter's tree. score: log of the chance that the text goes through it, from the start.

    ahead: what a cheaper drafter thinks its children are, computed unasked. known: what its row gave."""

    __slots__ = (
        "ahead", "children", "known", "parent", "position", "rank", "row", "score", "slot", "state", "stated", "token"
    )  # fmt: skip

    def __init__(self, token: int, position: int, parent: Leaf | None, stated: float = 1.0, rank: int = 0) -> None:
        self.token, self.position, self.parent, self.stated, self.rank = token, position, parent, stated, rank
        self.children: dict[int, Leaf] = {}
        self.ahead: dict[int, Leaf] = {}
        self.known: Choice | None = None
        self.state = NEW
        self.score = 0.0
        self.slot = self.row = -1


@dataclass
class Grown:
    """A sequence as the drafter sees it. cached: how many of its tokens have a row."""

    seq: int
    lease: Lease
    tokens: list[int]
    root: Leaf
    cached: int = 0
    heap: list[tuple[float, int, Leaf]] = field(default_factory=list)
    """Leaves that could be expanded, the likeliest first."""
    owed: bool = True
    """The head was promised a draft."""
    fresh: list[tuple[float, int, Leaf]] = field(default_factory=list)
    """Leaves the head wasn't told of, the likeliest first."""


class Growth(Protocol):
    """What to expand next and when to tell the head. width: most children a leaf gets."""

    width: int

    def started(self, grown: Grown, hit: bool) -> None:
        """The sequence goes on from a new root; hit: it was in the tree."""
        ...

    def pick(self, grown: Grown) -> list[Leaf]:
        """Leaves to expand now, their parents expanded; empty: rest until something new is known."""
        ...

    def tell(self, grown: Grown) -> list[Leaf] | None:
        """Leaves to send, after something was expanded or picked; None: nothing yet."""
        ...

    def over(self, grown: Grown) -> None: ...

    def rests(self, grown: Grown) -> bool:
        """Whether nothing of this sequence is to be computed now, not even what is known."""
        ...


class ModelDrafter:
    """The state machine. pages: of its own cache. width of ``growth`` must be within what its stages' top gives.

    cheap: its own drafter. cost: a run's time by its rows; a row goes along unasked while the chance that it saves a
    run outweighs what it adds.
    """

    def __init__(
        self, pages: int, growth: Growth, drafter: int = 0, most: int = 512, chunk: int = 256,
        cheap: NGram | None = None, cost: Callable[[int], float] = lambda rows: 1 + PRIOR * (rows - 1),
    ) -> None:  # fmt: skip
        self.pool = SlotPool(pages)
        self.growth, self.drafter, self.most, self.chunk = growth, drafter, most, chunk
        self.calibration = Calibration()
        self.grown: dict[int, Grown] = {}
        self.cheap, self.cost = cheap, cost
        self.flight: tuple[int, list[Leaf | None]] | None = None
        self._asked: list[tuple[Grown, Leaf]] = []
        """What the growth asked for last."""
        self._turn: deque[int] = deque()
        self._ops: list[CacheOp] = []
        self._run = 0
        self._count = 0
        self._rows: tuple[Row, ...] = ()

    def on_event(self, event: Committed | Result, now: float) -> list[DraftEffect]:
        """One thing happened; returns drafts for the head, runs and cancels for its own stages."""
        effects: list[DraftEffect] = []
        if isinstance(event, Committed):
            if self.cheap is not None:
                self.cheap.on_event(event, now)
            self._committed(event, effects)
        else:
            self._result(event)
        more = True
        while more:
            if self.flight is None:
                self._grow(effects)
            told = self._tell(effects)
            more = told and self.flight is None
        return effects

    def _tell(self, effects: list[DraftEffect]) -> bool:
        """Drafts for the head: what a growth wants told, and what was promised (see ``Draft``)."""
        some = False
        for grown in self.grown.values():
            told = self.growth.tell(grown)
            mine = self.flight is not None and bool(self._rows) and self._rows[0].seq == grown.seq
            if told is not None or (grown.owed and not mine):
                effects.append(replace(self._draft(grown, told or ()), more=mine))
                grown.owed = mine
                some = some or told is not None
        return some

    # --- what is known ----------------------------------------------------------------------------------

    def _committed(self, event: Committed, effects: list[DraftEffect]) -> None:
        if event.start == 0 and not event.over:
            lease = self.pool.lease(len(event.tokens) + 2 * self.most)
            if lease is None:
                effects.append(Draft(event.seq, len(event.tokens), (), ()))
                return
            tokens = list(event.tokens)
            root = Leaf(tokens[-1], len(tokens) - 1, None)
            self.grown[event.seq] = grown = Grown(event.seq, lease, tokens, root)
            self._turn.append(event.seq)
            sampling = event.sampling or Sampling()
            self._ops.append(Params(event.seq, replace(sampling, logprobs=min(self.growth.width, 20) + 1)))
            self.growth.started(grown, False)
            return
        known = self.grown.get(event.seq)
        if known is None:
            if not event.over:
                effects.append(Draft(event.seq, event.start + len(event.tokens), (), ()))
            return
        dead: set[int] = set()
        if event.over:
            del self.grown[event.seq]
            self._turn.remove(event.seq)
            self._kill(known, known.root, dead, give_back=False)
            self.growth.over(known)
            self.pool.release(known.lease)
            self._ops.append(Free(event.seq))
        else:
            hit = True
            for token in event.tokens:
                hit = self._advance(known, token, dead) and hit
            known.owed = True
            self._room(known)
            self.growth.started(known, hit)
        if dead:
            effects.append(Cancel(0, self._run - 1, frozenset(dead)))

    def _advance(self, grown: Grown, token: int, dead: set[int]) -> bool:
        """Go on by a token; the subtree under it stays. Whether the tree had it."""
        root = grown.root
        chosen = root.children.pop(token, None)
        for leaf in (*root.children.values(), *((chosen,) if chosen else ())):
            self.calibration.note(self.drafter, leaf.rank, leaf.stated, leaf is chosen)
        hit, chosen = chosen is not None, chosen or root.ahead.pop(token, None) or Leaf(token, root.position + 1, None)
        for leaf in (*root.children.values(), *root.ahead.values()):
            self._kill(grown, leaf, dead)
        grown.tokens.append(token)
        root.state = DEAD
        chosen.parent = None
        grown.root = chosen
        if chosen.state == AHEAD:
            chosen.state = FLYING
            self._asked.append((grown, chosen))
        if chosen.slot >= 0:
            self._ops.append(Append(grown.seq, (chosen.slot,), (token,)))
            grown.cached += 1
        return hit

    def _kill(self, grown: Grown, top: Leaf, dead: set[int], give_back: bool = True) -> None:
        stack = [top]
        while stack:
            leaf = stack.pop()
            stack.extend((*leaf.children.values(), *leaf.ahead.values()))
            if leaf.state in (FLYING, AHEAD) and leaf.known is None:
                dead.add(leaf.row)
            if leaf.slot >= 0 and give_back:
                self.pool.give_back(grown.lease, leaf.slot)
            leaf.state = DEAD

    def _room(self, grown: Grown) -> None:
        """Lease more when the text has used up most of it; a sequence without room just isn't grown."""
        if self.pool.room(grown.lease) < self.most:
            more = self.pool.lease(self.most)
            if more is not None:
                grown.lease.reserve += more.reserve

    # --- results ----------------------------------------------------------------------------------------

    def _result(self, result: Result) -> None:
        assert self.flight is not None and self.flight[0] == result.run
        leaves = self.flight[1]
        self.flight = None
        for choice in result.choices:
            leaf = leaves[choice.row]
            if leaf is not None:
                leaf.known = choice
                leaf.state = NEW if leaf.state == AHEAD else leaf.state
        self._expand()

    def _expand(self) -> None:
        """What was asked for and is known gets its children."""
        for grown, leaf in self._asked:
            if leaf.state == FLYING and leaf.known is not None:
                leaf.state = DONE
                self._branch(grown, leaf, leaf.known)
        self._asked = []

    def _branch(self, grown: Grown, leaf: Leaf, choice: Choice) -> None:
        """The children of an expanded leaf: what is chosen there, then the top of the rest."""
        if choice.token < 0:
            return
        for cheap in leaf.ahead.values():
            self.calibration.note(CHEAP, 0, cheap.stated, cheap.token == choice.token)
        named = [(choice.token, choice.logprob), *((t, lp) for t, lp in choice.top if t != choice.token)]
        for rank, (token, logprob) in enumerate(named[: self.growth.width]):
            child = leaf.ahead.pop(token, None) or Leaf(token, leaf.position + 1, leaf)
            child.stated, child.rank = exp(min(logprob, 0.0)), rank
            child.score = leaf.score + self.calibration.score(self.drafter, rank, child.stated)
            leaf.children[token] = child
            self._count += 1
            heapq.heappush(grown.heap, (-child.score, self._count, child))
            heapq.heappush(grown.fresh, (-child.score, self._count, child))
        for wrong in leaf.ahead.values():
            self._kill(grown, wrong, set())
        leaf.ahead.clear()

    def _draft(self, grown: Grown, told: Sequence[Leaf]) -> Draft:
        """Those leaves with the paths that lead to them."""
        at: dict[int, int] = {id(grown.root): -1}
        guesses: list[Guess] = []
        for leaf in told:
            path: list[Leaf] = []
            node: Leaf | None = leaf
            while node is not None and id(node) not in at:
                path.append(node)
                node = node.parent
            if node is None:
                continue
            for step in reversed(path):
                assert step.parent is not None
                at[id(step)] = len(guesses)
                guesses.append(Guess(step.token, at[id(step.parent)], step.stated, step.rank, self.drafter))
        return Draft(grown.seq, len(grown.tokens), tuple(grown.tokens[-4:]), tuple(guesses))

    # --- growing ----------------------------------------------------------------------------------------

    def _grow(self, effects: list[DraftEffect]) -> None:
        for _ in range(len(self._turn)):
            seq = self._turn[0]
            self._turn.rotate(-1)
            grown = self.grown[seq]
            rows = [] if self.growth.rests(grown) else self._known(grown) or self._guesses(grown)
            if rows:
                self._send(rows, effects)
                return
        if any(isinstance(op, Free) for op in self._ops):
            self._send([], effects)

    def _known(self, grown: Grown) -> list[tuple[Row, Leaf | None]]:
        """The next tokens of the text that have no row yet; the last of them is the root."""
        end = min(len(grown.tokens), grown.cached + self.chunk)
        rows: list[tuple[Row, Leaf | None]] = []
        slots: list[int] = []
        for at in range(grown.cached, end):
            slot = self.pool.take(grown.lease)
            if slot is None:
                break
            last = at == len(grown.tokens) - 1
            slots.append(slot)
            rows.append((Row(grown.seq, at, grown.tokens[at], slot, wanted=last), grown.root if last else None))
        if rows:
            self._ops.append(Append(grown.seq, tuple(slots), tuple(r.token for r, _ in rows)))
            grown.cached += len(rows)
            if rows[-1][1] is not None:
                self._asked.append((grown, grown.root))
                self._ahead(grown, grown.root, rows)
        return rows

    def _guesses(self, grown: Grown) -> list[tuple[Row, Leaf | None]]:
        rows: list[tuple[Row, Leaf | None]] = []
        while not rows:
            root = grown.root
            if root.state != DONE and root.known is None:
                break
            for leaf in self.growth.pick(grown) if root.state == DONE else [root]:
                if leaf.known is None and not self._row(grown, leaf, rows):
                    break
                leaf.state = FLYING
                self._asked.append((grown, leaf))
            if not self._asked:
                break
            if rows:
                first = rows[0][1]
                assert first is not None
                self._ahead(grown, first, rows)
            else:
                self._expand()
        return rows

    def _row(self, grown: Grown, leaf: Leaf, rows: list[tuple[Row, Leaf | None]], spare: int = 64) -> bool:
        """Add a guess's row; whether there was a slot for it, and ``spare`` beyond."""
        slot = self.pool.take(grown.lease) if self.pool.room(grown.lease) > spare else None
        if slot is None:
            return False
        leaf.slot = slot
        ancestors = tuple(node.slot for node in _path(grown, leaf)[:-1])
        rows.append((Row(grown.seq, leaf.position, leaf.token, slot, True, True, ancestors), leaf))
        return True

    def _ahead(self, grown: Grown, leaf: Leaf, rows: list[tuple[Row, Leaf | None]]) -> None:
        """Add rows that may be asked for once ``leaf`` is known, as far as they are worth it."""
        path, chance = [node.token for node in _path(grown, leaf)], 1.0
        for guess in self.cheap.after(grown.seq, path) if self.cheap is not None else ():
            chance *= self.calibration.probability(CHEAP, 0, guess.probability)
            child = Leaf(guess.token, leaf.position + 1, leaf, guess.probability)
            adds = self.cost(len(rows) + 1) - self.cost(len(rows))
            if chance * self.cost(1) <= adds or not self._row(grown, child, rows, 128):
                break
            child.state = AHEAD
            leaf.ahead[guess.token] = leaf = child

    def _send(self, rows: list[tuple[Row, Leaf | None]], effects: list[DraftEffect]) -> None:
        for i, (_, leaf) in enumerate(rows):
            if leaf is not None:
                leaf.state, leaf.row = FLYING if leaf.state == NEW else leaf.state, i
        self._rows = tuple(row for row, _ in rows)
        self.flight = (self._run, [leaf for _, leaf in rows])
        effects.append(RunMessage(0, self._run, False, tuple(self._ops), self._rows))
        self._ops = []
        self._run += 1


def _path(grown: Grown, leaf: Leaf) -> list[Leaf]:
    """From the root, without it, to the leaf."""
    path: list[Leaf] = []
    node: Leaf | None = leaf
    while node is not None and node is not grown.root:
        path.append(node)
        node = node.parent
    return path[::-1]
