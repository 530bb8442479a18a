"""Four strategies on the same head, stages and drafter, in virtual time: tokens/s as multiples of the plain pipeline.

    python benchmarks/speculation_table.py [--out benchmarks/results] [--nodes 4,8,15,32] [--trace FILE.json] [--quick]

A 70B-like target (80 layers) and a 1.1B-like draft (cost by parameters) on N nodes in all: the plain pipeline uses
N for the target, the others N - 1 and one for the drafter. Strategies other than ours are given the best of many
settings for each cell, chosen with a short run and measured with the long one: four texts of 200 tokens.
Prints Markdown; --out writes JSON too. Takes 20 minutes of CPU (--jobs 2 for half of that). --trace: a recording of a
real pair (``record_pair.py``) instead of the model, one text of 400.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import TypeAlias

from headrace.simulate.acceptance import Acceptance, Ranks, Recorded
from headrace.simulate.cluster import (
    CPU_CURVE,
    GPU_CURVE,
    Cluster,
    Curve,
    Strategy,
    even,
    ours,
    pipeinfer,
    plain,
    run_simulation,
    synchronous,
)  # fmt: skip
from headrace.simulate.network import GIGABIT, HUNDRED, LinkSpec
from headrace.speculate.control import WIDTHS
from headrace.speculate.pipeinfer import Knobs

LAYERS, WIDTH = 80, 8192
CURVES = {"cpu": (CPU_CURVE, 0.4), "gpu": (GPU_CURVE, 0.07)}
"""Cost by rows, and seconds of a one-row pass: 70B in 4 bit at 100 GB/s, in 16 bit at 2 TB/s."""
LINKS = {"1G": GIGABIT, "100G": HUNDRED}
ACCEPTANCES = (0.79, 0.66, 0.52, 0.05)


def cluster(curve: Curve, full: float, link: LinkSpec, targets: int) -> Cluster:
    return Cluster(even(LAYERS, targets), (full / LAYERS,) * targets, curve, link, WIDTH, 2, full * 1.1 / 70)


def sync_settings(curve: Curve, quick: bool) -> list[Strategy]:
    chains = [synchronous(k) for k in ((1, 2, 4) if quick else (1, 2, 3, 4, 6, 8, 12))]
    small = [(1, 1, 2), (1, 1, 4), (2, 2, 4), (3, 2, 6)]
    wide = [(3, 4, 12), (4, 4, 16), (6, 4, 16), (8, 4, 24), (8, 8, 32), (10, 8, 48)]
    trees = small if curve is CPU_CURVE else [*small, *(wide[1::2] if quick else wide)]
    return chains + [synchronous(d, b, n, 5) for d, b, n in trees]


Row: TypeAlias = dict[str, object]


class Cell:
    """One cluster; rates are over all of ``texts``, each of ``tokens`` tokens, the same luck for all strategies."""

    def __init__(self, name: str, nodes: int, link: str, texts: Sequence[Ranks], tokens: int) -> None:
        curve, full = CURVES[name]
        self.curve, self.texts, self.tokens = curve, texts, tokens
        self.alone = cluster(curve, full, LINKS[link], nodes)
        self.shared = cluster(curve, full, LINKS[link], nodes - 1)

    def rate(self, strategy: Strategy, tokens: int | None = None) -> float:
        where = self.alone if strategy.name == "plain" else self.shared
        rates = [run_simulation(where, text, strategy, tokens or self.tokens).rate for text in self.texts]
        return len(rates) / sum(1 / rate for rate in rates)

    def best(self, settings: Sequence[Strategy], few: Cell) -> tuple[float, Strategy]:
        ranked = sorted(settings, key=lambda s: -few.rate(s))
        return max(((self.rate(s), s) for s in ranked[:2]), key=lambda x: x[0])


def best_pipeinfer(cell: Cell, few: Cell, quick: bool) -> tuple[float, Strategy]:
    """Draft first (a chain), then branches there and at the runner-up, then cutoffs. few: for choosing."""

    def ranked(knobs: list[Knobs]) -> list[tuple[float, Knobs]]:
        return sorted(((few.rate(pipeinfer(k)), k) for k in knobs), key=lambda x: -x[0])

    tried = ranked([Knobs(d, 1, 0.001, 0.2) for d in ((1, 2, 4) if quick else (1, 2, 3, 4, 6, 8))])
    for _, k in tried[:2]:
        tried += ranked([replace(k, draft=max(k.draft, n), np=n, ps=0.03) for n in (2, 3)])
    best = max(tried, key=lambda x: x[0])[1]
    cuts = [replace(best, pa=0.3), replace(best, pa=0.01, pr=0.05, pd=0.01), replace(best, pr=0.2)]
    tried += [] if quick else ranked(cuts)
    finals = [k for _, k in sorted(tried, key=lambda x: -x[0])[:2]]
    rate, knobs = max(((cell.rate(pipeinfer(k)), k) for k in finals), key=lambda x: x[0])
    return rate, pipeinfer(knobs)


def bound(cell: Cell, chances: Sequence[float]) -> float:
    """Times plain: the best of a relaxed problem in which an oracle names the right parent of every guess.

    So rows are spent only where the text goes, ``n`` of a position's likeliest guesses at each, ``rows`` a run;
    drafting is free. A cycle is a known token's pass, then ``hits`` positions entered at ``rows`` a run, then the
    last run's pass. What is left out (guesses under wrong parents) is what wide trees are made of, so it is loose
    there.
    """
    speed = cell.shared.speed()
    best = 1.0
    for rows in WIDTHS:
        for n in range(1, len(chances) + 1):
            c = sum(sorted(chances, reverse=True)[:n])
            hits = c / (1.0 - c)
            entered = max(hits * n / rows - 1.0, 0.0) * speed.entering(rows)
            cycle = (1.0 - c) * speed.passing(1) + c * speed.passing(rows) + entered
            best = max(best, (1.0 + hits) / cycle * cell.alone.speed().passing(1))
    return best


def rows_of(args: argparse.Namespace) -> list[Row]:
    table: list[Row] = []
    some = [
        (args, n, nodes, a) for n in CURVES for nodes in args.nodes for a in ((None,) if args.trace else ACCEPTANCES)
    ]
    with ProcessPoolExecutor(args.jobs) as pool:
        for rows in pool.map(both_links, some):
            table += rows
            if not args.quiet:
                print("\n".join(map(_line, rows)), flush=True)
    return table


def both_links(asked: tuple[argparse.Namespace, str, int, float | None]) -> list[Row]:
    args, name, nodes, a = asked
    texts: list[Ranks]
    if a is None:
        recorded = json.loads(args.trace.read_text())
        texts = [Recorded(recorded["ranks"], recorded["probabilities"])]
    else:
        texts = [Acceptance(a, args.seed + i) for i in range(2 if args.quick else 4)]
    tokens, short = (60, 40) if args.quick else (200 if a else 400, 60)
    rows: list[Row] = []
    known: tuple[Strategy, Strategy] | None = None
    for link in LINKS:
        cell = Cell(name, nodes, link, texts, args.tokens or tokens)
        base = cell.rate(plain(), 30)
        if known and name == "cpu":  # where links hardly matter, the settings of the first are kept
            sync, pipe = cell.rate(known[0]), cell.rate(known[1])
        else:
            few = Cell(name, nodes, link, texts[:2], short)
            sync, sync_set = cell.best(sync_settings(cell.curve, args.quick), few)
            pipe, pipe_set = best_pipeinfer(cell, few, args.quick)
            known = (sync_set, pipe_set)
        row: Row = {
            "curve": name, "nodes": nodes, "acceptance": a, "link": link, "plain": base,
            "sync8": cell.rate(synchronous(8)) / base, "sync": sync / base, "sync_setting": known[0].name,
            "pipeinfer": pipe / base, "pipeinfer_setting": known[1].name, "ours": cell.rate(ours()) / base,
            "bound": bound(cell, Acceptance(a).chances()) if a is not None else None,
        }  # fmt: skip
        rows.append(row)
    return rows


HEADER = (
    "| rows' cost | nodes | a | link | plain, tokens/s | sync, draft 8 | sync, best "
    "| PipeInfer, best | ours | bound |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def _line(r: Row) -> str:
    top = f"{r['bound']:.1f}" if r["bound"] else "-"
    return (
        f"| {r['curve']} | {r['nodes']} | {r['acceptance']} | {r['link']} | {r['plain']:.2f} | {r['sync8']:.2f} "
        f"| {r['sync']:.2f} ({r['sync_setting']}) | {r['pipeinfer']:.2f} ({r['pipeinfer_setting']}) "
        f"| **{r['ours']:.2f}** | {top} |"
    )


def verdict(table: Sequence[Row]) -> dict[str, float]:
    """What was asked, measured."""

    def of(name: str, nodes: int, a: float) -> list[Row]:
        return [r for r in table if (r["curve"], r["nodes"], r["acceptance"]) == (name, nodes, a)]

    found: dict[str, float] = {}
    for r in of("cpu", 8, 0.52):
        found[f"cpu 8 0.52 {r['link']}: ours / sync draft 8 (asked 3)"] = r["ours"] / r["sync8"]  # type: ignore[operator]
        found[f"cpu 8 0.52 {r['link']}: ours / best sync (asked 1.6)"] = r["ours"] / r["sync"]  # type: ignore[operator]
    for r in of("gpu", 8, 0.79):
        found[f"gpu 8 0.79 {r['link']}: ours / plain (asked 4)"] = r["ours"]  # type: ignore[assignment]
        found[f"gpu 8 0.79 {r['link']}: ours / best sync (asked 1.3)"] = r["ours"] / r["sync"]  # type: ignore[operator]
    for a in ACCEPTANCES:
        for r in of("cpu", 8, a):
            found[f"cpu 8 {a} {r['link']}: pipeinfer / sync draft 8 (published 1.5-2.15)"] = r["pipeinfer"] / r["sync8"]  # type: ignore[operator]
    ratios = [r["ours"] / r["pipeinfer"] for r in table]  # type: ignore[operator]
    found["geometric mean of ours / pipeinfer (asked 1.1)"] = exp(sum(map(log, ratios)) / len(ratios))
    worst = min(r["ours"] / max(1.0, r["sync"], r["sync8"], r["pipeinfer"]) for r in table)  # type: ignore[operator, type-var]
    found["least ours / best other (asked 0.98)"] = worst
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer settings, shorter texts")
    parser.add_argument("--quiet", action="store_true", help="no line for each cell as it is done")
    parser.add_argument(
        "--out", type=Path, help="folder for speculation_table.json (of --trace: speculation_pair.json)"
    )
    parser.add_argument("--trace", type=Path, help="ranks and probabilities recorded from a real pair")
    parser.add_argument("--tokens", type=int, help="of the long runs, whatever the nodes")
    parser.add_argument("--seed", type=int, default=1, help="of the first text, the others follow")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--nodes", default="4,8,15,32", type=lambda s: [int(n) for n in s.split(",")])
    args = parser.parse_args()
    if not args.quiet:
        print(HEADER)
    table = rows_of(args)
    asked = verdict(table) if not args.trace else {}
    text = "\n".join([HEADER, *map(_line, table), "", *(f"- {k}: {v:.2f}" for k, v in asked.items())])
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        name = "speculation_pair.json" if args.trace else "speculation_table.json"
        (args.out / name).write_text(json.dumps({"cells": table, "asked": asked}, indent=1) + "\n")


if __name__ == "__main__":
    main()
