"""Drafters for the simulator: one that knows the text and errs at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from headrace.run.types import Committed, Draft, Guess, Result


class Scripted:
    """Trees in which the true token is there with probability ``accuracy``, among wrong ones.

    truth: of each sequence, prompt included. Everything by ``rnd``, so that a seed gives the same again.
    """

    def __init__(self, truth: Mapping[int, Sequence[int]], rnd: random.Random, accuracy: float, vocab: int) -> None:
        self.truth, self.random, self.accuracy, self.vocab = truth, rnd, accuracy, vocab
        self.known: dict[int, list[int]] = {}

    def on_event(self, event: Committed | Result, now: float) -> list[Draft]:
        assert isinstance(event, Committed)
        if event.start == 0:
            self.known[event.seq] = []
        known = self.known[event.seq]
        known.extend(event.tokens)
        if event.over:
            del self.known[event.seq]
            return []
        return [self._tree(event.seq, known) for _ in range(self.random.choice((1, 1, 1, 2)))]

    def _tree(self, seq: int, known: list[int]) -> Draft:
        rnd, full = self.random, self.truth[seq]
        guesses: list[Guess] = []
        parent, on_path = -1, True
        for depth in range(rnd.randint(0, 7)):
            at = len(known) + depth
            right = full[at] if on_path and at < len(full) else 1
            for rank in range(rnd.choice((0, 0, 1, 2))):
                guesses.append(Guess(rnd.randrange(self.vocab), parent, 0.1, rank + 1))
                if rnd.random() < 0.3:
                    guesses.append(Guess(rnd.randrange(self.vocab), len(guesses) - 1, 0.1))
            true = rnd.random() < self.accuracy
            guesses.append(Guess(right if true else rnd.randrange(self.vocab), parent, 0.5))
            parent, on_path = len(guesses) - 1, on_path and true
        return Draft(seq, len(known), tuple(known[-rnd.randint(1, 3) :]), tuple(guesses))
