"""Typed values that cross boundaries: requests, rows, messages, events and effects.

A run is described once, by its ``RunMessage``; head, stages, drafters and every driver speak in these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple, TypeAlias

from headrace.errors import BadRequest
from headrace.kernels.device import F32, I32

PROTOCOL = 1
"""Version of the messages; peers compare it in the handshake."""


@dataclass(frozen=True)
class Sampling:
    """How a sequence's tokens are chosen. The token at a position is a function of the logits, these and no more.

    temperature <= 0 is greedy. top_k 0, top_p 1, min_p 0, repeat_penalty 1 switch their filter off.
    repeat_last_n: how many of the last tokens the penalties look at; -1 all, 0 none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    choice: int = 0
    bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = 0

    def __post_init__(self) -> None:
        for name, (kind, good, want) in LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or not good(value):
                raise BadRequest(f"{name} is {value!r}; it must be {want}")

    @property
    def looks_back(self) -> bool:
        """Whether earlier token ids change the choice."""
        return self.repeat_last_n != 0 and (
            self.repeat_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0
        )


@dataclass(frozen=True)
class Request:
    """One sequence to continue. tokens: prompt ids, at least one. ends: ids after which the sequence is over."""

    id: int
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    ends: frozenset[int] = frozenset()
    continues: int | None = None
    """A kept request whose cache may be taken over (chat); only the common prefix is used."""
    keep: bool = False
    """Keep the cache when finished, for a later request that continues it; ``Forget`` gives it back."""


LIMITS: Mapping[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (Real, lambda v: abs(v) < HUGE, "a finite number"),
    "top_k": (int, lambda v: 0 <= v < 2**31, "a whole number from 0 to 2^31 - 1"),
    "top_p": (Real, lambda v: 0 < v <= 1, "a number over 0 and at most 1"),
    "min_p": (Real, lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    "repeat_penalty": (Real, lambda v: 0 < v < HUGE, "a finite number over 0"),
    "repeat_last_n": (int, lambda v: v >= -1, "-1 (all), 0 (none) or a whole number"),
    "frequency_penalty": (Real, lambda v: abs(v) < HUGE, "a finite number"),
    "presence_penalty": (Real, lambda v: abs(v) < HUGE, "a finite number"),
    "seed": (int, lambda v: 0 <= v < 2**64, "a whole number from 0 to 2^64 - 1"),
    "choice": (int, lambda v: True, "a whole number"),
    "logprobs": (int, lambda v: 0 <= v <= 21, "a whole number from 0 to 21"),
}
"""Of ``Sampling``: a value's kind, whether it will do, and what it must be."""
HUGE = 3e38
"""Beyond it lie numbers that f32 doesn't have."""


# --- cache operations -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Append:
    """Commit ``slots`` (with their token ids) to the end of a sequence; makes the sequence when new."""

    seq: int
    slots: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Fork:
    """A new sequence that shares the first ``length`` slots of another."""

    seq: int
    source: int
    length: int


@dataclass(frozen=True)
class Free:
    seq: int


@dataclass(frozen=True)
class Params:
    seq: int
    sampling: Sampling


CacheOp: TypeAlias = Append | Fork | Free | Params


# --- rows and messages ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """One token to compute. ancestors: slots of the uncommitted guesses it stands on, oldest first."""

    seq: int
    position: int
    token: int
    slot: int
    wanted: bool
    guess: bool = False
    ancestors: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunMessage:
    """What travels from the head to stage 0 and on from stage to stage; one per run and hop.

    more: another run of the same block follows. live: indices of rows not cancelled so far (None: all);
    x: their activations, f32 [len(live), width] (None before the first stage, and in tombstones).
    """

    epoch: int
    run: int
    more: bool
    ops: tuple[CacheOp, ...]
    rows: tuple[Row, ...]
    live: I32 | None = None
    x: F32 | None = None


@dataclass(frozen=True)
class Choice:
    """What the target samples after a row. token -1: the logits were not finite.

    logprob of that token; top: (id, logprob) when asked for.
    """

    row: int
    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Result:
    """From the last stage to the head: one per run, also for tombstones (no choices)."""

    epoch: int
    run: int
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Passed:
    """From stage 0 to the head: a run has left it. So the head knows when a guess can start at once."""

    run: int


@dataclass(frozen=True)
class Cancel:
    """From the head straight to every stage. rows: indices in that run. May arrive before its run."""

    epoch: int
    run: int
    rows: frozenset[int]


# --- drafting -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guess:
    """A proposed token. parent: index of another guess of the same draft, -1 for the draft's base.

    probability: the drafter's own; drafter: which one proposed it; rank: 0 for its first choice there.
    """

    token: int
    parent: int
    probability: float
    rank: int = 0
    drafter: int = 0


@dataclass(frozen=True)
class Draft:
    """A tree under the first ``base`` tokens of a sequence, whose last ``len(tail)`` of them are ``tail``.

    A drafter answers each Committed (unless it says over) with at least one draft of that base, an empty one if it
    has nothing to say; more: another draft is sure to follow, whatever happens. So a head may wait for it.
    """

    seq: int
    base: int
    tail: tuple[int, ...]
    guesses: tuple[Guess, ...]
    more: bool = False


@dataclass(frozen=True)
class Committed:
    """Head to drafter: these tokens now stand from position ``start`` on. over: the sequence is finished.

    sampling: with start 0, so that a drafter can choose as the target will.
    """

    seq: int
    start: int
    tokens: tuple[int, ...]
    over: bool = False
    sampling: Sampling | None = None


# --- events and effects ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Submit:
    request: Request


@dataclass(frozen=True)
class Withdraw:
    """The client has left, or a stop string was found: finish now, give everything back."""

    request: int
    reason: str = "cancelled"


@dataclass(frozen=True)
class Forget:
    """Give back the cache of a kept request."""

    request: int


HeadEvent: TypeAlias = Submit | Withdraw | Forget | Result | Draft | Passed


@dataclass(frozen=True)
class Emit:
    """A committed token, in order. logprob and top as in ``Choice``; position counts from the prompt's start."""

    request: int
    token: int
    position: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finish:
    """reason: "end", "length", "error" (logits not finite), or a withdrawal's."""

    request: int
    reason: str


HeadEffect: TypeAlias = RunMessage | Cancel | Committed | Emit | Finish


class Step(NamedTuple):
    """A stage's order to its driver: compute this layer (index in the model's flat list) of this run.

    through: the last layer that may be computed in the same go, as nothing else is to be done in between.
    """

    layer: int
    run: int
    through: int = -1


StageEvent: TypeAlias = RunMessage | Cancel | Step
"""A Step as an event says: that run has passed that layer."""
StageEffect: TypeAlias = Step | RunMessage | Result | Passed
