"""Virtual links. Each direction of each pair has its own; messages on one link stay in order, those on two need not."""

from __future__ import annotations

import random
from dataclasses import dataclass

from headrace.run.types import Append, Cancel, Committed, Draft, Params, Passed, Result, RunMessage


@dataclass(frozen=True)
class LinkSpec:
    """latency: seconds; rate: bytes/s. jitter: up to so many seconds more, at random; each message stalls with
    probability ``stall`` for up to ``stall_time`` seconds."""

    latency: float = 50e-6
    rate: float = 125e6
    jitter: float = 0.0
    stall: float = 0.0
    stall_time: float = 0.0


GIGABIT = LinkSpec(50e-6, 0.94 * 125e6)
"""Gigabit Ethernet: 94% of the line is payload at a 1500-byte MTU with TCP."""
HUNDRED = LinkSpec(5e-6, 12e9)
"""100 Gbit/s with a low-latency stack."""


class Link:
    """One direction: store and forward, first in, first out."""

    def __init__(self, spec: LinkSpec, rnd: random.Random | None = None) -> None:
        self.spec = spec
        self.bytes = 0
        self.messages = 0
        self._random = rnd
        self._free = 0.0
        self._last = 0.0

    def arrival(self, now: float, nbytes: int) -> float:
        """Send now; returns when the whole message is there."""
        spec = self.spec
        self.bytes += nbytes
        self.messages += 1
        self._free = max(now, self._free) + nbytes / spec.rate
        time = self._free + spec.latency
        if self._random is not None:
            time += self._random.random() * spec.jitter
            if spec.stall and self._random.random() < spec.stall:
                time += self._random.random() * spec.stall_time
        self._last = max(self._last, time)
        return self._last


HEADER = 32
ROW = 20


def run_nbytes(message: RunMessage, width: int) -> int:
    """Bytes of a run on the wire: its rows, cache operations, and f32 activations of the live rows."""
    size = HEADER
    for row in message.rows:
        size += ROW + 4 * len(row.ancestors)
    for op in message.ops:
        size += 16 + (8 * len(op.slots) if isinstance(op, Append) else 64 if isinstance(op, Params) else 0)
    return size + 4 * width * (len(message.rows) if message.live is None else len(message.live))


def nbytes(message: Result | Cancel | Committed | Draft | Passed) -> int:
    """Bytes of the small messages."""
    if isinstance(message, Result):
        return HEADER + sum(12 + 8 * len(c.top) for c in message.choices)
    if isinstance(message, Cancel):
        return HEADER + 4 * len(message.rows)
    if isinstance(message, Committed):
        return HEADER + 4 * len(message.tokens)
    if isinstance(message, Draft):
        return HEADER + 4 * len(message.tail) + 12 * len(message.guesses)
    return HEADER
