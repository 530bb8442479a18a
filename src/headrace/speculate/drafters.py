"""What a drafter is, and the drafters that need no model: prompt lookup (n-grams), and several as one.

A drafter is a state machine: it hears ``Committed`` (and, with stages of its own, their ``Result``s) and answers
with ``Draft``s (and with runs and cancels for its own stages). It decides nothing about what is launched.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
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
    """Prompt lookup (Saxena 2023; the idea is older): what followed the last tokens when they stood before.

    longest, shortest: of the n-grams that are looked up; of the places found, those whose match reaches
    furthest back come first. depth: most tokens proposed, about twice the match's length; branches: of them.
    What a guess states follows from the length of its match; how good that is, the head measures, and a rank says
    which continuation it is. least: the least chance of a guess that the head has any use for now, over 1 for none;
    what is half as likely isn't looked for.
    """

    KEPT = 8
    """Latest places kept of an n-gram."""
    REACH = 16
    """Tokens a match is followed back."""
    LENGTHS = (1, 2, 3, 5, 8, 16)
    STATED = ((0.16, 0.5, 0.65), (0.23, 0.6, 0.67), (0.43, 0.78, 0.94), (0.4, 0.78, 0.9), (0.67, 0.86, 0.96),
              (0.89, 0.93, 0.98))  # fmt: skip
    """Chances by the match's length (from ``LENGTHS`` on), where places disagree, one place speaks, several agree."""

    def __init__(
        self,
        longest: int = 4,
        shortest: int = 1,
        depth: int = 16,
        branches: int = 2,
        drafter: int = 0,
        least: Callable[[], float] | None = None,
    ) -> None:
        self.longest, self.shortest, self.depth = longest, shortest, depth
        self.branches, self.drafter, self.least = branches, drafter, least
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
        least = self.least() if self.least is not None else 0.0
        guesses = self._guesses(text, least / 2) if least <= 1.0 else ()
        return Draft(seq, len(text.tokens), tuple(text.tokens[-4:]), guesses)

    def after(self, seq: int, path: Sequence[int]) -> tuple[Guess, ...]:
        """What it proposes if the sequence goes on with these tokens."""
        text = self._texts[seq]
        return self._guesses(_Text([*text.tokens, *path], text.places), 0.0)

    def _guesses(self, text: _Text, least: float) -> tuple[Guess, ...]:
        tokens, seen = text.tokens, set[int]()
        guesses: list[Guess] = []
        at: dict[tuple[int, int], int] = {}
        found = 0
        for n in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            places = [p for p in text.places.get(tuple(tokens[-n:]), ()) if p not in seen]
            seen.update(places)
            for length, place in sorted(((self._length(tokens, p, n), p) for p in places), reverse=True):
                if found == self.branches:
                    return tuple(guesses)
                found += self._follow(tokens, place, places, length, found, guesses, at, least)
        return tuple(guesses)

    def _length(self, tokens: list[int], place: int, n: int) -> int:
        """Of the match that ends before ``place``, from n on."""
        while n < self.REACH and n < place and tokens[place - 1 - n] == tokens[-1 - n]:
            n += 1
        return n

    def _follow(
        self, tokens: list[int], place: int, places: list[int], n: int, rank: int,
        guesses: list[Guess], at: dict[tuple[int, int], int], least: float,
    ) -> bool:  # fmt: skip
        """Add the tokens from a place on, as far as ``places`` agree or not; whether that was a new continuation."""
        parent, new, end, chance = -1, False, len(tokens), 1.0
        for i in range(min(self.depth, 2 * n + 1)):
            # A text that repeats itself runs into its own end and goes on from the place again.
            token = tokens[place + i % (end - place)]
            agree = [p for p in places if tokens[p + i % (end - p)] == token]
            sure = 0 if len(agree) < len(places) else min(len(agree), 2)
            places = agree
            index = at.get((parent, token))
            stated = self.STATED[bisect_right(self.LENGTHS, n + i) - 1][sure] * (1.0 if new else 0.5**rank)
            chance *= stated if index is None else guesses[index].probability
            if chance < least:
                break
            if index is None:
                index = at[parent, token] = len(guesses)
                guesses.append(Guess(token, parent, stated, 0 if new else rank, self.drafter))
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
