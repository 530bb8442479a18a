"""A simulated cluster's times are those one can work out, and its reports are what they say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from headrace.errors import BadFile
from headrace.simulate.acceptance import Acceptance
from headrace.simulate.cluster import GPU_CURVE, Cluster, Curve, even, load_cluster, ours, plain, run_simulation
from headrace.simulate.driver import Simulation
from headrace.simulate.network import LinkSpec
from headrace.simulate.report import chrome_trace, timeline_html, timeline_svg

WHERE = Cluster((3, 2, 2), (0.01, 0.02, 0.01), GPU_CURVE, LinkSpec(0.001, 1e8), 1000, draft_time=0.002)


def test_plain_decoding_takes_compute_and_hops() -> None:
    report = run_simulation(WHERE, Acceptance(0.5), plain(), 20)
    compute = 3 * 0.01 + 2 * 0.02 + 2 * 0.01
    hops = 3 * 0.001 + 2 * (4000 + 20) / 1e8
    assert report.itl == pytest.approx(compute + hops, rel=0.002)
    assert report.tokens == 20 and report.launched == report.accepted == 0


def test_utilisation_and_pictures() -> None:
    report = run_simulation(WHERE, Acceptance(0.6), ours(), 40, spans=True)
    assert len(report.busy) == 3 and all(0 < b <= 1 for b in report.busy)
    assert report.launched >= report.accepted > 0 and report.launched >= report.cancelled > 0
    names = ["head", "two", "three", "drafter"]
    events = [e for e in json.loads(chrome_trace(report.spans, names))["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(report.spans) > 100
    assert {e["cat"] for e in events} == {"compute", "wasted"}
    svg = timeline_svg(report.spans, names, 0.0, report.seconds)
    assert svg.count("<rect") == len(report.spans) and "drafter" in svg
    assert report.lines() in timeline_html([(report, names)], 0.0, 1.0)


def test_stages_compute_one_run_at_a_time() -> None:
    report = run_simulation(WHERE, Acceptance(0.6), ours(), 40, spans=True)
    for stage in range(4):
        spans = sorted((s for s in report.spans if s.stage == stage), key=lambda s: s.start)
        assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(spans))


def test_curves_are_linear_between_points_and_beyond() -> None:
    curve = Curve(((1, 1.0), (2, 1.5), (6, 3.5)))
    assert [curve(r) for r in (1, 2, 4, 6, 8)] == [1.0, 1.5, 2.5, 3.5, 4.5]
    assert even(10, 3) == (4, 3, 3)


def test_cluster_files(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('layers = [3, 2]\nlayer_time = 0.01\ncurve = "gpu"\n[link]\nlatency = 1e-4\nrate = 1e9\n')
    assert load_cluster(file) == Cluster((3, 2), (0.01, 0.01), GPU_CURVE, LinkSpec(1e-4, 1e9))
    for text, said in (
        ("layers = [3]", "layer_time"),
        ("layers = [3]\nlayer_time = 1.0\nlayer = 2", "unknown"),
        ("layers = [3, 0]\nlayer_time = 1.0", "positive"),
        ("layers = [3]\nlayer_time = 1.0\ncurve = 'fast'", "fast"),
        ("layers = [", "TOML"),
    ):
        file.write_text(text)
        with pytest.raises(BadFile, match=said):
            load_cluster(file)
    with pytest.raises(BadFile, match=r"none\.toml"):
        load_cluster(tmp_path / "none.toml")


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
