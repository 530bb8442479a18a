"""Text as it comes: from ids to whole characters, and up to a stop string."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from headrace.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Stream:
    """Ids to text, a token at a time. The parts add up to ``Tokenizer.decode`` of all ids; none splits a character."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False, start: bool = False) -> None:
        """``special``: write control tokens by name. ``start``: the ids begin a text (drops SentencePiece's space)."""
        self._tokenizer = tokenizer
        self._special = special
        self._drop_space = start and tokenizer.vocab.space_prefix
        self._decoder = _utf8("replace")

    def push(self, token: int) -> str:
        """The text that is certain now; "" while a character is incomplete. A control token ends a character."""
        data = self._tokenizer.token_bytes(token)
        if self._tokenizer.is_control(token):
            return self.flush() + data.decode() if self._special else ""
        if self._drop_space and data:
            self._drop_space = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """What is left of an incomplete character, as U+FFFD; the stream is as new afterwards, but mid-text."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Cuts a stream of text before the first stop string; holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises BadRequest for an empty stop string."""
        if not all(stops):
            raise BadRequest("A stop string is empty: leave it out.")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The text that can be shown now. Once ``matched`` is set, nothing more comes.

        The stop string that is complete first counts (of two that end together the longer), however the text
        was cut into pieces.
        """
        if self.matched is not None:
            return ""
        held = self._held + text
        found = [(at + len(s), at, s) for s in self._stops if (at := held.find(s)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return held[:at]
        at = self._begins(held)
        self._held = held[at:]
        return held[:at]

    def flush(self) -> str:
        """The text ended: what was held back."""
        held, self._held = self._held, ""
        return held

    def _begins(self, held: str) -> int:
        """Where the longest end of ``held`` starts that a stop string begins with; its length if none."""
        longest = max(map(len, self._stops), default=1) - 1
        for at in range(max(0, len(held) - longest), len(held)):
            if any(s.startswith(held[at:]) for s in self._stops):
                return at
        return len(held)
