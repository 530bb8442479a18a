"""What each part of streaming brings: the same work with one part taken away at a time, on a model over the limit.

    python benchmarks/ablation.py [--ram 256] [--rounds 3] [--write]

On the CPU: SmolLM2 inflated to half a gigabyte (inflate.py; the numbers are of that model), over ``--ram`` MiB, 32
prompts of 16 tokens, 16 tokens each. On ``torch:cpu`` behind a paced link, with ``DEVICE_MIB`` of its own: SmolLM2 and
room for 8 contexts of 320, 8 prompts of 8 tokens, 6 each. Cases take turns, each in a process of its own; medians of
generated tokens over the time of all but loading. Texts are compared. ``--write`` keeps the JSON in benchmarks/results,
from which README's table is made. Needs a quiet machine: what others compute meanwhile stretches our computing, which
then hides waits that would be seen otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import headrace
from headrace.config import resolve
from headrace.errors import OverBudget
from headrace.kernels.device import PAGE
from headrace.memory.link import Pace
from headrace.options import Choice, Options
from headrace.plan.plan import Place, spread
from headrace.plan.sizes import Workload
from headrace.system import processor
from inflate import inflate
from model_zoo import smollm2

THREADS = 2
RESULTS = Path(__file__).parent / "results" / "ablation.json"
DEVICE_MIB, LINK = 175, 2e7
"""A GPU's link carries a twenty-fifth of what its memory does; this one a third of what torch:cpu computes with."""
CPU = {"prompts": 32, "prompt": 16, "tokens": 16}
TIERS = {"prompts": 8, "prompt": 8, "tokens": 6}
CASES: dict[str, dict[str, Any]] = {
    "everything": {"on": "cpu"},
    "no prefetch": {"on": "cpu", "overlap": False},
    "block of 1 sequence": {"on": "cpu", "sequences": 1, "rows": 64, "prompts": 2},
    "no search, batch's defaults": {"on": "cpu", "sequences": 64, "rows": 256, "caches": 0},
    "no search, 4 sequences": {"on": "cpu", "sequences": 4, "rows": 64, "caches": 4},
    "no disk tier": {"on": "cpu", "places": "host", "sequences": 32, "rows": 64},
    "device: everything": {"on": "tiers", "kv": "host"},
    "device: no host attention": {"on": "tiers", "kv": "device"},
}


def options(case: dict[str, Any], ram: int) -> Options:
    c = dict(case)
    tiers = c.pop("on") == "tiers"
    for name in ("prompts", "kv"):
        c.pop(name, None)
    work = Workload(CPU["prompt"], CPU["tokens"], CPU["prompts"])
    if c.pop("choice", False):
        c |= {"choice": Choice(work), "sequences": 64, "caches": 0}
    if c.get("places") == "host":
        c["places"] = (Place("host", "host", "host", "host"),) * 32
    if tiers:
        both = {"context": 320, "sequences": 8, "caches": 8, "rows": 64, "device": "torch:cpu", "link": Pace(LINK)}
        return Options(threads=THREADS, device_ram=DEVICE_MIB << 20, **both, **c)
    return Options(threads=THREADS, context=64, ram=ram << 20, **c)


def placed(model: Path, chosen: Options, kv: str) -> Options:
    """As many blocks' weights on the device as fit beside its caches; the others cross."""
    for near in range(30, -1, -1):
        kinds = [(Place("device", "device", kv, kv), near), (Place("host", "device", kv, kv), 30 - near)]
        ends = Place("device", "device", kv, kv)
        attempt = replace(chosen, places=(ends, *spread(kinds), ends))
        try:
            headrace.load(model, attempt).close()
            return attempt
        except OverBudget:
            continue
    raise SystemExit("nothing fits the device")


def child(job: dict[str, Any]) -> dict[str, Any]:
    case, sizes = job["case"], TIERS if job["case"]["on"] == "tiers" else CPU
    count = case.get("prompts", sizes["prompts"])
    prompts = [[(i * 7919 + j * 104729) % 40000 + 100 for j in range(sizes["prompt"])] for i in range(count)]
    chosen = options(case, job["ram"])
    if case["on"] == "tiers":
        chosen = placed(Path(job["model"]), chosen, case["kv"])
    try:
        engine = headrace.load(job["model"], chosen)
    except OverBudget as error:
        return {"refused": str(error)}
    with engine:
        start, cpu = time.perf_counter(), time.process_time()
        done = engine.generate(prompts, max_tokens=sizes["tokens"], ignore_eos=True)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        moved, order = engine.parts.computer.traffic(), engine.parts.loop.head.order
        near = sum(p.weights == "device" for p in chosen.places or ())
    return {
        "tokens_per_s": count * sizes["tokens"] / seconds,
        "cpu_s": cpu,
        "read_gb": moved.read / 1e9,
        "crossed_gb": moved.crossed / 1e9,
        "waited_share": moved.waited / seconds,
        "rows": order.rows,
        "runs": order.runs,
        "sequences": order.sequences,
        "slots": engine.parts.loop.head.pool.total * PAGE,
        "layers_on_device": near,
        "texts": [list(c.tokens) for c in done],
    }


def launch(job: dict[str, Any]) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, __file__, "--child"], input=json.dumps(job), capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{job['case']}: {ran.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def main() -> None:
    if sys.argv[1:] == ["--child"]:
        print(json.dumps(child(json.loads(sys.stdin.read()))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ram", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="cases that begin so")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    big = resolve().cache / "benchmarks" / "inflated-0.5-own.gguf"
    if not big.exists():
        big.parent.mkdir(parents=True, exist_ok=True)
        inflate(smollm2(), big, 500_000_000, None, 0.0)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CASES if name.startswith(args.only)}
    loads = []
    # The plan is searched once, and then is the same for the cases that follow it.
    plan = launch({"case": {"on": "cpu", "choice": True}, "ram": args.ram, "model": str(big)})
    plan = {name: plan[name] for name in ("rows", "runs", "sequences", "slots")}
    for turn in range(args.rounds):
        for name, rounds in found.items():
            loads.append(os.getloadavg()[0])
            model = smollm2() if CASES[name]["on"] == "tiers" else big
            case = {**(plan if name in ("everything", "no prefetch") else {}), **CASES[name]}
            rounds.append(launch({"case": case, "ram": args.ram, "model": str(model)}))
            told = {k: v for k, v in rounds[-1].items() if k != "texts"}
            print(f"{turn} {name}: {told}", file=sys.stderr, flush=True)
    result = {
        "benchmark": "ablation", "processor": processor(), "ram_mib": args.ram, "device_mib": DEVICE_MIB,
        "link_bytes_per_s": LINK, "plan": plan, "load_average": [round(min(loads), 1), round(max(loads), 1)],
        "model": f"SmolLM2-135M inflated to {big.stat().st_size / 1e9:.2f} GB, Q4_1, random weights",
        "cases": {name: summed(name, found) for name in found},
    }  # fmt: skip
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    if args.write:
        RESULTS.write_text(text, encoding="utf-8")


def summed(name: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians of a case beside those of the one with everything."""
    rounds = found[name]
    if "refused" in rounds[0]:
        return {"refused": rounds[0]["refused"]}
    whole = found["device: everything" if name.startswith("device") else "everything"]
    rate, best = (statistics.median(r["tokens_per_s"] for r in some) for some in (rounds, whole))
    count = len(rounds[0]["texts"])
    return {
        "tokens_per_s": rate,
        "of_everything": rate / best,
        "samples": [r["tokens_per_s"] for r in rounds],
        "same_text": all(r["texts"] == whole[0]["texts"][:count] for r in rounds),
        **{k: v for k, v in rounds[0].items() if k not in ("texts", "tokens_per_s")},
    }


if __name__ == "__main__":
    main()
