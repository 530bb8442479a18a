"""A drafter whose vocabulary isn't the target's: ids are mapped where the tokens' texts agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.errors import Unsupported
from headrace.run.types import Committed, Draft, Guess, Result
from headrace.speculate.drafters import DraftEffect, Drafter

LEAST = 0.5
"""Share of the target's tokens that must have a counterpart."""


class VocabMap:
    """target, draft: each id's bytes, None for special tokens. Raises Unsupported when too few agree."""

    def __init__(self, target: Sequence[bytes | None], draft: Sequence[bytes | None], least: float = LEAST) -> None:
        self._target = target
        self._draft_ids = {text: i for i, text in reversed(list(enumerate(draft))) if text}
        target_ids = {text: i for i, text in reversed(list(enumerate(target))) if text}
        self.to_target = [target_ids.get(text, -1) if text else -1 for text in draft]
        texts = [text for text in target if text]
        self.overlap = sum(text in self._draft_ids for text in texts) / max(len(texts), 1)
        if self.overlap < least:
            raise Unsupported(
                f"the draft model shares {self.overlap:.0%} of the target's tokens, under the {least:.0%} that make it "
                "worth while; choose a draft of the same family, or --draft-ngram."
            )
        self._longest = max(map(len, self._draft_ids), default=0)

    def encode(self, token: int) -> list[int]:
        """The draft's ids for a token of the target: its counterpart, or its bytes by longest match (what has none
        is left out)."""
        text = self._target[token]
        found: list[int] = []
        at = 0
        while text and at < len(text):
            for end in range(min(len(text), at + self._longest), at, -1):
                if (same := self._draft_ids.get(text[at:end])) is not None:
                    found.append(same)
                    break
            else:
                end = at + 1
            at = end
        return found


@dataclass
class _Known:
    """A sequence in both vocabularies. lengths: of the draft's -> how many of the target's stood then."""

    tokens: list[int] = field(default_factory=list)
    count: int = 0
    lengths: dict[int, int] = field(default_factory=dict)


class Translated:
    """Another drafter behind a ``VocabMap``. Its own stages are its own affair: their results pass through."""

    def __init__(self, drafter: Drafter, words: VocabMap) -> None:
        self.drafter, self.words = drafter, words
        self._known: dict[int, _Known] = {}

    def on_event(self, event: Committed | Result, now: float) -> list[DraftEffect]:
        inner: Committed | Result = event
        if isinstance(event, Committed):
            inner = self._heard(event)
        found: list[DraftEffect] = []
        for effect in self.drafter.on_event(inner, now):
            if isinstance(effect, Draft):
                if effect.seq in self._known:
                    found.append(self._said(effect, self._known[effect.seq]))
            else:
                found.append(effect)
        return found

    def _heard(self, event: Committed) -> Committed:
        known = self._known.setdefault(event.seq, _Known())
        tokens = [same for token in event.tokens for same in self.words.encode(token)]
        start = known.count
        if start == 0 and not tokens:
            tokens = [0]  # a drafter needs something to stand on
        known.tokens.extend(event.tokens)
        known.count += len(tokens)
        known.lengths[known.count] = len(known.tokens)
        if event.over:
            del self._known[event.seq]
        sampling = event.sampling
        if sampling is not None:
            # Biases name the target's ids, and noise is drawn by id: only the temperature means the same here.
            sampling = replace(sampling, bias=(), temperature=0.0)
        return Committed(event.seq, start, tuple(tokens), event.over, sampling)

    def _said(self, draft: Draft, known: _Known) -> Draft:
        """The draft in the target's ids; guesses that have none there are left out with all above them."""
        base = known.lengths.get(draft.base, 0)
        at: list[int] = []
        guesses: list[Guess] = []
        for guess in draft.guesses if base else ():
            token = self.words.to_target[guess.token]
            parent = -1 if guess.parent < 0 else at[guess.parent]
            if token < 0 or (guess.parent >= 0 and parent < 0):
                at.append(-1)
                continue
            at.append(len(guesses))
            guesses.append(replace(guess, token=token, parent=parent))
        tail = tuple(known.tokens[max(base - 4, 0) : base])
        return Draft(draft.seq, base, tail, tuple(guesses), draft.more)
