"""What a request gives: pieces of text while it runs, figures, and the whole at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.run.types import Emit, Request
from headrace.text.stream import StopMatcher, Stream


@dataclass(frozen=True)
class Piece:
    """A bit of text as it comes. tokens: ids since the last piece; finish: why it's over ("" while it isn't)."""

    text: str
    tokens: tuple[int, ...] = ()
    finish: str = ""


@dataclass
class Figures:
    """What one request took; times in seconds by the wall clock."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose cache was there already."""
    tokens: int = 0
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0
    weight_bytes: int = 0
    """Bytes of weights a decode pass reads."""

    @property
    def ttft(self) -> float:
        return max(0.0, self.first - self.started)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens computed per second, up to the first token."""
        return (self.prompt_tokens - self.reused_tokens) / self.ttft if self.ttft else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first."""
        span = self.last - self.first
        return (self.tokens - 1) / span if self.tokens > 1 and span > 0 else 0.0


@dataclass(frozen=True)
class Totals:
    """Since the engine was watched, over all ranks. launched, accepted, cancelled: guesses. busy: seconds each stage of
    the target computed; hops: bytes sent to each of them after the first, runs and cancels."""

    launched: int
    accepted: int
    cancelled: int
    busy: tuple[float, ...]
    hops: tuple[int, ...] = ()

    def since(self, before: Totals | None) -> Totals:
        """What has come since; all of it when a loss made the ranks begin again."""
        if before is None or len(before.busy) != len(self.busy) or self.launched < before.launched:
            return self
        return Totals(
            self.launched - before.launched,
            self.accepted - before.accepted,
            self.cancelled - before.cancelled,
            tuple(max(0.0, a - b) for a, b in zip(self.busy, before.busy, strict=True)),
            tuple(max(0, a - b) for a, b in zip(self.hops, before.hops, strict=True)),
        )

    def bubble(self, seconds: float) -> float:
        """Share of that time in which the stages had nothing to compute, over all of them."""
        return max(0.0, 1.0 - sum(self.busy) / (seconds * len(self.busy))) if seconds > 0 else 0.0

    def hop_bytes(self, tokens: int) -> float | None:
        """Bytes a token a hop; None where there are no hops."""
        return sum(self.hops) / len(self.hops) / max(tokens, 1) if self.hops else None


@dataclass(frozen=True)
class Completion:
    """A finished request. finish: "end", "length", "stop", "error" or "cancelled"."""

    text: str
    tokens: tuple[int, ...]
    finish: str
    figures: Figures


@dataclass
class Job:
    """A request under way, or over (``finish``): its text so far and where it is to go."""

    request: Request
    stream: Stream
    stops: StopMatcher
    figures: Figures
    tokens: list[int] = field(default_factory=list)
    choices: list[Emit] = field(default_factory=list)
    """Kept when log-probabilities are asked for."""
    text: list[str] = field(default_factory=list)
    fresh: list[Piece] = field(default_factory=list)
    finish: str = ""

    def completion(self) -> Completion:
        return Completion("".join(self.text), tuple(self.tokens), self.finish, self.figures)
