"""What a drafter is, and the drafters that need no model: prompt lookup (n-grams), and several as one.

A drafter is a state machine: it hears ``Committed`` (and, with stages of its own, their ``Result``s) and answers
with ``Draft``s (and with runs and cancels for its own stages). It decides nothing about what is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from headrace.run.types import Cancel, Committed, Draft, Guess, Result, RunMessage

DraftEffect: TypeAlias = Draft | RunMessage | Cancel


class Drafter(Protocol):
    """See the module's docstring."""

    def on_event(self, event: Committed | Result, now: float) -> Sequence[DraftEffect]: ...


@dataclass
class _Text:
    """A sequence's tokens. places: where each n-gram's continuations begin, the latest last."""

    tokens: list[int] = field(default_factory=list)
    places: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class NGram:
    """Prompt lookup (Saxena 2023; the idea is older): what followed the last n tokens when they stood before.

    longest, shortest: lengths of the n-grams looked up, the longest that is found counts. depth: tokens proposed;
    branches: unlike continuations. stated: by the length of the match; how good that is, the head measures, and
    a rank says which continuation it is.
    """

    KEPT = 8
    """Latest places kept of an n-gram."""

    def __init__(
        self, longest: int = 4, shortest: int = 1, depth: int = 10, branches: int = 3, drafter: int = 0
    ) -> None:
        self.longest, self.shortest, self.depth = longest, shortest, depth
        self.branches, self.drafter = branches, drafter
        self._texts: dict[int, _Text] = {}

    def on_event(self, event: Committed | Result, now: float) -> list[DraftEffect]:
        assert isinstance(event, Committed)
        if event.over:
            self._texts.pop(event.seq, None)
            return []
        if event.start == 0:
            self._texts[event.seq] = _Text()
        text = self._texts[event.seq]
        for token in event.tokens:
            text.tokens.append(token)
            self._index(text)
        return [self._draft(event.seq, text)]

    def _index(self, text: _Text) -> None:
        """Note what n-grams ended just before the newest token."""
        end = len(text.tokens) - 1
        for n in range(self.shortest, self.longest + 1):
            if n <= end:
                places = text.places.setdefault(tuple(text.tokens[end - n : end]), [])
                places.append(end)
                del places[: -self.KEPT]

    def _draft(self, seq: int, text: _Text) -> Draft:
        tokens = text.tokens
        guesses: list[Guess] = []
        at: dict[tuple[int, int], int] = {}
        found = 0
        for n in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            for place in reversed(text.places.get(tuple(tokens[-n:]), [])):
                if found == self.branches:
                    break
                found += self._follow(tokens, place, n, found, guesses, at)
        return Draft(seq, len(tokens), tuple(tokens[-4:]), tuple(guesses))

    def _follow(
        self, tokens: list[int], place: int, n: int, rank: int, guesses: list[Guess], at: dict[tuple[int, int], int]
    ) -> bool:
        """Add the tokens from a place on; whether that was a new continuation."""
        parent, new = -1, False
        stated = (0.3, 0.5, 0.7, 0.85)[min(n, 4) - 1] * 0.5**rank
        # A text that repeats itself runs into its own end and goes on from the place again.
        period = len(tokens) - place
        for i in range(self.depth):
            token = tokens[place + i % period]
            index = at.get((parent, token))
            if index is None:
                index = at[parent, token] = len(guesses)
                guesses.append(Guess(token, parent, stated if not new else 0.85, 0 if new else rank, self.drafter))
                new = True
            parent = index
        return new


class Merged:
    """Several drafters as one; each guess says whose it is, so each is measured by itself. Runs come from one at most.

    Each must have been made with its own number (``drafter``), the place in the list.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = list(drafters)

    def on_event(self, event: Committed | Result, now: float) -> list[DraftEffect]:
        effects: list[DraftEffect] = []
        for i, drafter in enumerate(self.drafters):
            if isinstance(event, Result) and isinstance(drafter, NGram):
                continue
            for effect in drafter.on_event(event, now):
                if isinstance(effect, Draft):
                    guesses = tuple(replace(g, drafter=i) for g in effect.guesses)
                    effect = replace(effect, guesses=guesses, more=effect.more or self._others_follow(i, event))
                effects.append(effect)
        return effects

    def _others_follow(self, i: int, event: Committed | Result) -> bool:
        """Whether another drafter still owes its answer to what was committed."""
        return isinstance(event, Committed) and any(not isinstance(d, NGram) for d in self.drafters[i + 1 :])
