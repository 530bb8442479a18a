"""What a rank has seen, as messages to the head and back: whole numbers, times in microseconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from headrace.cluster.handshake import Seen
from headrace.errors import BadMessage
from headrace.run.trace import MOST, Recorder, Span, Visit

PART = 300
"""Spans, and visits, in a message: under 64 KiB as JSON."""


def told(seen: Recorder, sent: Mapping[tuple[int, str], int]) -> Iterator[Seen]:
    """What to tell the head now. sent: (address, "bytes") as the link counts them."""
    assert seen.clock is not None
    spans, visits = seen.drain()
    busy = _flat((stage, _micro(time)) for stage, time in seen.busy.items())
    hops = _flat((to, count) for (to, what), count in sent.items() if what == "bytes" and to > 0)
    parts = max(1, -(-max(len(spans), len(visits)) // PART))
    for i in range(parts):
        part = slice(i * PART, (i + 1) * PART)
        flat = [_flat((s.stage, s.run, _micro(s.start), _micro(s.end), *s[4:]) for s in spans[part])]
        flat.append(_flat((v.stage, v.run, _micro(v.arrived), _micro(v.left), *v[4:]) for v in visits[part]))
        yield Seen(_micro(seen.clock()), busy, hops, flat[0], flat[1], parts - 1 - i)


def heard(seen: Recorder, source: int, part: Seen, ahead: float) -> None:
    """Add a part of a rank's. ahead: seconds by which that rank's clock is ahead of the one here. Raises BadMessage."""
    for stage, micros in _rows(part.busy, 2):
        seen.busy[stage] = micros / 1e6
    for to, count in _rows(part.hops, 2):
        seen.hops[source, to] = count
    for stage, run, start, end, *rest in _rows(part.spans, len(Span._fields)):
        if len(seen.spans) < MOST:
            seen.spans.append(Span(stage, run, start / 1e6 - ahead, end / 1e6 - ahead, *rest))
    for stage, run, arrived, left, *rest in _rows(part.visits, len(Visit._fields)):
        if len(seen.visits) < MOST:
            seen.visits.append(Visit(stage, run, arrived / 1e6 - ahead, left / 1e6 - ahead, *rest))


def _micro(seconds: float) -> int:
    return round(seconds * 1e6)


def _flat(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(number for row in rows for number in row)


def _rows(flat: tuple[int, ...], width: int) -> Iterator[tuple[int, ...]]:
    if len(flat) % width:
        raise BadMessage(f"a Seen message has {len(flat)} numbers where rows of {width} are expected")
    return (flat[i : i + width] for i in range(0, len(flat), width))
