"""Ranks, links, drafters and heads are lost at random moments in virtual time; the text stays, nothing leaks."""

from __future__ import annotations

import pytest

from headrace.run.head import Head
from headrace.run.live import Live
from headrace.run.types import Request, Result
from simulate_faults import run_seed
from simulate_seeds import Made


@pytest.mark.parametrize("start", [0, 150])
def test_every_seed_gives_plain_text_once(start: int) -> None:
    assert [wrong for seed in range(start, start + 150) if (wrong := run_seed(seed))] == []


class HeedsTheDead(Head):
    """Answers of ranks that were given up are taken for the new ones'."""

    def _result(self, result: Result, now, effects) -> None:  # type: ignore[no-untyped-def]
        super()._result(Result(self.epoch, result.run, result.choices), now, effects)


class KeepsALease(Head):
    """A sequence that began again keeps its pages when it's over."""

    def _start(self, request: Request) -> Live | None:
        if self.epoch and self.pool.available > 2:
            self.pool.lease(1)
        return super()._start(request)


@pytest.mark.parametrize("head", [HeedsTheDead, KeepsALease])
def test_a_planted_bug_is_found(head: type[Head]) -> None:
    assert next((seed for seed in range(300) if run_seed(seed, Made(head=head))), None) is not None
