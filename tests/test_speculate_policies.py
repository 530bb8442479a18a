"""Policies in virtual time: each knob of PipeInfer's has its effect; ours pays where it can and costs nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from headrace.run.types import RunMessage
from headrace.simulate.acceptance import RUNNERS_UP, Acceptance, Recorded
from headrace.simulate.cluster import (
    CPU_CURVE,
    GPU_CURVE,
    Cluster,
    Curve,
    even,
    ours,
    pipeinfer,
    plain,
    run_simulation,
    synchronous,
)
from headrace.simulate.driver import Simulation
from headrace.speculate.pipeinfer import Knobs, Microbatches


def cluster(curve: Curve = CPU_CURVE, nodes: int = 4, draft: float = 0.01) -> Cluster:
    return Cluster(even(24, nodes), (0.5 / 24,) * nodes, curve, width=1024, draft_time=draft)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[RunMessage]:
    """Every run the head launched."""
    runs: list[RunMessage] = []

    def to_head(self: Simulation, event) -> None:  # type: ignore[no-untyped-def]
        old = self.pipe.send

        def send(message: RunMessage) -> None:
            runs.append(message)
            old(message)

        self.pipe.send = send  # type: ignore[method-assign]
        try:
            original(self, event)
        finally:
            self.pipe.send = old  # type: ignore[method-assign]

    original = Simulation._to_head
    monkeypatch.setattr(Simulation, "_to_head", to_head)
    return runs


def guess_runs(runs: Sequence[RunMessage]) -> list[RunMessage]:
    return [run for run in runs if any(row.guess for row in run.rows)]


@pytest.mark.parametrize("draft", [1, 3, 5])
def test_draft_is_the_most_tokens_of_a_microbatch(draft: int, sent: list[RunMessage]) -> None:
    run_simulation(cluster(), Acceptance(0.7), pipeinfer(Knobs(draft, 1, 0.001, 0.2)), 30)
    assert max(len(run.rows) for run in guess_runs(sent)) == draft


def branches(run: RunMessage) -> int:
    depths = [len(row.ancestors) for row in run.rows]
    return max(depths.count(d) for d in set(depths))


def test_np_and_ps_bound_the_branches(sent: list[RunMessage]) -> None:
    runs = {}
    for np, ps in ((1, 0.03), (2, 0.03), (3, 0.03), (3, 0.9)):
        sent.clear()
        run_simulation(cluster(), Acceptance(0.6), pipeinfer(Knobs(6, np, 0.001, ps)), 30)
        runs[np, ps] = max(map(branches, guess_runs(sent)))
    assert runs == {(1, 0.03): 1, (2, 0.03): 2, (3, 0.03): 3, (3, 0.9): 1}


def test_nothing_is_launched_under_pa(sent: list[RunMessage]) -> None:
    run_simulation(cluster(), Acceptance(0.5), pipeinfer(Knobs(4, 1, 0.51, 0.2)), 20)
    assert guess_runs(sent) == []
    run_simulation(cluster(), Acceptance(0.5), pipeinfer(Knobs(4, 1, 0.49, 0.2)), 20)
    assert guess_runs(sent)


def test_the_cutoff_follows_recovery_and_decay() -> None:
    growth = Microbatches(Knobs(2, 1, 0.3, 0.2, pr=0.1, pd=0.02))
    assert growth.cutoff(0, 0) == 0.3
    assert growth.cutoff(3, 0) == pytest.approx(0.6)
    assert growth.cutoff(3, 5) == pytest.approx(0.5)


def test_recovery_stops_a_chain_and_an_accepted_guess_resets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Microbatches] = []
    original = Microbatches.__init__

    def init(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        original(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(Microbatches, "__init__", init)
    run_simulation(cluster(), Acceptance(0.6), pipeinfer(Knobs(1, 1, 0.3, 0.2, pr=0.1)), 30)
    trace = [round(c, 6) for c in made[0].trace]
    assert set(trace) <= {0.3, 0.4, 0.5, 0.6, 0.7}
    steps = [(a, b) for a, b in itertools.pairwise(trace) if b != 0.3]
    assert steps and all(b == round(a + 0.1, 6) or b == a for a, b in steps)


@dataclass(frozen=True)
class Never:
    """A drafter that is sure and always wrong."""

    def rank(self, position: int) -> int:
        return -1

    def stated(self, position: int) -> Sequence[float]:
        return (0.8, 0.1, 0.05)


@pytest.mark.parametrize("curve", [CPU_CURVE, GPU_CURVE])
@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_a_useless_drafter_costs_at_most_three_in_a_hundred(curve: Curve, nodes: int) -> None:
    where = cluster(curve, nodes)
    base = run_simulation(where, Never(), plain(), 256)
    assert run_simulation(where, Never(), ours(), 256).seconds <= 1.03 * base.seconds


@pytest.mark.parametrize("curve", [CPU_CURVE, GPU_CURVE])
@pytest.mark.parametrize("nodes", [1, 3, 8])
def test_ours_is_at_least_as_good_as_the_others(curve: Curve, nodes: int) -> None:
    where, luck = cluster(curve, nodes), Acceptance(0.7, 3)
    rate = run_simulation(where, luck, ours(), 150).rate
    others = [plain(), synchronous(1), synchronous(4), pipeinfer(Knobs(1, 1, 0.001, 0.2))]
    assert all(rate >= 0.97 * run_simulation(where, luck, other, 150).rate for other in others)


def test_runs_are_wide_where_rows_are_cheap(sent: list[RunMessage]) -> None:
    mean = {}
    for name, curve in (("dear", CPU_CURVE), ("cheap", GPU_CURVE)):
        sent.clear()
        run_simulation(cluster(curve, 8), Acceptance(0.6), ours(), 60)
        mean[name] = sum(len(r.rows) for r in guess_runs(sent)) / len(guess_runs(sent))
    assert mean["dear"] < 1.5 < 3 < mean["cheap"]


def test_the_acceptance_model_is_the_stated_one() -> None:
    luck = Acceptance(0.52, 5)
    counts = [0] * 6
    for position in range(20000):
        counts[luck.rank(position)] += 1
    shares = [c / 20000 for c in counts[:5]]
    assert shares[0] == pytest.approx(0.52, abs=0.012)
    for share, part in zip(shares[1:], RUNNERS_UP, strict=True):
        assert share == pytest.approx(0.48 * part, abs=0.01)
    again = Recorded([0, 2, -1], [(0.5, 0.3, 0.2)] * 3)
    assert [again.rank(p) for p in range(4)] == [0, 2, -1, 0]
