"""A batch job: an OpenAI batch file in, its result lines out; killed at any moment, it goes on where it was.

Every finished row is on the disk before it counts. The output file is written whole at the end, in the input's
order; until then the rows are in ``<output>.state``. A row's text depends on the row, the model and the job's seed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.engine import Engine, Job
from headrace.errors import BadFile, BadRequest, HeadraceError, Unavailable
from headrace.formats.files import atomic
from headrace.jobs.answer import REASONS, answered, failed, row_id
from headrace.jobs.asked import Asked, custom_id_of, parse_line, understand
from headrace.jobs.rows import MAX_LINE, RowFile
from headrace.jobs.state import PATIENCE, Outcome, State, discard
from headrace.text.template import ChatTemplate

TOGETHER = 256
"""Bad rows that are kept in one go; a good one never waits for another."""


@dataclass(frozen=True)
class Report:
    """How far a job is. tokens and seconds: of this process; streamed_bytes: of weights and cache read from disk by it,
    crossed_bytes: between host and device."""

    rows: int
    total: int
    failed: int
    tokens: int
    seconds: float
    streamed_bytes: int
    disk_bound: float | None
    """Share of the time spent waiting for disk or link; None when nothing streams."""
    resumed: int
    crossed_bytes: int = 0
    under_way: float = 0.0
    """What of unfinished rows is there, in rows: tokens of those they may have."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta(self) -> float | None:
        """Seconds left if rows go on as they did; None before there is a token."""
        done = self.rows - self.resumed + self.under_way
        return self.seconds / done * (self.total - self.resumed - done) if done else None


@dataclass(frozen=True)
class _Row:
    """A row being computed: one request for each of its choices."""

    line: int
    asked: Asked
    jobs: tuple[Job, ...]


@dataclass(eq=False)
class Batch:
    """One job; ``run()`` does it. From a signal handler, ``interrupt()`` stops it within a layer.

    source, target: input and output files. seed: the job's, from which each row's own is derived. names: of models that
    rows may ask for; None: any (people's files name the one they were written for). restart: throw away what an earlier
    run of this output left. tell: hears how it goes, often.
    """

    engine: Engine
    source: Path
    target: Path
    seed: int = 0
    names: tuple[str, ...] | None = None
    restart: bool = False
    tell: Callable[[Report], None] | None = None
    patience: float = PATIENCE
    """Seconds to wait for another process that has the state."""
    _key: str = field(default="", init=False)
    _template: ChatTemplate | None = field(default=None, init=False)
    _open: list[_Row] = field(default_factory=list, init=False)
    _outcomes: list[Outcome] = field(default_factory=list, init=False)
    _tokens: int = field(default=0, init=False)
    _created: int = field(default=0, init=False)
    _stop: bool = field(default=False, init=False)

    def interrupt(self) -> None:
        """Stop: ``run`` gives back what is under way and raises KeyboardInterrupt."""
        self._stop = True
        self.engine.interrupt()

    def run(self) -> Report:
        """Compute every row that isn't done, then write the output. A HeadraceError says why the whole job can't go on.

        When the output of this very job is there already, nothing is done.
        """
        path = self._state_path()
        rows = RowFile.open(self.source)
        facts = self._facts(rows)
        self._key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        if self.target.exists() and not self.restart:
            return self._done_before(rows.total)
        with suppress(HeadraceError):  # without a template only rows of messages fail
            self._template = ChatTemplate(self.engine.tokenizer)
        with State(path, self.restart, self.patience) as state:
            if self.restart:
                self.target.unlink(missing_ok=True)
            # The input's time, so that the output is the same however often and wherever the job was started.
            self._created = int(state.claim(facts, {"created": str(rows.changed // 10**9)})["created"])
            started, resumed = time.perf_counter(), state.progress().rows
            try:
                self._compute(rows, state, lambda: self._report(state, rows.total, started, resumed))
            finally:
                for row in self._open:
                    for job in row.jobs:
                        self.engine.cancel(job.request.id)
                        self.engine.forget(job)
                self._open.clear()
            self._write(state)
            state.remove()
            return self._report(state, rows.total, started, resumed)

    # --- files ------------------------------------------------------------------------------------------

    def _state_path(self) -> Path:
        """Where the state is kept; BadFile or BadRequest when the output can't be what it is said to be."""
        if not self.target.parent.is_dir():
            raise BadFile(f"{self.target.parent}: there is no such folder for the output; make it first.")
        if self.target.is_dir():
            raise BadFile(f"{self.target}: is a folder; name a file for the output.")
        path = self.target.with_name(self.target.name + ".state")
        if self.source.exists() and any(p.exists() and p.samefile(self.source) for p in (self.target, path)):
            raise BadRequest(f"{self.target}: is the input itself; choose another output file.")
        return path

    def _facts(self, rows: RowFile) -> dict[str, str]:
        """What the results depend on; a job is resumed only when all of it is the same."""
        parts = self.engine.parts
        return {
            "input": rows.digest, "model": parts.model.file.digest(), "seed": str(self.seed),
            "context": str(parts.context), "KV bits": f"{parts.kv_bits[0]}/{parts.kv_bits[1]}",
            "model names": "any" if self.names is None else "checked",
        }  # fmt: skip

    def _done_before(self, total: int) -> Report:
        """The report of a job whose output is there; BadRequest when that is another job's, or no output at all."""
        found = []
        try:
            with self.target.open("rb") as f:
                for line in f:
                    row = json.loads(line)
                    found.append(row["error"] is not None)
                    if row["id"] != row_id(self._key, len(found)):
                        raise ValueError
            if len(found) != total:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            raise BadRequest(
                f"{self.target} is there already, and isn't this job's output; choose another output file, or "
                "--restart to replace it."
            ) from None
        discard(self._state_path())
        return Report(total, total, sum(found), 0, 0.0, 0, None, total)

    def _write(self, state: State) -> None:
        try:
            with atomic(self.target) as out:
                for result in state.results():
                    out.write(result.encode() + b"\n")
        except OSError as e:
            raise Unavailable(
                f"{self.target}: the output can't be written ({e.strerror or e}); make room, then give the same "
                f"command again: every row is kept in {state.path.name}."
            ) from None

    # --- rows -------------------------------------------------------------------------------------------

    def _rows(self, rows: RowFile, done: set[int]) -> Iterator[tuple[int, Asked | None]]:
        """Lines not done yet, checked; a bad one becomes an error row at once (None)."""
        seen: set[bytes] = set()
        for line, data in rows.rows():
            custom_id = None
            try:
                if data is None:
                    raise BadRequest(f"The line has over {MAX_LINE >> 20} MiB; shorten the row.")
                row = parse_line(data)
                custom_id = custom_id_of(row)
                mark = hashlib.sha256(custom_id.encode()).digest()[:16]
                if mark in seen:
                    raise BadRequest("custom_id stands in an earlier row too; give each row its own.")
                seen.add(mark)
                if line in done:
                    continue
                asked = understand(row, self.seed)
                if self.names is not None and asked.model not in (None, *self.names):
                    what = f"name {self.names[0]!r}, or use --any-model"
                    raise BadRequest(f"model is another than the one loaded; {what}.")
            except BadRequest as error:
                if line not in done:
                    self._fail(line, custom_id, error)
                    yield line, None
                continue
            yield line, asked

    def _prompt(self, asked: Asked) -> tuple[int, ...]:
        """A row's prompt as ids. A HeadraceError says why it can't be one."""
        wrong = [i for i, _ in asked.sampling.bias if i >= self.engine.spec.vocab]
        if wrong:
            raise BadRequest(f"logit_bias names token {wrong[0]}; the vocabulary has {self.engine.spec.vocab}.")
        if asked.prompt is not None:
            return self.engine.encode(asked.prompt)
        if self._template is None:
            raise BadRequest("This model has no chat template; use /v1/completions.")
        assert asked.messages is not None
        return self.engine.encode(self._template.encode(asked.messages))

    # --- computing --------------------------------------------------------------------------------------

    def _compute(self, source: RowFile, state: State, report: Callable[[], Report]) -> None:
        """Keep so many rows under way that the engine can always fill its runs."""
        most = 2 * self.engine.head.order.sequences
        rows = self._rows(source, state.lines())
        more = True
        while (more or self._open) and not self._stop:
            while more and len(self._outcomes) < TOGETHER and sum(len(row.jobs) for row in self._open) < most:
                line, asked = next(rows, (0, None))
                more = line > 0
                if asked is not None:
                    self._start(line, asked)
            if self._open:
                self.engine.work()
                self._collect()
            if self._outcomes:
                state.finish(self._outcomes)
                self._outcomes.clear()
            if self.tell is not None:
                self.tell(report())
        if self._stop:
            raise KeyboardInterrupt

    def _start(self, line: int, asked: Asked) -> None:
        try:
            prompt = self._prompt(asked)
        except HeadraceError as error:  # a template can fail on one row in any way
            self._fail(line, asked.custom_id, error)
            return
        each = [replace(asked.sampling, choice=i) for i in range(asked.choices)]
        submit = self.engine.submit
        jobs = tuple(submit(prompt, asked.max_tokens, one, asked.stop, asked.ignore_eos) for one in each)
        self._open.append(_Row(line, asked, jobs))

    def _collect(self) -> None:
        """Take out the rows that are over."""
        over = [row for row in self._open if all(job.finish for job in row.jobs)]
        for row in over:
            self._open.remove(row)
            bad = [job.finish for job in row.jobs if job.finish not in REASONS]
            if "cancelled" in bad:  # by a signal: the row isn't done, the next run of the job does it
                self._stop = True
            elif bad:
                self._fail(row.line, row.asked.custom_id, BadRequest(_WHY.get(bad[0], bad[0])), "not_computed")
            else:
                result = answered(
                    self._key, row.line, row.asked, row.jobs, self.engine.tokenizer, self.engine.parts.name,
                    self._created,
                )  # fmt: skip
                self._outcomes.append(Outcome(row.line, row.asked.custom_id, True, result))
            for job in row.jobs:
                self._tokens += len(job.tokens)
                self.engine.forget(job)

    def _fail(self, line: int, custom_id: str | None, error: HeadraceError, code: str = "invalid_request") -> None:
        self._outcomes.append(Outcome(line, custom_id, False, failed(self._key, line, custom_id, code, str(error))))

    def _report(self, state: State, total: int, started: float, resumed: int) -> Report:
        progress = state.progress()
        seconds = time.perf_counter() - started
        each = [[(len(job.tokens), job.request.max_tokens) for job in row.jobs] for row in self._open]
        tokens = self._tokens + sum(n for row in each for n, _ in row)
        under_way = sum(sum(n for n, _ in row) / sum(most for _, most in row) for row in each)
        moved = self.engine.parts.computer.traffic()  # of one process; under MPI the others' disks are theirs
        bound = moved.waited / seconds if moved.streams and seconds > 0 else None
        done = progress.rows, total, progress.failed, tokens, seconds
        return Report(*done, moved.read, bound, resumed, moved.crossed, under_way)


_WHY = {
    "error": "The model's logits were not finite for this row; its weights or the prompt overflow.",
    "too long": "The cache can't hold this row; give a longer context (-c) or fewer tokens (max_tokens).",
}
