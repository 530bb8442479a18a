"""A batch job: an OpenAI batch file in, its result lines out; killed at any moment, it goes on where it was.

Every finished row is on the disk before it counts. The output file is written whole at the end, in the input's
order; until then the rows are in ``<output>.state``. A row's text depends on the row and the job's seed alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.engine import Engine, Job
from headrace.errors import BadFile, BadRequest, HeadraceError
from headrace.formats.files import atomic
from headrace.jobs.answer import answered, failed
from headrace.jobs.asked import Asked, custom_id_of, parse_line, understand
from headrace.jobs.state import State
from headrace.memory.stream import Streamed
from headrace.text.template import ChatTemplate


@dataclass(frozen=True)
class Report:
    """How far a job is. tokens and seconds: of this process; bytes: of weights read from disk by it."""

    rows: int
    total: int
    failed: int
    tokens: int
    seconds: float
    streamed_bytes: int
    disk_bound: float | None
    """Share of the time spent waiting for the disk; None when nothing streams."""
    resumed: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta(self) -> float | None:
        """Seconds left if rows go on as they did."""
        done = self.rows - self.resumed
        return self.seconds / done * (self.total - self.rows) if done else None


@dataclass
class _Row:
    """A row being computed."""

    line: int
    asked: Asked
    jobs: list[Job]


@dataclass
class Batch:
    """Run with ``run()``. source, target: input and output files; seed: the job's; names: model names rows may ask for.

    names None: a row may name any model (people's files name the one they were written for).
    """

    engine: Engine
    source: Path
    target: Path
    seed: int = 0
    names: tuple[str, ...] | None = None
    restart: bool = False
    tell: Callable[[Report], None] | None = None
    _open: list[_Row] = field(default_factory=list)
    _tokens: int = 0

    def run(self) -> Report:
        """Compute every row that isn't done, then write the output. Raises BadFile, BadRequest for the whole job."""
        key, total = self._scan()
        self._state = self._claimed(key)
        try:
            self._key, self._total = key, total
            self._created = int(self.source.stat().st_mtime)
            self._template = _template_of(self.engine)
            self._resumed = self._state.progress().rows
            self._started = time.perf_counter()
            try:
                self._compute()
            finally:
                for row in self._open:
                    for job in row.jobs:
                        self.engine.cancel(job.request.id)
            with atomic(self.target) as out:
                for result in self._state.results():
                    out.write(result.encode() + b"\n")
            return self.report()
        finally:
            self._state.close()
            if self._finished:
                _remove_state(self._state.path)

    @property
    def _finished(self) -> bool:
        return self.target.exists() and getattr(self, "_done", 0) == self._total

    def report(self) -> Report:
        progress = self._state.progress()
        self._done = progress.rows
        seconds = time.perf_counter() - self._started
        weights = self.engine.parts.weights
        streams = isinstance(weights, Streamed)
        return Report(
            progress.rows, self._total, progress.failed, self._tokens, seconds,
            weights.read_bytes if isinstance(weights, Streamed) else 0,
            weights.waited / seconds if streams and isinstance(weights, Streamed) and seconds > 0 else None,
            self._resumed,
        )  # fmt: skip

    # --- input and state --------------------------------------------------------------------------------

    def _scan(self) -> tuple[str, int]:
        """SHA-256 of the input and its number of rows."""
        digest, rows = hashlib.sha256(), 0
        try:
            with self.source.open("rb") as f:
                for line in f:
                    digest.update(line)
                    rows += bool(line.strip())
        except OSError as e:
            raise BadFile(f"{self.source}: the batch file can't be read ({e.strerror}); check the path.") from None
        if not rows:
            raise BadFile(f"{self.source}: the batch file has no rows; write one JSON object a line.")
        return digest.hexdigest(), rows

    def _claimed(self, key: str) -> State:
        path = self.target.with_name(self.target.name + ".state")
        if self.restart:
            _remove_state(path)
            self.target.unlink(missing_ok=True)
        if self.target.exists() and not path.exists():
            raise BadRequest(f"{self.target} is there already; choose another output file, or --restart to replace it.")
        if not self.target.parent.is_dir():
            raise BadFile(f"{self.target.parent}: there is no such folder for the output; make it first.")
        state = State(path)
        parts = self.engine.parts
        facts = {
            "input": key,
            "model": parts.model.file.digest(),
            "seed": str(self.seed),
            "context": str(parts.context),
            "KV bits": f"{parts.kv_bits[0]}/{parts.kv_bits[1]}",
        }
        try:
            state.claim(facts)
        except BaseException:
            state.close()
            raise
        return state

    def _rows(self) -> Iterator[tuple[int, Asked | None]]:
        """Lines not done yet, checked; a bad one is finished as an error row at once (None)."""
        done = self._state.lines()
        seen: set[bytes] = set()
        number = 0
        with self.source.open("rb") as f:
            for line in f:
                if not line.strip():
                    continue
                number += 1
                custom_id = None
                try:
                    row = parse_line(line)
                    custom_id = custom_id_of(row)
                    mark = hashlib.sha256(custom_id.encode()).digest()[:12]
                    if mark in seen:
                        raise BadRequest(f"custom_id {custom_id!r} stands in an earlier row too; each must be unique.")
                    seen.add(mark)
                    if number in done:
                        continue
                    asked = understand(row, self.seed)
                    if self.names is not None and asked.model not in (None, *self.names):
                        raise BadRequest(
                            f"model is {asked.model!r} but {self.names[0]!r} is loaded; name that one, or run the job "
                            "with --any-model."
                        )
                except BadRequest as error:
                    if number not in done:
                        self._fail(number, custom_id, error)
                        yield number, None
                    continue
                yield number, asked

    # --- computing --------------------------------------------------------------------------------------

    def _compute(self) -> None:
        """Keep so many rows under way that the engine can always fill its runs."""
        most = 2 * self.engine.head.order.sequences
        rows = self._rows()
        more = True
        while more or self._open:
            while more and sum(len(row.jobs) for row in self._open) < most:
                line, asked = next(rows, (0, None))
                if line == 0:
                    more = False
                elif asked is not None:
                    self._start(line, asked)
            if self._open:
                self._collect()
            if self.tell is not None:
                self.tell(self.report())

    def _start(self, line: int, asked: Asked) -> None:
        jobs: list[Job] = []
        try:
            prompt = self._prompt(asked)
            wrong = [i for i, _ in asked.sampling.bias if i >= self.engine.spec.vocab]
            if wrong:
                raise BadRequest(f"logit_bias names token {wrong[0]}; the vocabulary has {self.engine.spec.vocab}.")
            for choice in range(asked.choices):
                sampling = replace(asked.sampling, choice=choice)
                jobs.append(self.engine.submit(prompt, asked.max_tokens, sampling, asked.stop, asked.ignore_eos))
            self._open.append(_Row(line, asked, jobs))
        except BadRequest as error:
            for job in jobs:
                self.engine.cancel(job.request.id)
            self._fail(line, asked.custom_id, error)

    def _prompt(self, asked: Asked) -> str | tuple[int, ...]:
        if asked.prompt is not None:
            return asked.prompt
        if self._template is None:
            raise BadRequest("This model has no chat template; use /v1/completions.")
        assert asked.messages is not None
        return tuple(self._template.encode(asked.messages))

    def _collect(self) -> None:
        if not self.engine.work():
            return
        for row in [r for r in self._open if all(job.finish for job in r.jobs)]:
            self._open.remove(row)
            if any(job.finish == "cancelled" for job in row.jobs):
                raise KeyboardInterrupt  # Ctrl-C: the row isn't done, the job goes on at the next run
            bad = [job.finish for job in row.jobs if job.finish not in ("end", "stop", "length")]
            if not bad:
                parts = self.engine.parts
                result = answered(
                    self._key, row.line, row.asked, row.jobs, self.engine.tokenizer, parts.name, self._created
                )
                self._state.finish(row.line, row.asked.custom_id, True, result)
            else:
                self._fail(row.line, row.asked.custom_id, BadRequest(_WHY.get(bad[0], bad[0])), "not_computed")
            for job in row.jobs:
                self._tokens += len(job.tokens)
                self.engine.forget(job)

    def _fail(self, line: int, custom_id: str | None, error: BadRequest, code: str = "invalid_request") -> None:
        self._state.finish(line, custom_id, False, failed(self._key, line, custom_id, code, str(error)))


_WHY = {
    "error": "The model's logits were not finite for this row; its weights or the prompt overflow.",
    "too long": "The cache can't hold this row; give a longer context (-c) or fewer tokens (max_tokens).",
}


def _template_of(engine: Engine) -> ChatTemplate | None:
    """None when the model has no template: then only rows of messages fail."""
    try:
        return ChatTemplate(engine.tokenizer)
    except HeadraceError:
        return None


def _remove_state(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
