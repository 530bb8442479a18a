"""A model made of hashes: its text depends on every slot each row reads, and costs nothing to compute.

Each (layer, slot) keeps a 64-bit hash. A row's new hash covers its old one and the hashes it reads through its
slot list, in order; the last layer's hash gives the token. So a wrong, stale or missing slot changes the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.device import F32
from headrace.run.stage import Computer, Run
from headrace.run.types import Choice, Request, Sampling

U64 = NDArray[np.uint64]
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def mix(x: U64) -> U64:
    """The SplitMix64 finaliser (Steele, Lea, Flood 2014), element by element."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * _MIX[1]
        x = (x ^ (x >> np.uint64(27))) * _MIX[2]
        return x ^ (x >> np.uint64(31))


def to_floats(h: U64) -> F32:
    """64 bits as four small integers in f32 [n, 4], so that they travel like activations."""
    parts = [(h >> np.uint64(s)) & np.uint64(0xFFFF) for s in (0, 16, 32, 48)]
    return np.stack(parts, axis=1).astype(np.float32)


def from_floats(x: F32) -> U64:
    parts = x.astype(np.uint64)
    whole: U64 = (
        parts[:, 0] | parts[:, 1] << np.uint64(16) | parts[:, 2] << np.uint64(32) | parts[:, 3] << np.uint64(48)
    )
    return whole


class HashModel(Computer):
    """A ``Computer`` for one stage. layers: of the whole model; vocab: number of tokens; seed: which model."""

    def __init__(self, slots: int, layers: int, vocab: int = 997, seed: int = 1) -> None:
        self.layers = layers
        self.vocab = vocab
        self.seed = np.uint64(seed)
        self._cache: dict[int, U64] = {}
        self._slots = slots
        with np.errstate(over="ignore"):
            self._weights = mix(np.arange(1, slots + 2, dtype=np.uint64) * _MIX[0]) | np.uint64(1)

    def step(self, layer: int, run: Run) -> None:
        rows = run.rows
        if run.x is None:
            run.x = to_floats(mix(rows.token.astype(np.uint64) ^ self.seed))
        cache = self._cache.setdefault(layer, np.zeros(self._slots, np.uint64))
        with np.errstate(over="ignore"):
            own = mix(from_floats(run.x) + np.uint64(layer + 1) * _MIX[0] + rows.position.astype(np.uint64))
            cache[rows.slot] = own
            out = np.empty_like(own)
            for r in range(rows.count):
                base = rows.lists[rows.base[r] : rows.base[r] + rows.base_len[r]]
                extra = rows.lists[rows.extra[r] : rows.extra[r] + rows.extra_len[r]]
                seen = cache[np.concatenate([base, extra])]
                out[r] = (seen * self._weights[: seen.shape[0]]).sum() + own[r]
            out = mix(out)
        run.x = to_floats(out)
        if layer == self.layers - 1:
            run.choices = tuple(self._choose(run, r, int(out[r])) for r in rows.wanted)

    def _choose(self, run: Run, r: int, h: int) -> Choice:
        """The token: of the hash, and of what the sampling parameters look back at."""
        i = run.live[r]
        sampling, ids = run.history[i]
        return Choice(i, token_of(h, sampling, ids.tolist(), self.vocab))


def token_of(h: int, sampling: Sampling, ids: list[int], vocab: int) -> int:
    if sampling.temperature > 0:
        h ^= hash((sampling.seed, sampling.choice)) & (2**63 - 1)
    for token in ids:
        h = (h * 31 + token) % (2**61 - 1)
    return h % vocab


_M64 = 2**64 - 1


def _scramble(h: int) -> int:
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9 & _M64
    return h ^ (h >> 27)


class LightModel(Computer):
    """The same idea in plain integers: quicker for a few rows; reads the slot lists itself."""

    def __init__(self, layers: int, vocab: int = 997, seed: int = 1) -> None:
        self.layers, self.vocab, self.seed = layers, vocab, seed
        self._cache: dict[tuple[int, int], int] = {}

    def step(self, layer: int, run: Run) -> None:
        cache, rows = self._cache, run.message.rows
        xs = [_scramble(rows[i].token + self.seed) for i in run.live] if run.x is None else run.x.tolist()
        out = []
        for i, x in zip(run.live, xs, strict=True):
            row = rows[i]
            own = _scramble(x + layer * 0x9E3779B97F4A7C15 + row.position)
            cache[layer, row.slot] = own
            seen = run.base(i).tolist()
            if row.guess:
                seen.extend(row.ancestors)
                seen.append(row.slot)
            out.append(self._mixed(layer, own, seen))
        run.x = cast(F32, np.asarray(out, np.uint64))
        if layer == self.layers - 1:
            run.choices = tuple(
                Choice(i, token_of(h, *_look(run, i), self.vocab)) for i, h in zip(run.live, out, strict=True)
                if rows[i].wanted
            )  # fmt: skip

    def _mixed(self, layer: int, own: int, seen: Sequence[int]) -> int:
        h, get = own, self._cache.get
        for slot in seen:
            # Nothing there: the cancel of an ancestor came before the cancel of this row, whose answer is lost anyway.
            h = (h ^ get((layer, slot), 0)) * 0x94D049BB133111EB & _M64
        return _scramble(h)

    def plain(self, request: Request) -> tuple[list[int], str]:
        """What one row after the other gives: the text and why it ends. Uses neither head nor stage."""
        self._cache = {}
        tokens = list(request.tokens)
        sampling = request.sampling
        at = 0
        while True:
            token = -1
            while at < len(tokens):
                h = _scramble(tokens[at] + self.seed)
                for layer in range(self.layers):
                    own = _scramble(h + layer * 0x9E3779B97F4A7C15 + at)
                    self._cache[layer, at] = own
                    h = self._mixed(layer, own, range(at + 1))
                at += 1
                ids: list[int] = []
                if sampling.looks_back:
                    ids = tokens[-sampling.repeat_last_n :] if sampling.repeat_last_n > 0 else tokens
                token = token_of(h, sampling, ids, self.vocab)
            tokens.append(token)
            text = tokens[len(request.tokens) :]
            if token in request.ends:
                return text, "end"
            if len(text) == request.max_tokens:
                return text, "length"


class LightDraft(LightModel):
    """A draft of the model with the same seed: the target's choice is its first with ``accuracy``, else later.

    Where, is a function of the place in the text, so every driver meets the same.
    """

    def __init__(self, layers: int, vocab: int, seed: int, accuracy: float, width: int = 4) -> None:
        super().__init__(layers, vocab, seed)
        self.accuracy, self.width = accuracy, width

    def step(self, layer: int, run: Run) -> None:
        super().step(layer, run)
        if layer == self.layers - 1:
            run.choices = tuple(self._listed(choice, run) for choice in run.choices)

    def _listed(self, choice: Choice, run: Run) -> Choice:
        row = run.message.rows[choice.row]
        luck = _scramble(_scramble(row.position * 7919 + row.token + self.seed)) / 2**64
        others = [(choice.token + 1 + i) % self.vocab for i in range(self.width)]
        at = 0 if luck < self.accuracy else 1 + int((luck - self.accuracy) * 1e6) % self.width
        named = [*others[:at], choice.token, *others[at:]][: self.width]
        top = tuple((token, -0.3 - rank) for rank, token in enumerate(named))
        return Choice(choice.row, top[0][0], top[0][1], top)


def _look(run: Run, i: int) -> tuple[Sampling, list[int]]:
    sampling, ids = run.history[i]
    return sampling, ids.tolist()
