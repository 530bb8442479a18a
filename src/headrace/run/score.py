"""How likely a model finds a text: log-probabilities of given tokens, through the same stage as everything else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.kernels.device import F32
from headrace.run.compute import DeviceComputer
from headrace.run.stage import Run, Stage
from headrace.run.types import Append, Choice, Params, Row, RunMessage, Sampling, Step


class ScoringComputer(DeviceComputer):
    """Instead of choosing tokens, keeps the log-probability of the token that really follows each row."""

    def start(self, ids: Sequence[int]) -> None:
        """A new text."""
        self._ids = np.asarray(ids, np.int64)
        self.found: NDArray[np.float64] = np.full(max(0, len(ids) - 1), np.nan)

    def _answer(self, run: Run, logits: F32) -> tuple[Choice, ...]:
        positions = run.rows.position[run.rows.wanted]
        rows = logits.astype(np.float64)
        top = rows.max(axis=1)
        total = top + np.log(np.exp(rows - top[:, None]).sum(axis=1))
        self.found[positions] = rows[np.arange(len(rows)), self._ids[positions + 1]] - total
        return ()


def log_probabilities(computer: ScoringComputer, ids: Sequence[int], rows: int = 128) -> NDArray[np.float64]:
    """log p(ids[i + 1] | ids[: i + 1]) for each i, in nats: [len(ids) - 1]. The cache needs len(ids) slots.

    rows: of a run; the result doesn't depend on it.
    """
    computer.start(ids)
    total = computer.last + 1
    stage = Stage(0, total, total)
    for number, start in enumerate(range(0, len(ids) - 1, rows)):
        part = range(start, min(len(ids) - 1, start + rows))
        ops = Append(0, tuple(part), tuple(ids[i] for i in part)), Params(0, Sampling())
        found = tuple(Row(0, i, ids[i], i, wanted=True) for i in part)
        effects = stage.on_event(RunMessage(0, number, False, ops, found), 0.0)
        while effects and isinstance(effects[0], Step):
            computer.step(effects[0].layer, stage.runs[effects[0].run])
            effects = stage.on_event(effects[0], 0.0)
    return computer.found


def perplexity(values: NDArray[np.float64]) -> float:
    """exp of the mean negative log-probability."""
    return float(np.exp(-values.mean()))
