"""What a simulated run came to: rates, utilisation, and pictures of it (SVG, HTML, Chrome trace)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.simulate.driver import Log, Simulation, Span


@dataclass(frozen=True)
class Report:
    """rate: tokens/s after the first token. ttft, itl (mean between tokens), itl95: seconds.

    busy: share of the time each stage computed; wasted: share of computed row-time that was thrown away.
    launched, accepted, cancelled: guesses. hop_bytes: bytes a token on the first link.
    """

    strategy: str
    tokens: int
    seconds: float
    rate: float
    ttft: float
    itl: float
    itl95: float
    launched: int
    accepted: int
    cancelled: int
    runs: int
    busy: tuple[float, ...]
    hop_bytes: float
    spans: tuple[Span, ...] = ()

    def lines(self) -> str:
        """A summary for people."""
        busy = sum(self.busy) / len(self.busy) if self.busy else 0.0
        shown = f", stages busy {100 * busy:.0f}%" if self.busy else ""
        return (
            f"{self.strategy}: {self.rate:.3f} tokens/s, first after {self.ttft:.3f} s, "
            f"then {1e3 * self.itl:.1f} ms a token "
            f"(95%: {1e3 * self.itl95:.1f}); guesses: {self.launched} launched, {self.accepted} accepted, "
            f"{self.cancelled} cancelled; {self.hop_bytes:.0f} bytes a token a hop{shown}"
        )


def report(name: str, layers: Sequence[int], simulation: Simulation, log: Log) -> Report:
    times = [t for t, _, _ in log.emitted]
    gaps = sorted(b - a for a, b in pairwise(times))
    lasted = times[-1] - times[0]
    busy = [0.0] * len(layers)
    for span in log.spans:
        if span.stage < len(layers):
            busy[span.stage] += span.end - span.start
    counts = simulation.head.counts
    link = simulation.pipe.nodes[0].link
    return Report(
        strategy=name,
        tokens=len(times),
        seconds=times[-1],
        rate=(len(times) - 1) / lasted if lasted else 0.0,
        ttft=times[0],
        itl=lasted / max(len(gaps), 1),
        itl95=gaps[int(0.95 * len(gaps))] if gaps else 0.0,
        launched=counts.launched,
        accepted=counts.accepted,
        cancelled=counts.cancelled,
        runs=counts.runs,
        busy=tuple(b / times[-1] for b in busy) if log.spans else (),
        hop_bytes=(link.bytes if link else 0) / len(times),
        spans=tuple(log.spans),
    )


def chrome_trace(spans: Sequence[Span], names: Sequence[str]) -> str:
    """JSON for chrome://tracing or Perfetto: a row per stage, a bar per run; ``left`` 0 is a run that was wasted."""
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": name}} for i, name in enumerate(names)
    ]
    for s in spans:
        events.append(
            {
                "name": f"run {s.run}",
                "cat": "compute" if s.left else "wasted",
                "ph": "X",
                "ts": 1e6 * s.start,
                "dur": 1e6 * (s.end - s.start),
                "pid": 0,
                "tid": s.stage,
                "args": {"rows": s.rows, "left": s.left},
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def timeline_svg(spans: Sequence[Span], names: Sequence[str], start: float, end: float, width: int = 1200) -> str:
    """A picture of [start, end): a lane per stage. Blue: its rows counted to the end; red: none did; grey: some."""
    lane, left = 22, 90
    scale = (width - left) / (end - start)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{lane * len(names) + 24}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for i, name in enumerate(names):
        out.append(f'<text x="4" y="{i * lane + 15}">{name}</text>')
    for s in spans:
        if s.end <= start or s.start >= end:
            continue
        x = left + (max(s.start, start) - start) * scale
        w = max((min(s.end, end) - max(s.start, start)) * scale, 0.5)
        colour = "#c0504d" if not s.left else "#4f81bd" if s.left == s.rows else "#8c8cb4"
        out.append(
            f'<rect x="{x:.1f}" y="{s.stage * lane + 2}" width="{w:.1f}" height="{lane - 4}" fill="{colour}">'
            f"<title>run {s.run}: {s.rows} rows, {s.left} left</title></rect>"
        )
    out.append(f'<text x="{left}" y="{lane * len(names) + 16}">{start:.3f} s to {end:.3f} s</text></svg>')
    return "\n".join(out)


def timeline_html(reports: Sequence[tuple[Report, Sequence[str]]], start: float, end: float) -> str:
    """Several timelines on one page, each with its summary."""
    parts = [
        f"<h3>{r.strategy}</h3><p>{r.lines()}</p>{timeline_svg(r.spans, names, start, end)}" for r, names in reports
    ]
    return "<!doctype html><meta charset=utf-8><title>Timeline</title>" + "\n".join(parts)
