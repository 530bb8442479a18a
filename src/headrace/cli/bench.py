"""``headrace bench``."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace import system
from headrace.cli import generation as g
from headrace.cli import options
from headrace.cli.parser import counts, whole
from headrace.cli.planned import expected
from headrace.cli.show import human, table

if TYPE_CHECKING:
    from headrace.engine import Engine

SHORT = 8
"""Prompt tokens of the sequences that decode side by side."""


@dataclass(frozen=True)
class Test:
    """kind: "prefill" of ``length`` tokens, or "decode" of ``rows`` sequences that start at ``length``."""

    kind: str
    length: int
    rows: int


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measures prefill and decode at several lengths, and decode of several sequences side by side. Each figure is "
        "the median of the rounds, which take turns; decode is set against the memory bandwidth measured in the same "
        "run. Prompts are made-up token ids. Where a plan decided (--ram), what it predicted stands beside."
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=options.MODEL_HELP)
    for flag, default, what in (
        ("--prefill", (32, 128, 512), "prompt lengths"),
        ("--depth", (1, 512), "where in the context to decode"),
        ("--rows", (4, 16), "sequences to decode side by side"),
    ):
        usual = f"{what} (default {','.join(map(str, default))})"
        parser.add_argument(flag, type=counts, default=default, metavar="N,N", help=usual)
    parser.add_argument("-n", "--tokens", type=whole(2), default=32, metavar="N", help="tokens to decode (default 32)")
    parser.add_argument("--rounds", type=whole(1), default=3, metavar="N", help="times to measure (default 3)")
    parser.add_argument("--json", action="store_true", help="print JSON, every sample included")
    options.add_machine(parser.add_argument_group("machine"))


def run(args: argparse.Namespace) -> int:
    tests = list(plan(args))
    args.context = max(test.length for test in tests) + args.tokens + 1
    most = max(test.rows * (test.length + args.tokens + 32) for test in tests)
    wide = max(test.rows for test in tests)
    work = max(args.prefill), args.tokens, wide
    with g.load(args, work, caches=-(-most // args.context), sequences=wide) as engine:
        results = measure(engine, tests, args.tokens, args.rounds)
        report = {"model": str(engine.parts.model.file.paths[0]), **about(engine), "tests": results}
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        print(shown(report))
    return 0


def plan(args: argparse.Namespace) -> Iterator[Test]:
    for length in args.prefill:
        yield Test("prefill", length, 1)
    for depth in args.depth:
        yield Test("decode", depth, 1)
    for rows in args.rows:
        yield Test("decode", SHORT, rows)


def about(engine: Engine) -> dict[str, Any]:
    return {
        "processor": system.processor(),
        "threads": getattr(engine.parts.device, "threads", None),
        "kernels": getattr(engine.parts.device, "path", engine.parts.device.name),
        "weight_bytes_per_pass": engine.parts.pass_bytes,
        "peak_rss_bytes": system.peak_rss(),
    }


def measure(engine: Engine, tests: list[Test], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Rounds over all tests, so that a slow moment of the machine meets each alike. Rates in tokens/s."""
    samples: dict[Test, list[float]] = {test: [] for test in tests}
    bandwidths: list[float] = []
    prompts = prompt_maker(engine.spec.vocab)
    for turn in range(rounds + 1):
        with g.waiting(f"round {turn} of {rounds}" if turn else "warming up"):
            for test in tests if turn else tests[:1]:
                rate = one(engine, test, tokens, prompts)
                if turn:
                    samples[test].append(rate)
            if turn and (bandwidth := engine.bandwidth()):
                bandwidths.append(bandwidth)
    bandwidth = statistics.median(bandwidths) if bandwidths else None
    results = [_result(engine, test, samples[test], bandwidth) for test in tests]
    for test, result in zip(tests, results, strict=True):
        p = expected(engine, test.length, tokens, test.rows)
        if p is not None:
            result["predicted"] = test.length / p.ttft if test.kind == "prefill" else test.rows / p.itl
    return results


def prompt_maker(vocab: int) -> Callable[[int], list[int]]:
    """Prompts of a length, each unlike the others, so that no cache of prefixes can help."""
    made = 0

    def make(length: int) -> list[int]:
        nonlocal made
        made += 1
        return [(made * 7919 + i * 104729) % vocab for i in range(length)]

    return make


def one(engine: Engine, test: Test, tokens: int, prompts: Callable[[int], list[int]]) -> float:
    """Tokens/s of one test, once."""
    many = [prompts(test.length) for _ in range(test.rows)]
    new = 1 if test.kind == "prefill" else tokens
    done = [c.figures for c in engine.generate(many, max_tokens=new, ignore_eos=True)]
    if test.kind == "prefill":
        return done[0].prefill_rate
    # From the moment when every sequence has its first token to the end, they decode side by side.
    start, end = max(f.first for f in done), max(f.last for f in done)
    return test.rows * (tokens - 1) / (end - start)


def _result(engine: Engine, test: Test, samples: list[float], bandwidth: float | None) -> dict[str, Any]:
    rate = statistics.median(samples)
    result: dict[str, Any] = {"kind": test.kind, "length": test.length, "rows": test.rows, "tokens_per_s": rate}
    if test.kind == "decode":
        read = rate / test.rows * engine.parts.pass_bytes
        result |= {"weight_bytes_per_s": read, "share_of_bandwidth": read / bandwidth if bandwidth else None}
        result["bandwidth_bytes_per_s"] = bandwidth
    return {**result, "samples": samples}


def shown(report: dict[str, Any]) -> str:
    """The report as a table."""
    planned = any("predicted" in t for t in report["tests"])
    rows = [("test", "tokens/s", "from - to", "weights read", "of bandwidth") + (("plan",) if planned else ())]
    for t in report["tests"]:
        what = f"{t['kind']} {'at ' if t['kind'] == 'decode' else ''}{t['length']}"
        what += f", {t['rows']} side by side" if t["rows"] > 1 else ""
        read = f"{human(t['weight_bytes_per_s'])}/s" if t["kind"] == "decode" else ""
        share = f"{100 * t['share_of_bandwidth']:.0f}%" if t.get("share_of_bandwidth") else ""
        spread = f"{min(t['samples']):.1f} - {max(t['samples']):.1f}"
        plan = (f"{t['predicted']:.1f}",) if planned else ()
        rows.append((what, f"{t['tokens_per_s']:.1f}", spread, read, share, *plan))
    head = f"{report['model']}\n{report['processor']}, {report['threads']} threads, {report['kernels']} kernels"
    return f"{head}\n\n{table(rows, right=(1, 2, 3, 4, 5))}"
