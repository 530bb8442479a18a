"""Sampling parameters to a device's draws, and its answers to choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headrace.kernels.device import F32, I32
from headrace.kernels.draw import Draw, Drawn
from headrace.run.types import Choice, Sampling


class Drawer(Protocol):
    """A device that chooses tokens: ``logits`` [rows, vocab], a draw for each row."""

    def sample(self, logits: F32, draws: Sequence[Draw]) -> list[Drawn]: ...


def draw(sampling: Sampling, ids: I32, position: int) -> Draw:
    """The draw of the token that follows the row at ``position``; ``ids``: those the penalties look back at.

    The noise is keyed by the new token's own position, so a guess and a plain row draw alike.
    """
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repeat_penalty=sampling.repeat_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        seed=sampling.seed,
        choice=sampling.choice,
        position=position + 1,
        recent=ids,
        bias=sampling.bias,
        logprobs=sampling.logprobs,
    )


def choose(device: Drawer, logits: F32, asked: Sequence[tuple[int, Sampling, I32, int]]) -> tuple[Choice, ...]:
    """Choices for rows of logits; asked: (row of the run, parameters, ids looked back at, position) of each."""
    drawn = device.sample(logits, [draw(sampling, ids, position) for _, sampling, ids, position in asked])
    return tuple(
        Choice(row, max(d.token, -1), d.logprob, tuple(d.top)) for (row, _, _, _), d in zip(asked, drawn, strict=True)
    )
