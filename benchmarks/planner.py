"""The planner against real runs: what it predicts, and whether what it finds is the fastest.

    python benchmarks/planner.py accuracy [--rounds 3]       eight unlike configurations, predicted and measured
    python benchmarks/planner.py search [--plans 15]         its plan against random plans that fit and its neighbours

Constants come from ``measured.machine`` alone. On a machine that others use too its speed changes by the minute, so
``accuracy`` measures them anew before each configuration, and the disk's rate after it too, of which it takes the
mean (``--frozen``: all once, before the first); each runs three times, and a round that was interrupted shows in the
spread. Models are SmolLM2-135M inflated (``inflate.py``) and Gemma 3 270M; prompts are made-up ids.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import headrace
from headrace import measured, planning
from headrace.config import resolve
from headrace.kernels.dispatch import make_device
from headrace.model.layers import load_model
from headrace.options import Choice, Options
from headrace.placement import open_file
from headrace.plan.machine import Machine
from headrace.plan.probe import beside
from headrace.plan.sizes import Workload
from inflate import inflate
from model_zoo import gemma3, smollm2

THREADS = 2
CONFIGURATIONS: tuple[tuple[str, int, tuple[int, int], tuple[int, int, int]], ...] = (
    ("inflated", 1000, (16, 16), (32, 24, 16)),
    ("inflated", 400, (16, 16), (32, 16, 24)),
    ("inflated", 300, (8, 4), (256, 8, 6)),
    ("inflated", 300, (16, 16), (48, 16, 1)),
    ("gemma", 1000, (8, 4), (256, 16, 6)),
    ("gemma", 340, (16, 16), (32, 24, 16)),
    ("gemma", 310, (8, 4), (32, 32, 1)),
    ("gemma", 340, (8, 4), (400, 16, 4)),
)
"""Model, MiB of memory, KV bits, (prompt tokens, new tokens, sequences)."""


def path_of(name: str) -> Path:
    if name == "gemma":
        return gemma3()
    path = resolve().cache / "benchmarks" / "inflated-0.5-own.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        inflate(smollm2(), path, 500_000_000, None, 0.0)
    return path


class Case:
    """A configuration with its planner."""

    def __init__(self, model: str, mib: int, bits: tuple[int, int], work: tuple[int, int, int]) -> None:
        self.path, self.work = path_of(model), Workload(*work)
        self.file = open_file(self.path, Options())
        self.model, self.device = load_model(self.file), make_device(threads=THREADS)
        choice = Choice(self.work, "latency" if self.work.batch == 1 else "throughput")
        self.options = Options(ram=mib << 20, context=sum(work[:2]) + 1, kv_bits=bits, choice=choice, threads=THREADS)
        self.seed = 0

    def formats(self) -> list[str]:
        return sorted({p.fmt for la in self.model.layers[1:] for p in la.tensors.values() if p.n > 1})

    def machine(self, again: bool) -> Machine:
        return measured.machine(self.device, resolve().cache, self.formats(), self.options.kv_bits, disk=self.path,
                                again=again, apart=True)  # fmt: skip

    def planner(self, machine: Machine) -> planning.Planner:
        return planning.Planner(self.device, self.model, self.options, machine)

    def timer(self, shape: planning.Shape) -> tuple[headrace.Engine, Callable[[], float]]:
        """An engine that runs exactly this plan (no limit: the plan says what lies where), and what times the work."""
        options = replace(shape.options, places=shape.candidate.plan.places, ram=None, choice=None)
        engine = headrace.load(self.path, options)

        def once() -> float:
            self.seed += 1
            p, vocab = self.work.prompt_len, engine.spec.vocab
            many = [
                [(self.seed * 7919 + j * 31 + i * 104729) % vocab for i in range(p)] for j in range(self.work.batch)
            ]
            start = time.perf_counter()
            engine.generate(many, max_tokens=self.work.gen_len, ignore_eos=True)
            return time.perf_counter() - start

        return engine, once


def accuracy(rounds: int, frozen: bool, only: list[int]) -> list[dict[str, Any]]:
    """Each configuration in a process of its own."""
    out = []
    for number in only or range(1, len(CONFIGURATIONS) + 1):
        asked = [str(number), str(rounds), str(int(not frozen or not out))]
        done = subprocess.run(
            [sys.executable, __file__, "child", *asked], stdout=subprocess.PIPE, text=True, check=True
        )
        out.append(json.loads(done.stdout))
        print(json.dumps(out[-1]), file=sys.stderr, flush=True)
    return out


def child(number: int, rounds: int, again: bool) -> dict[str, Any]:
    configuration = CONFIGURATIONS[number - 1]
    case = Case(*configuration)
    machine = case.machine(again)
    shape = case.planner(machine).best()[0]
    engine, once = case.timer(shape)
    with engine:
        once()
        seconds = [once() for _ in range(rounds)]
    before = machine.tier("disk").read
    after = before if not again else beside(case.device, case.formats()[0], case.path)[0]
    known = case.planner(machine.faster("disk", (before + after) / 2 / before))
    p, o = known.predict(shape.candidate.plan, case.work), shape.options
    tokens = case.work.batch * case.work.gen_len
    found = tokens / statistics.median(seconds)
    return {
        "configuration": configuration, "predicted": p.tokens_per_s, "measured": found,
        "error": p.tokens_per_s / found - 1, "samples": [tokens / s for s in seconds], "bottleneck": p.bottleneck,
        "streamed": shape.streamed, "sequences": o.sequences, "rows": o.rows, "runs": o.runs,
        "disk_gb_s": [before / 1e9, after / 1e9], "cache_on_disk": o.kv_disk is not None, "load": os.getloadavg()[0],
    }  # fmt: skip


def neighbours(shapes: list[planning.Shape], best: planning.Shape) -> list[planning.Shape]:
    """Plans that differ from the best in one of rows, runs, sequences and where the cache lies."""

    def knobs(s: planning.Shape) -> tuple[Any, ...]:
        return s.options.rows, s.options.runs, s.options.sequences, s.options.kv_frames

    return [s for s in shapes if sum(a != b for a, b in zip(knobs(s), knobs(best), strict=True)) == 1]


SEARCHED = {"inflated": (400, (16, 16), (24, 6, 24)), "gemma": (340, (16, 16), (32, 8, 16))}


def searched(name: str, plans: int, rounds: int) -> dict[str, Any]:
    """The searched plan, ``plans`` random ones that fit and as many neighbours, each run once; then the best three
    in turn with it, medians."""
    case = Case(name, *SEARCHED[name])
    shapes = case.planner(case.machine(True)).best()
    best, pick = shapes[0], random.Random(0)
    near = neighbours(shapes[1:], best)
    tried = [*pick.sample(shapes[1:], min(plans, len(shapes) - 1)), *pick.sample(near, min(plans, len(near)))]
    times: list[tuple[float, planning.Shape]] = []
    for shape in [best, *tried]:
        engine, once = case.timer(shape)
        with engine:
            times.append((min(once(), once()), shape))
        print(json.dumps(about(times[-1])), file=sys.stderr, flush=True)
    rivals = sorted(times[1:], key=lambda t: t[0])[:3]
    timers = [case.timer(s) for _, s in [times[0], *rivals]]
    samples: list[list[float]] = [[] for _ in timers]
    for _ in range(rounds):
        for i, (_, once) in enumerate(timers):
            samples[i].append(once())
    for engine, _ in timers:
        engine.close()
    medians = [statistics.median(s) for s in samples]
    return {"searched": about(times[0]), "random": [about(t) for t in times[1 : 1 + plans]],
            "neighbours": [about(t) for t in times[1 + plans :]], "again_s": medians,
            "slower_than_the_best_of_three": medians[0] / min(medians[1:]) - 1}  # fmt: skip


def about(timed: tuple[float, planning.Shape]) -> dict[str, Any]:
    seconds, s = timed
    o = s.options
    return {"seconds": round(seconds, 3), "predicted": round(s.candidate.seconds, 3), "sequences": o.sequences,
            "rows": o.rows, "runs": o.runs, "frames": o.kv_frames, "streamed": s.streamed}  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        number, rounds, again = map(int, sys.argv[2:])
        print(json.dumps(child(number, rounds, bool(again))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "search"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plans", type=int, default=15, help="random plans, and neighbours")
    parser.add_argument("--model", choices=SEARCHED, default="gemma", help="of the search")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of configurations, from 1")
    args = parser.parse_args()
    if args.what == "search":
        print(json.dumps(searched(args.model, args.plans, args.rounds), indent=1))
        return
    found = accuracy(args.rounds, args.frozen, args.only)
    good = sum(abs(f["error"]) <= 0.15 for f in found)
    print(json.dumps({"within_15_percent": good, "of": len(found), "configurations": found}, indent=1))


if __name__ == "__main__":
    main()
