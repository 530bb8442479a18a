"""What is asked when a token is chosen, and what comes back; kernels/cpu.py and tests/reference_sample.py take it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.device import I32

NOT_FINITE = -1
"""Token of a row whose logits hold a NaN or an infinity."""
NOTHING_ALLOWED = -2
"""Token of a row whose mask forbids every token."""


@dataclass(frozen=True)
class Draw:
    """One row's rule, in the order it is applied (docs/kernels.md, "Sampling").

    recent: ids the penalties look at, int32. bias: (id, value added). mask: bit i % 32 of word i // 32 set: token i
    is allowed. temperature <= 0: the largest logit, lowest id on a tie. top_k 0, top_p 1, min_p 0 and
    repeat_penalty 1 are off. (seed, choice, position) select the noise. logprobs: 0 none, 1 + n the chosen token's
    and the n most likely, from the raw logits.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    choice: int = 0
    position: int = 0
    recent: I32 = field(default_factory=lambda: np.empty(0, np.int32))
    bias: tuple[tuple[int, float], ...] = ()
    mask: NDArray[np.uint32] | None = None
    logprobs: int = 0


class Drawn(NamedTuple):
    """token: an id, NOT_FINITE or NOTHING_ALLOWED; logprob: its own; top: (id, logprob), most likely first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
