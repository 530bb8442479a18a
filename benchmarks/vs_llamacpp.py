"""Decode and prefill beside llama.cpp (the wheel ``xllamacpp``): same file, same threads, taking turns in one run.

    python benchmarks/vs_llamacpp.py [--models smollm2-q4_1 ...] [--threads 1 2] [--rounds 5] [--out FILE]

Each engine lives in a process of its own and works only when asked; the other sleeps meanwhile. llama.cpp's figures
are its own timings of prompt and generation. Ratios are of medians; every sample is in the JSON. Bandwidth is a
read of 256 MB by as many threads, taken between the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from model_zoo import ZOO, model_path, tell

PREFILL = 512
DECODE = 64


def tokens(count: int, seed: int) -> list[int]:
    """Token ids that differ from call to call, so that no cache of prompts helps either side."""
    return [(seed * 7919 + i * 104729) % 40000 + 100 for i in range(count)]


def serve_headrace(path: str, threads: int) -> None:
    import headrace.engine as engine
    from headrace.kernels.cpu import CpuDevice

    with engine.load(path, threads=threads, context=1024) as model:
        device = model.parts.device
        assert isinstance(device, CpuDevice)
        print(json.dumps({"ready": True, "path": device.path, "weight_bytes": model.parts.pass_bytes}), flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            if job["do"] == "bandwidth":
                print(json.dumps({"bytes_per_s": device.bandwidth()}), flush=True)
                continue
            for _ in model.stream(tokens(job["prompt"], job["seed"]), max_tokens=job["predict"], ignore_eos=True):
                pass
            f = model.figures()
            print(json.dumps({"prefill": f.prefill_rate, "decode": f.decode_rate}), flush=True)


def serve_llamacpp(path: str, threads: int) -> None:
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path = path
    p.n_ctx = 1024
    p.n_parallel = 1
    p.cpuparams.n_threads = threads
    p.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(p)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        said = server.handle_completions(
            {
                "prompt": tokens(job["prompt"], job["seed"]),
                "n_predict": job["predict"],
                "temperature": 0,
                "cache_prompt": False,
                "ignore_eos": True,
            }
        )
        t = said["timings"]
        print(json.dumps({"prefill": t["prompt_per_second"], "decode": t["predicted_per_second"]}), flush=True)


class Worker:
    """One engine in its own process, asked in lines of JSON."""

    def __init__(self, side: str, path: Path, threads: int, program: Path = Path(__file__)) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(program), "--serve", side, str(path), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            if not line:
                raise SystemExit(f"a benchmark worker died: {self.process.args}")
            if line.startswith("{"):
                return dict(json.loads(line))

    def ask(self, **job: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return self._read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def compare(path: Path, threads: int, rounds: int) -> dict[str, Any]:
    """All samples and the ratios of medians for one file and thread count."""
    sides = {side: Worker(side, path, threads) for side in ("headrace", "llamacpp")}
    samples: dict[str, list[float]] = {f"{s}_{w}": [] for s in sides for w in ("prefill", "decode")}
    bandwidth = []
    try:
        for round_ in range(rounds + 1):
            for side, worker in sides.items() if round_ % 2 else reversed(sides.items()):
                first = worker.ask(do="run", prompt=PREFILL, predict=1, seed=round_)
                second = worker.ask(do="run", prompt=16, predict=DECODE, seed=round_ + 100)
                if round_:  # the first round warms up
                    samples[f"{side}_prefill"].append(first["prefill"])
                    samples[f"{side}_decode"].append(second["decode"])
                time.sleep(0.1)
            bandwidth.append(sides["headrace"].ask(do="bandwidth")["bytes_per_s"])
    finally:
        for worker in sides.values():
            worker.close()
    middle = {name: statistics.median(values) for name, values in samples.items()}
    read = sides["headrace"].about["weight_bytes"] * middle["headrace_decode"]
    return {
        "threads": threads,
        "cpu_path": sides["headrace"].about["path"],
        "decode_ratio": round(middle["headrace_decode"] / middle["llamacpp_decode"], 3),
        "prefill_ratio": round(middle["headrace_prefill"] / middle["llamacpp_prefill"], 3),
        "medians": {k: round(v, 1) for k, v in middle.items()},
        "weights_read_gb_s": round(read / 1e9, 2),
        "bandwidth_gb_s": round(statistics.median(bandwidth) / 1e9, 2),
        "share_of_bandwidth": round(read / statistics.median(bandwidth), 3),
        "samples": {k: [round(v, 1) for v in values] for k, values in samples.items()},
    }


def main() -> None:
    if len(sys.argv) == 5 and sys.argv[1] == "--serve":
        serve = {"headrace": serve_headrace, "llamacpp": serve_llamacpp}[sys.argv[2]]
        serve(sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(ZOO), choices=list(ZOO))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for name in args.models:
        results[name] = [compare(model_path(name), t, args.rounds) for t in args.threads]
        for r in results[name]:
            shown = {k: r[k] for k in ("threads", "decode_ratio", "prefill_ratio", "share_of_bandwidth", "medians")}
            print(name, json.dumps(shown), file=sys.stderr, flush=True)
    tell({"benchmark": "vs_llamacpp", "results": results}, args.out)


if __name__ == "__main__":
    main()
