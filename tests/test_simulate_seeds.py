"""Random clusters in virtual time give plain decoding's text; bugs put in on purpose are found."""

from __future__ import annotations

import pytest

from headrace.run.head import Head
from headrace.run.live import Flight, Live
from headrace.run.stage import Run, Stage
from headrace.run.types import StageEffect
from simulate_seeds import Made, run_seed

QUICK = 2000


@pytest.mark.parametrize("start", range(0, QUICK, 500))
def test_every_seed_gives_plain_text(start: int) -> None:
    assert [wrong for seed in range(start, start + 500) if (wrong := run_seed(seed))] == []


class ReusesTooEarly(Head):
    """An accepted guess's slot is given back as if it had been thrown away."""

    def _advance(self, live: Live, now, cancels, effects) -> None:  # type: ignore[no-untyped-def]
        super()._advance(live, now, cancels, effects)
        if live.seq in self.live and live.tip.launched and live.tip.slot is not None:
            self.pool.give_back(live.lease, live.tip.slot)


class CancelsLiveAncestors(Head):
    """One wrong row cancels its whole run, right rows that others stand on included."""

    def _lose(self, run: int, flight: Flight, row: int, cancels) -> None:  # type: ignore[no-untyped-def]
        super()._lose(run, flight, row, cancels)
        cancels[run].update(range(len(flight.rows)))


class LosesTombstones(Stage):
    """A run without rows isn't passed on, and its cache operations are lost with it."""

    def _leave(self, run: Run, effects: list[StageEffect]) -> None:
        if run.live or self.end == self.total:
            super()._leave(run, effects)
        else:
            del self.runs[run.id]
            self.cancelled.pop(run.id, None)


class ForgetsEarlyCancels(Stage):
    """Not a wrong text but waste: no seed may fail, a cancel is only ever a saving."""

    def _cancel(self, event) -> None:  # type: ignore[no-untyped-def]
        if event.run <= self.newest:
            super()._cancel(event)


@pytest.mark.parametrize(
    "made", [Made(head=ReusesTooEarly), Made(head=CancelsLiveAncestors), Made(stage=LosesTombstones)]
)
def test_a_planted_bug_is_found(made: Made) -> None:
    assert next((seed for seed in range(1000) if run_seed(seed, made)), None) is not None


def test_a_cancel_is_only_a_saving() -> None:
    assert [wrong for seed in range(150) if (wrong := run_seed(seed, Made(stage=ForgetsEarlyCancels)))] == []
