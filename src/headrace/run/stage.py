"""A stage: consecutive layers on one node. It applies, computes and forwards; it decides nothing.

A state machine without I/O. The only order there is: for each layer, for each run of the block, one ``Step``.
A block of one run is a pipeline's way to work, a block of many the streaming way; nothing here asks which.
The driver carries each ``Step`` (a layer of a run) and says so by giving it back as an event.

A stage whose weights stream takes the blocks that wait for it together, up to ``together`` rows: so many cost no more
than the reading that they share, as in FlexGen's column order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from headrace.errors import BadMessage
from headrace.kernels.device import F32, I32, Rows
from headrace.memory.slots import Table, Tables
from headrace.run.types import (
    Append,
    CacheOp,
    Cancel,
    Choice,
    Fork,
    Free,
    Params,
    Passed,
    Result,
    Row,
    RunMessage,
    Sampling,
    StageEffect,
    StageEvent,
    Step,
)

_NONE: I32 = np.empty(0, np.int32)

Watch: TypeAlias = "Callable[[Stage, StageEvent, list[StageEffect], float], None]"


@dataclass
class Run:
    """A run on this stage, everything it reads fixed when its message was unpacked and not changed after.

    live: indices (in the message's rows) of the rows still computed; rows and x belong to these, in order.
    tables: of its sequences; append-only, so ``lengths`` (committed slots each of the message's rows sees)
    fixes what is read of them.
    """

    message: RunMessage
    live: list[int]
    tables: dict[int, Table]
    lengths: list[int]
    history: dict[int, tuple[Sampling, I32]]
    x: F32 | None
    choices: tuple[Choice, ...] = ()
    _rows: Rows | None = None

    @property
    def id(self) -> int:
        return self.message.run

    def base(self, i: int) -> I32:
        """The committed slots that row i of the message sees, a view of its sequence's table."""
        return self.tables[self.message.rows[i].seq].slots[: self.lengths[i]]

    @property
    def rows(self) -> Rows:
        """The live rows with their slot lists, as a device wants them."""
        if self._rows is None:
            self._rows = resolve(self.message.rows, self.live, [self.base(i) for i in self.live])
        return self._rows

    def keep(self, live: list[int]) -> None:
        """Take the other rows out."""
        if self.x is not None:
            at = {i: r for r, i in enumerate(self.live)}
            self.x = np.ascontiguousarray(self.x[[at[i] for i in live]])
        self.live, self._rows = live, None


@dataclass
class Stage:
    """Layers [first, end) of a model of ``total`` layers."""

    first: int
    end: int
    total: int
    epoch: int = 0
    together: int = 0
    tables: Tables = field(default_factory=Tables)
    params: dict[int, Sampling] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)
    block: list[int] = field(default_factory=list)
    gathering: list[int] = field(default_factory=list)
    blocks: deque[list[int]] = field(default_factory=deque)
    cancelled: dict[int, set[int]] = field(default_factory=dict)
    newest: int = -1
    """The run that arrived last; run numbers only rise."""
    watch: Watch | None = None
    """Sees every event with its effects, and changes nothing."""
    _at: int = 0
    _layer: int = 0

    def on_event(self, event: StageEvent, now: float) -> list[StageEffect]:
        """One thing happened; returns what must be carried out, in order. At most one Step is out at a time."""
        effects: list[StageEffect] = []
        if isinstance(event, Step) and len(self.block) == 1 and event.layer + 1 < self.end and not self.cancelled:
            self._layer = event.layer + 1
            effects.append(Step(self._layer, event.run, self.end - 1))  # what follows most often, as by ``_hear``
        else:
            self._hear(event, effects)
        if self.watch is not None:
            self.watch(self, event, effects, now)
        return effects

    def _hear(self, event: StageEvent, effects: list[StageEffect]) -> None:
        if isinstance(event, Cancel):
            self._cancel(event)
            return
        if isinstance(event, RunMessage):
            self._arrive(event)
            if self.block or not self.blocks:
                return
            self._begin()
        else:
            self._stepped(event, effects)
        self._next(effects)

    # --- arriving ---------------------------------------------------------------------------------------

    def _arrive(self, message: RunMessage) -> None:
        if message.epoch != self.epoch:
            raise BadMessage(f"run {message.run} is of epoch {message.epoch}, this stage is in {self.epoch}")
        if message.run <= self.newest:
            raise BadMessage(f"run {message.run} arrived after run {self.newest}")
        self.newest = message.run
        for op in message.ops:
            self._apply(op)
        self.runs[message.run] = self._unpack(message)
        self.gathering.append(message.run)
        if not message.more:
            self.blocks.append(self.gathering)
            self.gathering = []

    def _apply(self, op: CacheOp) -> None:
        if isinstance(op, Append):
            self.tables.append(op.seq, op.slots, op.tokens)
        elif isinstance(op, Params):
            self.params[op.seq] = op.sampling
            self.tables.open(op.seq)
        elif isinstance(op, Fork):
            self.tables.fork(op.seq, op.source, op.length)
        elif isinstance(op, Free):
            self.tables.free(op.seq)
            self.params.pop(op.seq, None)

    def _unpack(self, message: RunMessage) -> Run:
        """Fix every row's slot list now: later cache operations must not change what this run reads."""
        live = list(range(len(message.rows))) if message.live is None else message.live.tolist()
        if message.x is not None and message.x.shape[0] != len(live):
            raise BadMessage(f"run {message.run}: {message.x.shape[0]} activations for {len(live)} rows")
        tables: dict[int, Table] = {}
        lengths: list[int] = []
        for row in message.rows:
            self.tables.note(row.slot, row.token)
            lengths.append(row.position - len(row.ancestors) if row.guess else row.position + 1)
        for i in live:
            seq = message.rows[i].seq
            if seq not in tables:
                tables[seq] = self.tables[seq]
            table = tables[seq]
            if not 0 <= lengths[i] <= table.length:
                raise BadMessage(f"a row of sequence {seq} sees {lengths[i]} slots, {table.length} are committed")
        history = self._history(message, live) if self.end == self.total else {}
        return Run(message, live, tables, lengths, history, message.x)

    def _history(self, message: RunMessage, live: list[int]) -> dict[int, tuple[Sampling, I32]]:
        """Sampling parameters of the rows that want a token, with the ids their penalties look back at."""
        history: dict[int, tuple[Sampling, I32]] = {}
        for i in live:
            row = message.rows[i]
            if not row.wanted:
                continue
            sampling = self.params.get(row.seq)
            if sampling is None:
                raise BadMessage(f"sequence {row.seq} has no sampling parameters here")
            ids = _NONE
            if sampling.looks_back:
                own = [*row.ancestors, row.slot] if row.guess else []
                length = row.position + 1 - len(own)
                ids = np.concatenate([self.tables[row.seq].tokens[:length], self.tables.noted(own)])
                if sampling.repeat_last_n > 0:
                    ids = ids[-sampling.repeat_last_n :]
            history[i] = (sampling, ids)
        return history

    def _cancel(self, event: Cancel) -> None:
        if event.epoch == self.epoch and (event.run > self.newest or event.run in self.runs):
            self.cancelled.setdefault(event.run, set()).update(event.rows)

    # --- stepping ---------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.block = self.blocks.popleft()
        rows = self._rows(self.block)
        while self.together and self.blocks and (rows := rows + self._rows(self.blocks[0])) <= self.together:
            self.block += self.blocks.popleft()
        self._at, self._layer = 0, self.first

    def _rows(self, block: list[int]) -> int:
        return sum(len(self.runs[run].live) for run in block)

    def _stepped(self, step: Step, effects: list[StageEffect]) -> None:
        self._layer = step.layer
        if step.layer == self.end - 1:
            self._leave(self.runs[step.run], effects)
        self._at += 1

    def _next(self, effects: list[StageEffect]) -> None:
        """Order the next step; runs without rows pass by, as tombstones, at the end of the layers."""
        while self.block:
            while self._at < len(self.block):
                run = self.runs[self.block[self._at]]
                self._compact(run)
                if run.live:
                    effects.append(Step(self._layer, run.id, self.end - 1 if len(self.block) == 1 else -1))
                    return
                if self._layer == self.end - 1:
                    self._leave(run, effects)
                self._at += 1
            self._at = 0
            self._layer += 1
            if self._layer == self.end:
                self.block = []
                if self.blocks:
                    self._begin()

    def _compact(self, run: Run) -> None:
        """Take cancelled rows out, between layers."""
        gone = self.cancelled.pop(run.id, None)
        if gone and not gone.isdisjoint(run.live):
            run.keep([i for i in run.live if i not in gone])

    def _leave(self, run: Run, effects: list[StageEffect]) -> None:
        del self.runs[run.id]
        self.cancelled.pop(run.id, None)
        message = run.message
        if self.end == self.total:
            effects.append(Result(message.epoch, message.run, run.choices))
            return
        live = None if len(run.live) == len(message.rows) else np.asarray(run.live, np.int32)
        x = run.x if run.live else None
        effects.append(RunMessage(message.epoch, message.run, message.more, message.ops, message.rows, live, x))
        if self.first == 0:
            effects.append(Passed(run.id))

    def check_integrity(self) -> list[str]:
        """What is wrong when no run should be here, as sentences; empty when all is well."""
        left = {"runs": self.runs or self.block or self.blocks or self.gathering, "cancels": self.cancelled}
        where = f"stage of layers {self.first} to {self.end - 1}"
        return [f"{where}: {what} are left: {which}" for what, which in left.items() if which]


class Computer(Protocol):
    """What carries a Step: a device with its weights and cache, or a simulated model."""

    def step(self, layer: int, run: Run) -> None:
        """Compute one layer of a run's live rows: reads and replaces run.x, or, after the last, sets run.choices."""
        ...

    def steps(self, layer: int, through: int, run: Run) -> int:
        """Compute this layer and those after it up to ``through`` that take next to no time; returns the last one."""
        self.step(layer, run)
        return layer


def resolve(rows: tuple[Row, ...], live: list[int], bases: list[I32]) -> Rows:
    """The device's view of a run's live rows. Rows of one sequence share its longest committed list."""
    longest: dict[int, I32] = {}
    for i, base in zip(live, bases, strict=True):
        seq = rows[i].seq
        if seq not in longest or base.shape[0] > longest[seq].shape[0]:
            longest[seq] = base
    at: dict[int, int] = {}
    parts: list[I32] = []
    end = 0
    for seq, slots in longest.items():
        at[seq] = end
        parts.append(slots)
        end += slots.shape[0]
    extras: list[int] = []
    n = len(live)
    table = np.zeros((7, n), np.int32)
    for r, i in enumerate(live):
        row = rows[i]
        extra = (*row.ancestors, row.slot) if row.guess else ()
        start = end + len(extras)
        extras.extend(extra)
        table[:, r] = (row.token, row.position, row.slot, at[row.seq], bases[r].shape[0], start, len(extra))
    if extras:
        parts.append(np.asarray(extras, np.int32))
    lists = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int32)
    wanted = np.asarray([r for r, i in enumerate(live) if rows[i].wanted], np.int32)
    token, position, slot, base, base_len, extra_at, extra_len = table
    return Rows(token, position, slot, base, base_len, extra_at, extra_len, lists, wanted)
