"""A simulated cluster's times are those one can work out, and its reports are what they say."""

from __future__ import annotations

import itertools
import json

import pytest

from headrace.run.trace import chrome_trace
from headrace.simulate.acceptance import Acceptance
from headrace.simulate.cluster import GPU_CURVE, Cluster, Curve, even, ours, plain, run_simulation
from headrace.simulate.driver import Simulation
from headrace.simulate.network import LinkSpec
from headrace.simulate.report import timeline_html, timeline_svg

WHERE = Cluster((3, 2, 2), (0.01, 0.02, 0.01), GPU_CURVE, LinkSpec(0.001, 1e8), 1000, draft_time=0.002)


def test_plain_decoding_takes_compute_and_hops() -> None:
    report = run_simulation(WHERE, Acceptance(0.5), plain(), 20)
    compute = 3 * 0.01 + 2 * 0.02 + 2 * 0.01
    hops = 3 * 0.001 + 2 * (4000 + 20) / 1e8
    assert report.itl == pytest.approx(compute + hops, rel=0.002)
    assert report.tokens == 20 and report.launched == report.accepted == 0


def test_utilisation_and_pictures() -> None:
    report = run_simulation(WHERE, Acceptance(0.6), ours(), 40, spans=True)
    assert len(report.busy) == 4 and all(0 < b <= 1 for b in report.busy)
    assert report.launched >= report.accepted > 0 and report.launched >= report.cancelled > 0
    assert 0 < report.bubble < 1 and 0 < report.wasted < 1
    names = ["head", "two", "three", "drafter"]
    assert report.seen is not None
    svg = timeline_svg(report.seen, names, 3, 0.0, report.seconds + 1)
    assert svg.count("<rect") == len(report.seen.spans) and "drafter" in svg
    assert report.lines() in timeline_html([(report, names)], 0.0, 1.0)


def test_a_trace_tells_where_every_second_of_a_stage_went() -> None:
    report = run_simulation(WHERE, Acceptance(0.6), ours(), 40, spans=True)
    seen = report.seen
    assert seen is not None
    events = json.loads(chrome_trace(seen, ["head", "two", "three", "drafter"], 3))["traceEvents"]
    kinds = {e["cat"] for e in events if "cat" in e}
    assert kinds == {"run", "compute", "wasted", "partly wasted", "bubble", "wait", "network"}
    for at in range(3):
        bars = [e for e in events if e["ph"] == "X" and e["pid"] == at + 1]
        busy = sum(e["dur"] for e in bars if e["cat"] != "bubble")
        assert busy == pytest.approx(1e6 * seen.busy[at])
        whole = sum(end - start for start, end in seen.active())
        assert sum(e["dur"] for e in bars) == pytest.approx(1e6 * whole, rel=1e-3)
    pairs = [e for e in events if e.get("cat") == "network"]
    began, ended = ({(e["pid"], e["id"]): e["ts"] for e in pairs if e["ph"] == ph} for ph in "be")
    assert began.keys() == ended.keys() and len(began) > 80
    assert all(ended[key] - began[key] >= 1e6 * WHERE.link.latency * 0.999 for key in began)
    right = sum(e["args"]["right"] for e in events if e.get("cat") == "run" and e["ph"] == "b")
    assert right == report.accepted


def test_a_plain_pipeline_wastes_nothing_and_is_busy_once_a_token() -> None:
    report = run_simulation(WHERE, Acceptance(0.6), plain(), 20, spans=True)
    assert report.wasted == 0.0 and report.seen is not None
    assert {span.rows for span in report.seen.spans} == {1, 16}
    each = 3 * 0.01 + 2 * 0.02 + 2 * 0.01
    assert sum(report.busy) * report.seconds == pytest.approx(19 * each + GPU_CURVE(16) * each)
    assert report.bubble == pytest.approx(1 - sum(report.busy) / 3)


def test_stages_compute_one_run_at_a_time() -> None:
    report = run_simulation(WHERE, Acceptance(0.6), ours(), 40, spans=True)
    assert report.seen is not None
    for stage in range(4):
        spans = sorted((s for s in report.seen.spans if s.stage == stage), key=lambda s: s.start)
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(spans))


def test_several_requests_share_a_pipeline() -> None:
    one = run_simulation(WHERE, Acceptance(0.6), plain(), 30, spans=True)
    four = run_simulation(WHERE, Acceptance(0.6), plain(), 30, spans=True, prompts=4)
    assert four.tokens == 120 and 2 * one.rate < four.rate <= 4.2 * one.rate


def test_curves_are_linear_between_points_and_beyond() -> None:
    curve = Curve(((1, 1.0), (2, 1.5), (6, 3.5)))
    assert [curve(r) for r in (1, 2, 4, 6, 8)] == [1.0, 1.5, 2.5, 3.5, 4.5]
    assert even(10, 3) == (4, 3, 3)


def test_layers_taken_in_one_go_change_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at each layer by itself, and at all in one go where nothing can come between, is the same."""
    times = []
    original = Simulation.__init__
    for lazy in (True, False):

        def init(self, *args, lazy=lazy, **kwargs) -> None:  # type: ignore[no-untyped-def]
            original(self, *args, **kwargs, lazy=lazy)

        monkeypatch.setattr(Simulation, "__init__", init)
        report = run_simulation(WHERE, Acceptance(0.6), ours(), 60)
        times.append((report.launched, report.cancelled, report.runs, pytest.approx(report.seconds, rel=1e-9)))
    assert times[0] == times[1]
