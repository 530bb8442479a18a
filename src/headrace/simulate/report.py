"""What a simulated run came to: rates, utilisation, and pictures of it (SVG, HTML)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from headrace.run.trace import Recorder
from headrace.simulate.driver import Log, Simulation


@dataclass(frozen=True)
class Report:
    """rate: tokens/s after the first token. ttft, itl, itl50, itl95: seconds to a request's first token (median of
    requests) and between tokens (mean, median, 95th percentile; tokens may come several at a time).

    busy: share of the time each of the target's stages, then the drafter's, computed; wasted: share of the target's
    computed row-time that was thrown away (both only when looked at). launched, accepted, cancelled: guesses.
    hop_bytes: bytes a token on a link between stages.
    """

    strategy: str
    tokens: int
    seconds: float
    rate: float
    ttft: float
    itl: float
    itl50: float
    itl95: float
    launched: int
    accepted: int
    cancelled: int
    runs: int
    busy: tuple[float, ...]
    wasted: float
    hop_bytes: float
    stages: int
    seen: Recorder | None = None

    @property
    def bubble(self) -> float:
        """Share of the time that the target's stages had nothing to compute, over all of them."""
        return 1.0 - sum(self.busy[: self.stages]) / self.stages if self.busy else 0.0

    def lines(self) -> str:
        """A summary for people."""
        shown = f", {self.hop_bytes:.0f} bytes a token a hop" if self.stages > 1 else ""
        if self.busy:
            each = " ".join(f"{100 * b:.0f}" for b in self.busy)
            shown += (
                f"; busy, % of each stage: {each}; bubble {100 * self.bubble:.0f}%, wasted {100 * self.wasted:.0f}%"
            )
        guesses = f"; guesses: {self.launched} launched, {self.accepted} accepted, {self.cancelled} cancelled"
        return (
            f"{self.strategy}: {self.rate:.3f} tokens/s, first after {self.ttft:.3f} s, then {1e3 * self.itl:.1f} ms a "
            f"token (median {1e3 * self.itl50:.1f}, 95% {1e3 * self.itl95:.1f})" + guesses * (self.launched > 0) + shown
        )

    def data(self) -> dict[str, Any]:
        """Everything but what was seen, as plain data."""
        return {**{k: v for k, v in vars(self).items() if k != "seen"}, "bubble": self.bubble}


def report(name: str, simulation: Simulation, log: Log, seen: Recorder | None = None) -> Report:
    by_request: dict[int, list[float]] = defaultdict(list)
    for time, request, _ in log.emitted:
        by_request[request].append(time)
    times = [time for time, _, _ in log.emitted]
    gaps = sorted(b - a for each in by_request.values() for a, b in pairwise(each))
    lasted, stages = times[-1] - times[0], len(simulation.pipe.nodes)
    counts = simulation.head.counts
    links = [node.link for node in simulation.pipe.nodes if node.link is not None]
    drafts = len(simulation.draft_pipe.nodes) if simulation.draft_pipe else 0
    return Report(
        strategy=name,
        tokens=len(times),
        seconds=times[-1],
        rate=(len(times) - 1) / lasted if lasted else 0.0,
        ttft=median(each[0] for each in by_request.values()),
        itl=sum(gaps) / max(len(gaps), 1),
        itl50=median(gaps) if gaps else 0.0,
        itl95=gaps[int(0.95 * len(gaps))] if gaps else 0.0,
        launched=counts.launched,
        accepted=counts.accepted,
        cancelled=counts.cancelled,
        runs=counts.runs,
        busy=tuple(seen.busy[i] / times[-1] for i in range(stages + drafts)) if seen else (),
        wasted=seen.wasted(stages) if seen else 0.0,
        hop_bytes=sum(link.bytes for link in links) / max(len(links), 1) / len(times),
        stages=stages,
        seen=seen,
    )


def timeline_svg(
    seen: Recorder, names: Sequence[str], targets: int, start: float, end: float, width: int = 1200
) -> str:
    """A picture of [start, end): a lane per stage. Blue: all rows of a run were useful; red: none; grey: some."""
    lane, left = 22, 90
    scale = (width - left) / (end - start)
    alive = {(v.stage, v.run): v.alive for v in seen.visits}
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{lane * len(names) + 24}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for i, name in enumerate(names):
        out.append(f'<text x="4" y="{i * lane + 15}">{name}</text>')
    for s in seen.spans:
        if s.end <= start or s.start >= end:
            continue
        x = left + (max(s.start, start) - start) * scale
        w = max((min(s.end, end) - max(s.start, start)) * scale, 0.5)
        useful = seen.useful(s.run, s.rows) if s.stage < targets else alive.get((s.stage, s.run), s.rows)
        colour = "#c0504d" if not useful else "#4f81bd" if useful == s.rows else "#8c8cb4"
        out.append(
            f'<rect x="{x:.1f}" y="{s.stage * lane + 2}" width="{w:.1f}" height="{lane - 4}" fill="{colour}">'
            f"<title>run {s.run}: {s.rows} rows, {useful} useful</title></rect>"
        )
    out.append(f'<text x="{left}" y="{lane * len(names) + 16}">{start:.3f} s to {end:.3f} s</text></svg>')
    return "\n".join(out)


def timeline_html(reports: Sequence[tuple[Report, Sequence[str]]], start: float, end: float) -> str:
    """Several timelines on one page, each with its summary."""
    parts = [
        f"<h3>{r.strategy}</h3><p>{r.lines()}</p>{timeline_svg(r.seen, names, r.stages, start, end)}"
        for r, names in reports
        if r.seen is not None
    ]
    return "<!doctype html><meta charset=utf-8><title>Timeline</title>" + "\n".join(parts)
