"""Streaming and guessing: one prompt on a model over the memory limit, with a drafter in the same memory cgroup.

    python benchmarks/stream_speculate.py [--gigabytes 5] [--limit 1536] [--tokens 48] [--rounds 3] [--out FILE]

The model is SmolLM2 inflated with weights that add nothing (``inflate.py``), the draft SmolLM2 with noise, which names
the text's next token at 0.75 +- 0.03 of its places; of some prompts the one whose text is nearest to it is taken. Each
round loads and answers once without and once with the drafter, taking turns, in a cgroup (v1, page cache included) of
the limit. Decode time is from the first token to the last. ``gain``: ratio of the medians of tokens/s (asked: 3).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import cgroup
from cgroup import launch, need
from headrace.config import resolve
from inflate import inflate
from model_zoo import smollm2, tell
from pair import noisy, text_of

SPARE = 128 << 20
"""Of the limit, what is left to Python's and the kernel's own."""


def child(job: dict[str, Any]) -> dict[str, Any]:
    """One load and one answer, in the cgroup."""
    from headrace.engine import load

    options = {"threads": job["threads"], "context": 256, "rows": job["rows"], "sequences": 1, "ram": job["ram"]}
    with load(job["model"], packs=Path(job["packs"]), drafter=job["drafter"], **options) as engine:
        passes: list[tuple[int, float]] = []
        computer = engine.parts.computer
        step, last = computer.step, len(engine.parts.model.layers) - 1

        def watched(layer: int, run: Any) -> None:
            step(layer, run)
            if layer == last:
                passes.append((run.rows.count, time.perf_counter()))

        computer.step = watched  # type: ignore[method-assign]
        computer.steps = lambda layer, through, run: (watched(layer, run), layer)[1]  # type: ignore[method-assign]
        asked = engine.submit(job["prompt"], job["tokens"], ignore_eos=True)
        start = time.perf_counter()
        while not asked.finish:
            engine.work()
        f, weights = asked.figures, engine.parts.weights
        ends = [start, *(end for _, end in passes)]
        return {
            "tokens": list(asked.tokens), "first_s": round(f.first - start, 3), "seconds": f.last - f.first,
            "rate": (len(asked.tokens) - 1) / max(f.last - f.first, 1e-9), "counts": vars(engine.head.counts),
            "passes": [[rows, round(b - a, 3)] for (rows, b), a in zip(passes, ends, strict=False)],
            "streamed_layers": len(getattr(weights, "order", [])), "pass_gb": getattr(weights, "cycle_bytes", 0) / 1e9,
            "waited_s": round(getattr(weights, "waited", 0.0), 2), "ledger": engine.parts.budget.items,
            "loaded": os.getloadavg()[0],
        }  # fmt: skip


def main() -> None:
    if sys.argv[1:] == ["--child"]:
        print(json.dumps(child(json.loads(sys.stdin.read()))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--limit", type=int, default=1536, help="MiB")
    parser.add_argument("--ram", type=int, help="MiB of --ram (default: the limit less 128)")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-cgroup", action="store_true", help="only --ram keeps the limit")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder = resolve().cache / "benchmarks"
    model, draft = folder / f"inflated-{args.gigabytes:g}-own.gguf", noisy()
    if not model.exists():
        inflate(smollm2(), model, int(args.gigabytes * 1e9), None, 0.0)
    prompt, answer, _, agreement = text_of(smollm2(), draft, args.tokens)
    ram = args.limit * (1 << 20) - SPARE if args.ram is None else args.ram << 20
    job = {
        "model": str(model), "packs": str(folder / "packs"), "threads": args.threads, "rows": args.rows, "ram": ram,
        "prompt": prompt, "tokens": args.tokens,
    }  # fmt: skip
    sides: dict[str, Any] = {"plain": [], "guessing": str(draft)}
    cgroup.GROUP = cgroup.GROUP.with_name("headrace-guessing")
    limit = None if args.no_cgroup else args.limit << 20
    need(launch(__file__, {**job, "drafter": [], "tokens": 1}, None))  # packs the file
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for round_ in range(args.rounds):
        for name in list(sides)[:: 1 if round_ % 2 == 0 else -1]:
            answered = need(launch(__file__, {**job, "drafter": sides[name]}, limit))
            samples[name].append(answered)
            print(name, round(answered["rate"], 3), answered["counts"], file=sys.stderr, flush=True)
    rates = {name: statistics.median(s["rate"] for s in each) for name, each in samples.items()}
    result = {
        "benchmark": "stream_speculate", "model": f"SmolLM2-135M inflated to {model.stat().st_size / 1e9:.2f} GB",
        "limit_mib": args.limit, "agreement": agreement, "rates": {k: round(v, 4) for k, v in rates.items()},
        "gain": round(rates["guessing"] / rates["plain"], 3),
        "same_text": all(s["tokens"] == answer for each in samples.values() for s in each),
        "samples": {n: [{k: v for k, v in s.items() if k != "tokens"} for s in each] for n, each in samples.items()},
    }  # fmt: skip
    tell(result, args.out)


if __name__ == "__main__":
    main()
