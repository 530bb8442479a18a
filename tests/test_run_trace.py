"""What real runs show of themselves: sums and a trace that add up, in one process and over ranks told as messages."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.generation import figures_json, figures_line
from headrace.cluster.handshake import Seen, pack, unpack
from headrace.cluster.seen import PART, heard, told
from headrace.engine import load
from headrace.errors import BadMessage
from headrace.results import Figures, Totals
from headrace.run.trace import Recorder, Span, Visit, chrome_trace
from headrace.run.types import Submit
from helpers_mpi import mpirun, needs_mpi
from helpers_tiny import tiny_model
from test_cluster_members import cluster
from test_two_orders import Scripted, model, plain, requests

__all__ = ["model", "plain"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("trace") / "tiny.gguf", blocks=4, text=True)


def bars(text: str, stage: int) -> list[dict[str, Any]]:
    """Bars of a stage, in order."""
    events = [e for e in json.loads(text)["traceEvents"] if e["ph"] == "X" and e["pid"] == stage + 1]
    return sorted(events, key=lambda e: e["ts"])


def test_one_process_shows_every_layer_of_every_run(tiny: Path) -> None:
    with load(tiny, threads=1, context=256) as engine:
        assert engine.totals() is None
        before = engine.generate(["hello"], max_tokens=9, ignore_eos=True)[0].tokens
        engine.watch(trace=True)
        assert engine.generate(["hello"], max_tokens=9, ignore_eos=True)[0].tokens == before
        totals, text, length = engine.totals(), engine.trace(), len(engine.encode("hello"))
    assert totals is not None and (totals.launched, totals.hops) == (0, ())
    found = bars(text, 0)
    computed = [e for e in found if e["cat"] == "compute"]
    assert [e["args"]["rows"] for e in computed] == [length] + [1] * 8
    assert {e["args"]["layers"] for e in computed} == {"0 to 5"}
    assert sum(e["dur"] for e in computed) >= 1e6 * totals.busy[0] > 0  # a bar has the time between layers too
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(found))
    assert {e["cat"] for e in found} == {"compute", "bubble"}


def test_runs_of_a_block_are_shown_layer_by_layer(tiny: Path) -> None:
    with load(tiny, threads=1, context=256, rows=4, runs=2, caches=4) as engine:
        engine.watch(trace=True)
        engine.generate(["abc", "bcd", "cde", "def", "efg", "fgh"], max_tokens=4, ignore_eos=True)
        text = engine.trace()
    spans = Counter(e["name"] for e in bars(text, 0) if e["cat"] == "compute")
    assert max(spans.values()) == 6  # the runs of a block take turns at each of six layers


@pytest.mark.parametrize("seed", range(2))
def test_ranks_tell_the_head(model, plain, seed: int) -> None:  # type: ignore[no-untyped-def]
    truth = {r.id: [*r.tokens, *plain[0][r.id]] for r in requests()}
    loop, members, _ = cluster(model, Scripted(truth), seed)
    for part in (loop, *members):
        part.watch(Recorder(True, time.monotonic))
    for request in requests():
        loop.submit(Submit(request))
    while not loop.idle:
        loop.pump()
    seen = loop.look()
    assert seen is not None
    counts = loop.head.counts
    assert sum(f.guesses for f in seen.fates.values()) == counts.launched > counts.accepted > 0
    assert sum(f.right for f in seen.fates.values()) == counts.accepted
    assert set(seen.busy) == {0, 1, 2} and all(seen.busy.values())
    assert {s.stage for s in seen.spans} == {0, 1, 2}
    assert seen.hops[0, 1] > 100_000 and seen.hops[1, 2] > 100_000 > seen.hops[0, 2] > 0  # the last are cancels
    finished = {v.run for v in seen.visits if v.stage == 2}
    assert {run for run, fate in seen.fates.items() if fate.returned is not None} <= finished
    kinds = Counter(e.get("cat") for e in json.loads(chrome_trace(seen, loop.names(), 3))["traceEvents"])
    assert set(kinds) >= {"compute", "wasted", "bubble", "wait", "network", "run"}
    before = len(seen.spans)
    again = loop.look()
    assert again is not None and len(again.spans) == before
    assert loop.names()[1] == "stage 1, rank 1 on host1"


def test_what_was_seen_travels_in_parts() -> None:
    spans = [Span(1, i, 0.001 * i, 0.001 * i + 0.0005, 3, 4, 6) for i in range(2 * PART + 7)]
    visits = [Visit(1, i, 0.001 * i, 0.002 * i, 3, 2) for i in range(5)]
    rank = Recorder(True, lambda: 20.0)
    rank.spans, rank.visits = list(spans), list(visits)
    rank.busy[1] = 1.5
    parts = [unpack(pack(part)) for part in told(rank, {(2, "bytes"): 70, (2, "messages"): 3, (-1, "bytes"): 9})]
    assert [p.more for p in parts if isinstance(p, Seen)] == [2, 1, 0] and rank.spans == []
    head = Recorder(True, lambda: 5.0)
    for part in parts:
        assert isinstance(part, Seen) and part.now == 20_000_000
        heard(head, 1, part, ahead=15.0)
    assert head.busy == {1: 1.5} and head.hops == {(1, 2): 70}
    assert [s._replace(start=0.0, end=0.0) for s in head.spans] == [s._replace(start=0.0, end=0.0) for s in spans]
    assert [s.start for s in head.spans] == pytest.approx([s.start - 15 for s in spans])
    assert [v.left for v in head.visits] == pytest.approx([v.left - 15 for v in visits])
    with pytest.raises(BadMessage, match="rows of 7"):
        heard(head, 1, Seen(0, (), (), (1, 2, 3), (), 0), 0.0)


def test_the_summary_of_several_stages() -> None:
    figures = Figures(prompt_tokens=4, tokens=10, started=1.0, first=2.0, last=5.0)
    before, after = Totals(5, 2, 1, (1.0, 1.0), (500,)), Totals(25, 10, 9, (2.0, 4.0), (3500,))
    since = after.since(before)
    assert since == Totals(20, 8, 8, (1.0, 3.0), (3000,)) and after.since(None) == after
    line = figures_line(figures, None, "", since)
    assert "guesses: 20 launched, 8 accepted, 8 cancelled · bubble 50% · 300 B a token a hop" in line
    data = figures_json(figures, None, since)
    assert (data["bubble_share"], data["hop_bytes_per_token"]) == (0.5, 300.0)
    assert "bubble" not in figures_line(figures, None, "", Totals(0, 0, 0, (1.0,)))


@needs_mpi
def test_the_commands_write_a_trace_of_all_ranks(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    words = [
        "-m",
        "headrace",
        "run",
        "-m",
        tiny,
        "--raw",
        "-c",
        256,
        "-t",
        1,
        "-n",
        12,
        "--ignore-eos",
        "--json",
        "hello",
    ]
    done = mpirun(2, *words, "--trace", file)
    assert done.returncode == 0, done.stderr
    answer, plain = json.loads(done.stdout), json.loads(mpirun(2, *words).stdout)
    assert answer["text"] == plain["text"] and "trace" not in plain["figures"]
    for figures in (answer["figures"], plain["figures"]):
        assert 0 < figures["bubble_share"] < 1 and figures["hop_bytes_per_token"] > 4 * 64
        assert figures["guesses_launched"] == 0
    text = file.read_text()
    for stage in (0, 1):
        assert sum(e["cat"] == "compute" for e in bars(text, stage)) == 12
    kinds = Counter(e.get("cat") for e in json.loads(text)["traceEvents"])
    assert kinds["network"] >= 2 * 12 and kinds["bubble"] > 12
    refused = mpirun(1, *words, "--trace", tmp_path / "none" / "x.json")
    assert refused.returncode == 2 and "no such folder" in refused.stderr and sys.executable not in refused.stderr
