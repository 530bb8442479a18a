"""Byte pair encoding, once for both kinds of vocabulary a GGUF file holds.

A byte-level vocabulary ("gpt2") ranks explicit merges; a SentencePiece one ("llama") ranks a merge by the score of
the token it makes. Both are the same greedy loop over a queue of neighbouring pairs, lowest rank first, leftmost on
a tie (Sennrich et al. 2016; Kudo and Richardson 2018), so one function serves both. It is Python on purpose: a
compiled model of a vocabulary of 262,144 takes seconds to build, a dict takes a tenth of one, and words repeat, so
that a cache of words answers nearly all of a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from heapq import heapify, heappop, heappush

_CACHE_WORDS = 1 << 16
_CACHE_CHARS = 64


def byte_alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in a byte-level vocabulary (Radford et al. 2019, GPT-2).

    Printable Latin-1 stands for itself; the other 68 bytes, ascending, get U+0100 onwards.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in plain}
    rest = (b for b in range(256) if b not in table)
    return table | {b: chr(0x100 + i) for i, b in enumerate(rest)}


def merge(text: str, ranks: Mapping[str, float], between: str) -> list[str]:
    """Symbols of ``text`` after all merges. ``ranks[left + between + right]``: a pair's rank, lowest merged first."""
    symbols = list(text)
    count = len(symbols)
    after = list(range(1, count + 1))
    before = list(range(-1, count - 1))
    get = ranks.get
    pairs = [(i, symbols[i] + between + symbols[i + 1]) for i in range(count - 1)]
    queue = [(rank, i, key) for i, key in pairs if (rank := get(key)) is not None]
    heapify(queue)
    while queue:
        _, i, key = heappop(queue)
        j = after[i]
        # Stale when either side has grown or gone since; an absorbed symbol is empty and grown ones differ.
        if j >= count or not symbols[i] or symbols[i] + between + symbols[j] != key:
            continue
        symbols[i] += symbols[j]
        symbols[j] = ""
        right = after[i] = after[j]
        if right < count:
            before[right] = i
            key = symbols[i] + between + symbols[right]
            if (rank := get(key)) is not None:
                heappush(queue, (rank, i, key))
        left = before[i]
        if left >= 0:
            key = symbols[left] + between + symbols[i]
            if (rank := get(key)) is not None:
                heappush(queue, (rank, left, key))
    return [s for s in symbols if s]


def word_encoder(
    ids: Mapping[str, int], ranks: Mapping[str, float], between: str, spell: Callable[[str], list[int]],
    whole_words: bool = False,
) -> Callable[[str], list[int]]:  # fmt: skip
    """Words to ids, with a bounded cache. ``ids`` lacks control tokens, so that no word can become one.

    ``spell``: ids of a symbol that is no token. ``whole_words``: a word that is a token isn't merged.
    """

    def fresh(word: str) -> list[int]:
        if whole_words and word in ids:
            return [ids[word]]
        symbols = merge(word, ranks, between)
        return [i for s in symbols for i in ((ids[s],) if s in ids else spell(s))]

    known = lru_cache(_CACHE_WORDS)(fresh)
    return lambda word: known(word) if len(word) <= _CACHE_CHARS else fresh(word)
