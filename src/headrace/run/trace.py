"""What happened, seen from outside: an observer of the one loop, its sums, and a file for Chrome and Perfetto.

Stages say what comes and goes (``Stage.watch``), computers what they compute (``Timed``; in virtual time the stage's
Steps say it), the head's policy what became of each run. The same for real and simulated runs.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from headrace.run.policy import GuessPolicy
from headrace.run.stage import Computer, Run, Stage
from headrace.run.tree import Node
from headrace.run.types import Result, Row, RunMessage, StageEffect, StageEvent, Step

MOST = 100_000
"""Spans, and visits, that are kept (some 50 MB); what comes later is only summed."""
GAP = 2e-4
"""Seconds between two layers of a run, or two runs under way, that don't count."""


class Span(NamedTuple):
    """A run computed on a stage, its layers ``first`` to ``last``. rows: when it began."""

    stage: int
    run: int
    start: float
    end: float
    rows: int
    first: int
    last: int


class Visit(NamedTuple):
    """A run's time at a stage, from its message's coming to its going on. rows, alive: not cancelled, then and then."""

    stage: int
    run: int
    arrived: float
    left: float
    rows: int
    alive: int


@dataclass
class Fate:
    """What the head knows of a run: rows of known tokens and guesses, how many of these were right, its times."""

    launched: float
    known: int
    guesses: int
    right: int = 0
    returned: float | None = None


class Recorder:
    """Sees a process's stages and perhaps its head. keep False: only ``busy`` (seconds computed by stage) is kept.

    clock: of real time; None: events bring their own. Times are seconds by that clock.
    """

    def __init__(self, keep: bool = True, clock: Callable[[], float] | None = None) -> None:
        self.keep, self.clock = keep, clock
        self.busy: defaultdict[int, float] = defaultdict(float)
        self.spans: list[Span] = []
        self.visits: list[Visit] = []
        self.fates: dict[int, Fate] = {}
        self.hops: dict[tuple[int, int], int] = {}
        """Bytes sent (by rank, to stage), runs and cancels, where a wire counts them."""
        self._here: dict[tuple[int, int], tuple[float, int]] = {}
        self._rows: dict[tuple[int, int], int] = {}
        self._latest: dict[int, int] = {}
        self._step: dict[int, tuple[int, int, float, int]] = {}

    def time(self, now: float) -> float:
        """By the clock, if there is one; else as the event says."""
        return now if self.clock is None else self.clock()

    def anew(self) -> Recorder:
        """For stages and a head that begin again."""
        return Recorder(self.keep, self.clock)

    def drain(self) -> tuple[list[Span], list[Visit]]:
        """What was seen of stages since the last time."""
        found = self.spans, self.visits
        self.spans, self.visits = [], []
        self._latest.clear()
        return found

    # --- what it looks at -------------------------------------------------------------------------------

    def stage(self, stage: Stage, number: int, steps: bool = False) -> Stage:
        """Look at a stage from now on. steps: its Steps tell what is computed; otherwise its computer does."""
        if self.keep or steps:
            stage.watch = partial(self._event, number, steps)
        return stage

    def computer(self, computer: Computer, number: int) -> Computer:
        assert self.clock is not None
        return Timed(computer, number, self, self.clock)

    def policy(self, policy: GuessPolicy) -> GuessPolicy:
        return cast(GuessPolicy, Watched(policy, self)) if self.keep else policy

    # --- what it sees -----------------------------------------------------------------------------------

    def _event(
        self, number: int, steps: bool, stage: Stage, event: StageEvent, effects: Sequence[StageEffect], now: float
    ) -> None:
        time = self.time(now)
        if isinstance(event, RunMessage):
            self._here[number, event.run] = time, alive(event)
        elif steps and isinstance(event, Step):
            layer, run, start, rows = self._step.pop(number)
            self.computed(number, run, layer, layer, start, time, rows)
        for effect in effects:
            if isinstance(effect, RunMessage | Result):
                self._leave(number, effect, time)
            elif steps and isinstance(effect, Step):
                self._step[number] = effect.layer, effect.run, time, len(stage.runs[effect.run].live)

    def _leave(self, number: int, effect: RunMessage | Result, time: float) -> None:
        arrived, rows = self._here.pop((number, effect.run), (time, 0))
        computed = self._rows.pop((number, effect.run), 0)
        left = alive(effect) if isinstance(effect, RunMessage) else computed
        if self.keep and len(self.visits) < MOST:
            self.visits.append(Visit(number, effect.run, arrived, time, rows, left))

    def computed(self, number: int, run: int, first: int, through: int, start: float, end: float, rows: int) -> None:
        """Some layers of a run; those that follow each other become one span."""
        self.busy[number] += end - start
        if not self.keep:
            return
        self._rows[number, run] = rows
        at = self._latest.get(number)
        if at is not None:
            last = self.spans[at]
            alone = self.clock is not None and at == len(self.spans) - 1  # this process computed nothing else since
            if last.run == run and last.last == first - 1 and (alone or start - last.end < GAP):
                self.spans[at] = last._replace(end=end, last=through)
                return
        if len(self.spans) < MOST:
            self._latest[number] = len(self.spans)
            self.spans.append(Span(number, run, start, end, rows, first, through))

    # --- what came of it --------------------------------------------------------------------------------

    def useful(self, run: int, rows: int) -> int:
        """Of so many rows of a target's run, those the text went through."""
        fate = self.fates.get(run)
        return rows if fate is None else min(rows, fate.known + fate.right)

    def wasted(self, targets: int) -> float:
        """Share of the target stages' row-seconds that went into guesses that were wrong."""
        all_rows = lost = 0.0
        for span in self.spans:
            if span.stage < targets:
                took = span.end - span.start
                all_rows += took * span.rows
                lost += took * (span.rows - self.useful(span.run, span.rows))
        return lost / all_rows if all_rows else 0.0

    def active(self) -> list[tuple[float, float]]:
        """When some run was under way, as intervals; all the time from first to last span when no head was seen."""
        times = [(f.launched, f.launched if f.returned is None else f.returned) for f in self.fates.values()]
        if not times and self.spans:
            times = [(min(s.start for s in self.spans), max(s.end for s in self.spans))]
        merged: list[tuple[float, float]] = []
        for start, end in sorted(times):
            if merged and start - merged[-1][1] < GAP:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return merged


def alive(message: RunMessage) -> int:
    """Rows that aren't cancelled."""
    return len(message.rows) if message.live is None else len(message.live)


@dataclass
class Timed(Computer):
    """A computer whose steps are seen."""

    inner: Computer
    number: int
    recorder: Recorder
    clock: Callable[[], float]

    def step(self, layer: int, run: Run) -> None:
        start = self.clock()
        self.inner.step(layer, run)
        self.recorder.computed(self.number, run.id, layer, layer, start, self.clock(), len(run.live))

    def steps(self, layer: int, through: int, run: Run) -> int:
        start = self.clock()
        done = self.inner.steps(layer, through, run)
        self.recorder.computed(self.number, run.id, layer, done, start, self.clock(), len(run.live))
        return done


class Watched:
    """A policy as the head asks it; what the head tells it is noted. Everything is the inner policy's doing."""

    def __init__(self, inner: GuessPolicy, recorder: Recorder) -> None:
        self.inner, self.recorder = inner, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launched(self, run: int, rows: Sequence[tuple[Row, Node | None]], now: float) -> None:
        if len(self.recorder.fates) < MOST:
            guesses = sum(row.guess for row, _ in rows)
            self.recorder.fates[run] = Fate(self.recorder.time(now), len(rows) - guesses, guesses)
        self.inner.launched(run, rows, now)

    def returned(self, run: int, rows: int, now: float) -> None:
        if fate := self.recorder.fates.get(run):
            fate.returned = self.recorder.time(now)
        self.inner.returned(run, rows, now)

    def judged(self, seq: int, tip: Node, chosen: Node | None, now: float) -> None:
        if chosen is not None and (fate := self.recorder.fates.get(chosen.run)):
            fate.right += 1
        self.inner.judged(seq, tip, chosen, now)


# --- the file ---------------------------------------------------------------------------------------------

Event = dict[str, Any]


def chrome_trace(seen: Recorder, names: Sequence[str], targets: int) -> str:
    """JSON for Perfetto (ui.perfetto.dev) or chrome://tracing, the "JSON Object Format" of its Trace Event Format.

    A process a stage (``names``, the target's ``targets`` first), and one for the head. On a stage: "compute" by run,
    "wasted" when none of its rows became text, "partly wasted" when some didn't; "bubble" where a target stage had
    nothing to do while runs were under way; "wait" from a run's coming to its first layer; "network" from its leaving
    the stage before.
    """
    visits = {(v.stage, v.run): v for v in seen.visits}
    launched, arrived = [f.launched for f in seen.fates.values()], [v.arrived for v in seen.visits]
    zero = min([*launched, *arrived, *(s.start for s in seen.spans)], default=0.0)
    events = [_named(0, "head"), *(_named(i + 1, name) for i, name in enumerate(names))]
    for run, fate in seen.fates.items():
        if fate.returned is not None:
            args = {"known": fate.known, "guesses": fate.guesses, "right": fate.right}
            events += _pair(0, f"run {run}", "run", f"run {run}", fate.launched - zero, fate.returned - zero, args)
    events += (_compute(seen, span, visits.get((span.stage, span.run)), zero, targets) for span in seen.spans)
    for at, start, end in bubbles(seen, targets):
        events.append(_bar(at, "bubble", "bubble", start - zero, end - start, {}))
    events += _waits(seen, visits, zero, targets)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def bubbles(seen: Recorder, targets: int) -> Iterator[tuple[int, float, float]]:
    """(stage, start, end) where a target stage computed nothing while runs were under way."""
    active = seen.active()
    by_stage: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(seen.spans, key=lambda s: s.start):
        by_stage[span.stage].append(span)
    for at in range(targets):
        spans = deque(by_stage[at])
        for start, end in active:
            while spans and spans[0].start < end:
                span = spans.popleft()
                if span.start > start:
                    yield at, start, span.start
                start = max(start, span.end)
            if start < end:
                yield at, start, end


def _compute(seen: Recorder, span: Span, visit: Visit | None, zero: float, targets: int) -> Event:
    left = span.rows if visit is None else visit.alive
    args = {"rows": span.rows, "left": left, "layers": f"{span.first} to {span.last}"}
    useful = left
    if span.stage < targets:
        args["useful"] = useful = seen.useful(span.run, span.rows)
    kind = "wasted" if not useful else "partly wasted" if useful < span.rows else "compute"
    return _bar(span.stage, f"run {span.run}", kind, span.start - zero, span.end - span.start, args)


def _waits(seen: Recorder, visits: dict[tuple[int, int], Visit], zero: float, targets: int) -> Iterator[Event]:
    """Of each visit: on the way to the stage, then in its queue; and the answer's way back to the head."""
    began: dict[tuple[int, int], float] = {}
    for span in seen.spans:
        began.setdefault((span.stage, span.run), span.start)
    for (at, run), v in visits.items():
        before = visits.get((at - 1, run)) if at != targets else None
        fate = seen.fates.get(run) if at < targets else None
        key, start = f"{at}.{run}", began.get((at, run), v.left)
        if before is not None and v.arrived > before.left:
            way = before.left - zero, v.arrived - zero
            yield from _pair(at + 1, "network", "network", f"in {key}", *way, {"run": run})
        came = fate.launched if fate is not None and at == 0 else v.arrived  # head and stage 0 are one process
        if start > came:
            yield from _pair(at + 1, "wait", "wait", f"wait {key}", came - zero, start - zero, {"run": run})
        if at == targets - 1 and at and fate is not None and fate.returned is not None and fate.returned > v.left:
            yield from _pair(0, "network", "network", f"out {run}", v.left - zero, fate.returned - zero, {"run": run})


def _named(process: int, name: str) -> Event:
    return {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}


def _bar(stage: int, name: str, kind: str, start: float, took: float, args: Event) -> Event:
    times = {"ts": 1e6 * start, "dur": 1e6 * max(took, 0.0)}
    return {"name": name, "cat": kind, "ph": "X", **times, "pid": stage + 1, "tid": 0, "args": args}


def _pair(process: int, name: str, kind: str, key: str, start: float, end: float, args: Event) -> Iterator[Event]:
    """An asynchronous event: others of its kind may overlap it."""
    same = {"name": name, "cat": kind, "id": key, "pid": process, "tid": 0}
    yield {**same, "ph": "b", "ts": 1e6 * start, "args": args}
    yield {**same, "ph": "e", "ts": 1e6 * end}
