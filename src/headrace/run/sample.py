"""Sampling parameters to a device's draws, and its answers to choices."""

from __future__ import annotations

from headrace.kernels.device import F32, I32, Device
from headrace.kernels.draw import Draw
from headrace.run.stage import Run
from headrace.run.types import Choice, Sampling


def draw(s: Sampling, ids: I32, position: int) -> Draw:
    """The draw of the token that follows the row at ``position``; ``ids``: those the penalties look back at.

    The noise is keyed by the new token's own position, so a guess and a plain row draw alike.
    """
    return Draw(
        s.temperature, s.top_k, s.top_p, s.min_p, s.repeat_penalty, s.frequency_penalty, s.presence_penalty,
        s.seed, s.choice, position + 1, recent=ids, bias=s.bias, logprobs=s.logprobs,
    )  # fmt: skip


def choose(device: Device, logits: F32, run: Run) -> tuple[Choice, ...]:
    """What a run's rows that want a token get, of their logits [wanted rows, vocab]."""
    asked = [run.live[r] for r in run.rows.wanted.tolist()]
    drawn = device.sample(logits, [draw(*run.history[i], run.message.rows[i].position) for i in asked])
    return tuple(Choice(i, max(d.token, -1), d.logprob, tuple(d.top)) for i, d in zip(asked, drawn, strict=True))
