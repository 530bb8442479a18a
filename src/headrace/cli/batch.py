"""``headrace batch``: an OpenAI batch file in, its result lines out, resumable."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.generation import interruptible, load, seen, write_trace
from headrace.cli.options import add_model, add_trace
from headrace.cli.parser import whole
from headrace.cli.planned import expected, expected_line, outlook
from headrace.cli.show import human, note
from headrace.errors import BadRequest
from headrace.store import known

if TYPE_CHECKING:
    from headrace.engine import Engine
    from headrace.jobs.batch import Report

USUAL = {"sequences": 64, "rows": 256, "runs": 1}
CUT_OFF = 60.0
"""Seconds after which a head that hears of no other rank has surely left."""
FAILED = 1
"""Exit status when every row has its line but some of them are error rows."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Computes every row of an OpenAI batch file (custom_id, method, url, body for /v1/chat/completions and "
        "/v1/completions) and writes the result lines in the same order. Killed at any moment, the same command goes "
        "on where it was: finished rows are kept in OUTPUT.state until the output is written. Exit status 1: all done, "
        "but some rows were bad and have an error in their line."
    )
    parser.add_argument("input", type=Path, help="batch file, one JSON object a line")
    parser.add_argument("-o", "--output", type=Path, required=True, help="result file; must not exist yet")
    parser.add_argument(
        "--seed", type=whole(0), default=0, help="job seed; a row's own is derived from it and its custom_id"
    )
    parser.add_argument("--any-model", action="store_true", help="take rows whatever model they name")
    parser.add_argument("--restart", action="store_true", help="throw away an earlier run's state and output")
    for name, what in (
        ("sequences", "most rows computed at a time"),
        ("rows", "most rows in a run"),
        ("runs", "most runs that pass a layer while it is held"),
    ):
        usual = f"{what} (default: {USUAL[name]}; with --ram what the plan says)"
        parser.add_argument(f"--{name}", type=whole(1), metavar="N", help=usual)
    add_trace(parser)
    add_model(parser)


class Progress:
    """Lines of progress: one that is rewritten on a terminal, a plain one now and then elsewhere."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self.every = 0.5 if self.live else 10.0
        self.last = 0.0

    def __call__(self, report: Report) -> None:
        now = time.monotonic()
        if now - self.last >= self.every:
            self.last = now
            end = "\r" if self.live else "\n"
            print(("\x1b[2K" if self.live else "") + line(report), end=end, file=sys.stderr, flush=True)


def line(report: Report) -> str:
    """One line of figures."""
    parts = [f"{report.rows}/{report.total} rows", f"{report.tokens_per_second:.1f} tokens/s"]
    if report.failed:
        parts.append(f"{report.failed} failed")
    if report.eta is not None and report.rows < report.total:
        parts.append(f"about {report.eta:.0f} s left")
    if report.disk_bound is not None:
        crossed, streamed = human(report.crossed_bytes), human(report.streamed_bytes)
        what, slow = (f"{streamed} streamed, {crossed} over the link", "disk or link") if report.crossed_bytes else (
            f"{streamed} streamed", "disk")  # fmt: skip
        where = slow if report.disk_bound > 0.5 else "compute"
        parts.append(f"{what}, waiting for the {slow} {report.disk_bound:.0%}: {where}-bound")
    return ", ".join(parts)


def names_of(given: str | None, name: str) -> tuple[str, ...]:
    """What rows may call the model: its own name, and the command line's, with or without folder and end."""
    text = given or known.DEMO.name
    path = Path(text.removeprefix("hf:"))
    return tuple(dict.fromkeys(n for n in (name, text, str(path), path.name, path.stem) if n))


def seen_by(engine: Engine, report: Report, seconds: float) -> list[str]:
    """The summary of guesses and stages, where there are some."""
    totals = engine.totals()
    return seen(totals, seconds, max(1, report.tokens)) if totals else []


def run(args: argparse.Namespace) -> int:
    """Compute the job; 0 when every row was answered, 1 when some became error rows."""
    from headrace.jobs.batch import Batch

    progress = Progress()
    work = outlook(args.input)
    pinned = {name: value for name in USUAL if (value := getattr(args, name)) is not None}
    if args.plan is not None and pinned:
        raise BadRequest(f"{args.plan} says how many {' and '.join(pinned)}; leave them out, or plan anew.")
    with load(args, work, {*USUAL, "caches"} - set(pinned), caches=0, **USUAL | pinned) as engine:
        names = None if args.any_model else names_of(args.model, engine.parts.name)
        batch = Batch(engine, args.input, args.output, args.seed, names, args.restart, progress)
        if args.book is not None:  # a head that is cut off from the others may still have the state
            batch.patience = CUT_OFF
        try:
            with interruptible(batch):
                report = batch.run()
            told = seen_by(engine, report, report.seconds)
            done = report.rows - report.resumed
            plan = expected(engine, work[0], report.tokens // max(1, done), done)
            told += [expected_line(plan)] if plan is not None else []
        except KeyboardInterrupt:
            note("\nstopped; the same command goes on from here")
            raise
        finally:
            write_trace(args, engine)
    if progress.live:
        note("")
    done_before = report.resumed == report.total
    note(f"{args.output} is there already, complete" if done_before else ", ".join([line(report), *told]))
    return FAILED if report.failed else 0
