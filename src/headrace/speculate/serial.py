"""Our policy where target and drafters take turns on the same cores: one process, one stage.

Nothing runs beside anything there, so all that counts is time: guesses travel with a known token when the tokens they
bring are worth more, at the present pace, than what their rows delay the pass. What passes take is learned from passes.
An account keeps the loss small whatever the estimates say: speculation starts with a few passes' worth of time,
pays for every delay, earns what it saves, and rests while it has nothing left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import exp

from headrace.run.schedule import Order
from headrace.run.tree import Node
from headrace.run.types import Committed, Draft, Result, Row, RunMessage
from headrace.speculate.control import Measured, Speed
from headrace.speculate.drafters import DraftEffect, NGram
from headrace.speculate.grow import NEW, Grown, Leaf, ModelDrafter
from headrace.speculate.growth import Continuous
from headrace.speculate.learned import Restful
from headrace.speculate.rates import PRIOR, Rates

RIDERS = (0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 15, 19, 23, 31, 47, 63)
"""Guesses in a run that are tried."""
START, SHARE, MOST = 2.5, 0.005, 12.0
"""The account, in passes: at the start, what a plain pass adds, and the most it can hold."""
LOOKUP = 0.05
"""The most that waiting for drafts without a model may cost, in passes."""
FLAT = 0.005
"""What a further row is thought to cost where weights stream, of a pass, until it was tried."""
FIRST = 7
"""Guesses in the first run where weights stream: with the prompt's it tells what rows cost."""
FEW = 64
"""Known rows in a run from which on there is no guessing: a run of prompts, or a full one."""


class Serial(Measured):
    """See the module's docstring. rows: most guesses in a run; floor: least chance of one that is considered.

    streams: the weights are read for every pass, which may take as long whatever its rows: then the prompt's pass and
    the first with guesses say what rows cost, and no plain passes are spent on that.
    """

    def __init__(self, rows: int = 63, most_guesses: int = 96, floor: float = 0.02) -> None:
        self.rates = Rates()
        self.streams = False
        super().__init__(Speed(self.rates, self.rates), rows, most_guesses, floor)
        self.account = 0.0
        self._opened = False
        self._since: float | None = None
        """When the head began to wait for a draft."""
        self._out: dict[int, tuple[float, int, int, bool]] = {}
        self._each = 0.0
        """Seconds a known token of the last pass would have taken without guesses."""
        self._elapsed = self._tokens = 0.0
        self._drafts: dict[int, tuple[int, bool]] = {}
        self._begun: dict[int, int] = {}

    def stream(self) -> None:
        """The weights stream."""
        self.streams, self.rates.prior = True, FLAT

    def active(self) -> bool:
        """Whether there may be guesses: what passes take is known, and the account isn't overdrawn."""
        return (self.rates.known or (self.streams and self._opened)) and self.account > 0.0

    def least(self) -> float:
        """The least chance of a lone guess that pays, over 1 while there may be none."""
        return (self.rates(2) - self.rates(1)) / self.pace if self.active() else 2.0

    @property
    def pace(self) -> float:
        """Seconds a token, lately: what one more is worth, and never more than without guesses."""
        plain = self._each or self.rates.level
        return min(self._elapsed / self._tokens, plain) if self._tokens >= 1.0 else plain

    def ready(self, seq: int, tip: Node, now: float) -> bool:
        """A next token waits for its draft, if any can be of use: nobody else could use the time."""
        known = tip.position + 1
        if self._begun.setdefault(seq, known) == known:
            return True
        if not self.active():
            self._since = None
            return True
        base, more = self._drafts.get(seq, (0, False))
        if base >= known and not more:
            return True
        self._since = now if self._since is None else self._since
        return False

    def drafted(self, seq: int, draft: Draft, fresh: Sequence[Node], now: float) -> None:
        super().drafted(seq, draft, fresh, now)
        self._drafts[seq] = draft.base, draft.more

    def launched(self, run: int, rows: Sequence[tuple[Row, Node | None]], now: float) -> None:
        guesses = sum(row.guess for row, _ in rows)
        self._out[run] = now, len(rows) - guesses, guesses, all(node is not None for _, node in rows)
        if self._since is not None:
            # Looking things up; steps of a draft model are charged as such.
            self.spend(min(now - self._since, LOOKUP * self.rates.level))
            self._since = None

    def returned(self, run: int, rows: int, now: float) -> None:
        began, known, guesses, decoding = self._out.pop(run)
        if not (decoding or (self.streams and known <= FEW)) or not known or rows < known + guesses:
            return
        took = now - began
        if self.streams:
            self.rates.cap(known + guesses, took)
        self.rates.note(known + guesses, took)
        if not self._opened:
            self._opened, self.account = True, START * took
        if not decoding:
            return
        plain = self.rates(known)
        self._each = plain / known
        self._elapsed, self._tokens = 0.96 * self._elapsed, 0.96 * self._tokens
        # What passes take as a rule: on a busy machine a single one says little.
        self._elapsed += plain
        if guesses:
            self.spend(self.rates(known + guesses) - plain)
        else:
            self._earn(SHARE * plain)

    def spend(self, seconds: float) -> None:
        """So much time went into guesses."""
        self._elapsed += seconds
        if self._opened:
            self.account -= min(seconds, 4 * self.rates.level)

    def _earn(self, seconds: float) -> None:
        self.account = min(self.account + seconds, MOST * self.rates.level)

    def judged(self, seq: int, tip: Node, chosen: Node | None, now: float) -> None:
        super().judged(seq, tip, chosen, now)
        self._tokens += self._elapsed > 0.0
        if chosen is not None and chosen.launched:
            self._earn(self._each)

    def over(self, seq: int) -> None:
        super().over(seq)
        self._drafts.pop(seq, None)
        self._begun.pop(seq, None)

    def place(
        self, tips: Sequence[tuple[int, Node]], sizes: Sequence[int], free: bool, order: Order, now: float
    ) -> list[tuple[int, list[tuple[int, Node]]]]:
        if not sizes or sizes[-1] > FEW or not self.active():
            return []
        found = [(p, seq, node) for seq, tip in tips for _, p, seq, node in self._candidates(seq, tip)]
        if not found:
            return []
        found.sort(key=lambda entry: -entry[0])
        known, rates, pace = sizes[-1], self.rates, self.pace
        sums = [0.0, *accumulate(p for p, _, _ in found)]
        # Not far beyond what was tried: a wide run may cost many times what is thought.
        tried = 2 * rates.most + 1 - known if not self.streams else self.rows if rates.counts > 1 else FIRST
        most = min(len(found), self.rows, order.guesses, order.rows - known, tried)
        if most <= 0:
            return []
        _, count = max((pace * sums[r] - rates(known + r), r) for r in {*RIDERS, most} if r <= most)
        return [(len(sizes) - 1, [(seq, node) for _, seq, node in found[:count]])] if count else []


class Frugal(Continuous):
    """Growth in turns with the target: a leaf is expanded when what its children may bring is worth the step.

    It rests while that isn't so, and tries again now and then, if the account bears it. share: a step's cost as part
    of a target's pass, until it is known.
    """

    RATE, AGAIN = 0.1, 48

    def __init__(self, policy: Serial, width: int = 5, rows: int = 8, share: float = 0.0) -> None:
        self.rates, self.share = Rates(), share
        super().__init__(self.rates, width, rows, policy.floor)
        self.policy = policy
        self._right = 0.8
        """Chance that the drafter's first choice is right, smoothed."""
        self._idle = 0
        self._rests: dict[int, bool] = {}

    def started(self, grown: Grown, hit: bool) -> None:
        # A prompt is the target's alone until its first token is there.
        self._rests[grown.seq] = grown.seq not in self._rests or self._choose(grown)
        super().started(grown, hit)

    def judged(self, right: bool) -> None:
        """Whether a first choice was right."""
        self._right += self.RATE * (right - self._right)

    def _step(self, rows: int) -> float:
        """Seconds of a step."""
        return self.rates(rows) if self.rates.known else self.share * self.policy.rates.level * (1 + PRIOR * (rows - 1))

    def _choose(self, grown: Grown) -> bool:
        """Whether to rest until the next token."""
        if not self.policy.active():
            return True
        self._idle += 1
        worth = self._worth(1.0) > self._step(1)
        # Catching up with the text must be paid too, but for a prompt's first time, if the step then looks worth it.
        behind = len(grown.tokens) - grown.cached if grown.cached or not worth else 1
        if (worth or self._idle >= self.AGAIN) and self._step(behind) < self.policy.account:
            self._idle = 0
            return False
        return True

    def _worth(self, chance: float) -> float:
        """Seconds that the children of a leaf with such a chance may save."""
        cost = self.policy.rates(2) - self.policy.rates(1)
        return self.policy.pace * chance * self._right - cost

    def rests(self, grown: Grown) -> bool:
        return self._rests[grown.seq]

    def pick(self, grown: Grown) -> list[Leaf]:
        picked: list[Leaf] = []
        base, spent = grown.root.score, 0.0
        # What is drafted must be launched to be of use, so growing leaves a pass in the account.
        left = self.policy.account - self.policy.rates.level
        while grown.heap and len(picked) < self.rows and left > 0:
            leaf = grown.heap[0][2]
            if leaf.state == NEW:
                cost, chance = self._step(len(picked) + 1), exp(leaf.score - base)
                if chance < self.floor or self._worth(chance) <= cost - spent:
                    break
                picked.append(leaf)
                spent = cost
            heapq.heappop(grown.heap)
        return picked

    def over(self, grown: Grown) -> None:
        self._rests.pop(grown.seq, None)


class Clocked(ModelDrafter):
    """A model drafter that learns what its steps take, and tells its growth whether its first choices were right."""

    def __init__(
        self, pages: int, growth: Frugal | Restful, drafter: int = 0, spend: Callable[[float], None] | None = None,
        cheap: NGram | None = None,
    ) -> None:  # fmt: skip
        super().__init__(pages, growth, drafter, most=128, cheap=cheap, cost=growth.rates)
        self.rates, self.judged, self.spend = growth.rates, growth.judged, spend
        self._sent = 0.0
        self._prompts: dict[int, int] = {}

    def _advance(self, grown: Grown, token: int, dead: set[int]) -> bool:
        if grown.root.children:
            self.judged(min(grown.root.children.values(), key=lambda leaf: leaf.rank).token == token)
        return super()._advance(grown, token, dead)

    def on_event(self, event: Committed | Result, now: float) -> list[DraftEffect]:
        if isinstance(event, Result) and self._rows:
            rows, took = len(self._rows), now - self._sent
            if all(row.wanted for row in self._rows):
                self.rates.note(rows, took)
            if self.spend is not None and self._rows[0].position >= self._prompts.get(self._rows[0].seq, 0):
                self.spend(min(took, self.rates(rows)) if self.rates.known else took)
        elif isinstance(event, Committed) and event.start == 0:
            self._prompts[event.seq] = len(event.tokens)
        effects: list[DraftEffect] = [*super().on_event(event, now)]
        if any(isinstance(effect, RunMessage) for effect in effects):
            self._sent = now
        return effects
