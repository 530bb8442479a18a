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
