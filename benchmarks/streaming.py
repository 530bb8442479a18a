"""A model over the memory limit, streamed: measured passes beside their roofline, in a memory cgroup.

    python benchmarks/streaming.py --gigabytes 5 --limit 1536M [--prompts 64] [--prompt-tokens 256] [--tokens 32]

Makes the inflated SmolLM2 (see inflate.py; its numbers are of that model), packs it, and runs the prompts in a child
process in a cgroup (v1) of the given limit, page cache included. Roofline of a pass: the longer of streamed bytes at
the disk's rate and of the computing time of the same rows with everything resident. The disk's rate is read directly,
at the same request size and depth, for some seconds before and after; the computing time of a run of so many rows is
measured in another child without the limit. The text is compared with the small model's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from headrace.config import resolve
from headrace.memory.buffers import HUGE, allocate
from inflate import inflate
from model_zoo import smollm2

ROOT = Path(__file__).resolve().parent.parent
GROUP = Path("/sys/fs/cgroup/memory/headrace-benchmark")


def prompts(count: int, tokens: int) -> list[list[int]]:
    """Spec-Bench's prompts as SmolLM2 ids, cut; where they are missing, pieces of the licence."""
    from headrace.formats.index import open_model
    from headrace.text.tokenizer import Tokenizer

    data = ROOT.parent / "shared" / "data" / "spec_bench_dev.jsonl"
    if data.exists():
        texts = [json.loads(line)["turns"][0] for line in data.open()]
    else:
        licence = (ROOT / "LICENSE").read_text()
        texts = [licence[i * 97 :] for i in range(count)]
    with open_model(smollm2()) as file:
        tokenizer = Tokenizer.from_metadata(file.metadata)
    return [tokenizer.encode(texts[i % len(texts)])[:tokens] for i in range(count)]


def disk_rate(path: Path, request: int, depth: int, seconds: float) -> float:
    """Bytes/s of direct reads at random aligned places, ``depth`` at a time."""
    from headrace.formats.files import DirectFile

    file, size = DirectFile(path), path.stat().st_size // request
    random = np.random.default_rng(0)
    end = time.perf_counter() + seconds

    def work(worker: int) -> int:
        buffer, done = allocate(max(request, HUGE))[:request], 0  # large pages, as layers are read into
        while time.perf_counter() < end:
            file.read_into(buffer.data, int(random.integers(0, size)) * request)
            done += request
        return done

    start = time.perf_counter()
    with ThreadPoolExecutor(depth) as pool:
        total = sum(pool.map(work, range(depth)))
    rate = total / (time.perf_counter() - start)
    file.close()
    return rate


class Watch:
    """Notes each step's layer, rows and times, from outside."""

    def __init__(self, engine: Any) -> None:
        self.passes: list[dict[str, Any]] = []
        self.weights = engine.parts.weights
        computer = engine.parts.computer
        step = computer.step

        def watched(layer: int, run: Any) -> None:
            now = time.perf_counter()
            if layer == 0 and (not self.passes or self.passes[-1]["layer"] != 0):
                self.passes.append({"start": now, "rows": [], "read": getattr(self.weights, "read_bytes", 0)})
            if layer == 0:
                self.passes[-1]["rows"].append(run.rows.count)
            step(layer, run)
            self.passes[-1]["layer"] = layer
            self.passes[-1]["end"] = time.perf_counter()

        computer.step = watched


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Runs in the cgroup, or outside of it to measure what the same runs cost with everything resident."""
    import headrace
    from headrace.memory.stream import Streamed

    start = time.perf_counter()
    options = {"threads": job["threads"], "context": 512, "rows": job["rows"], "runs": job["runs"], "sequences": 256}
    options |= {"packs": Path(job["packs"]), "ram": job["ram"], "caches": 0, "kv_bits": (16, 16)}
    with headrace.load(job["model"], **options) as engine:
        loaded = time.perf_counter() - start
        if job["do"] == "curve":
            return {"curve": curve(engine, job["counts"])}
        watch = Watch(engine)
        began = time.perf_counter()
        out = engine.generate(job["prompts"], max_tokens=job["tokens"], ignore_eos=True)
        seconds = time.perf_counter() - began
        weights = engine.parts.weights
        io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return {
            "load_s": loaded,
            "seconds": seconds,
            "tokens": [list(c.tokens) for c in out],
            "passes": watch.passes,
            "ledger": engine.parts.budget.items,
            "streamed": weights.read_bytes if isinstance(weights, Streamed) else 0,
            "layers_streamed": len(weights.order) if isinstance(weights, Streamed) else 0,
            "waited": weights.waited if isinstance(weights, Streamed) else 0.0,
            "pass_bytes": weights.cycle_bytes if isinstance(weights, Streamed) else 0,
            "io_read_bytes": int(io["read_bytes"]),
        }


def curve(engine: Any, counts: list[int]) -> dict[str, float]:
    """Seconds of one run of so many next tokens (each of its own sequence), everything resident; medians of three."""
    found = {}
    for count in counts:
        times = []
        for _ in range(3):
            watch = Watch(engine)
            engine.generate([[7 + i] for i in range(count)], max_tokens=1, ignore_eos=True)
            times.append(sum(p["end"] - p["start"] for p in watch.passes))
        found[str(count)] = statistics.median(times)
    return found


def launch(job: dict[str, Any], limit: int | None) -> dict[str, Any]:
    """The child's answer, and what the cgroup counted."""
    if limit is not None:
        GROUP.mkdir(exist_ok=True)
        (GROUP / "memory.limit_in_bytes").write_text(str(limit))
        for name in ("memory.failcnt", "memory.max_usage_in_bytes"):
            (GROUP / name).write_text("0")

    def enter() -> None:
        if limit is not None:
            (GROUP / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(
        [sys.executable, __file__, "--child"], input=json.dumps(job), capture_output=True, text=True, preexec_fn=enter
    )
    if done.returncode:
        raise SystemExit(f"the child failed ({done.returncode}): {done.stderr[-2000:]}")
    answer = dict(json.loads(done.stdout.splitlines()[-1]))
    if limit is not None:
        answer["failcnt"] = int((GROUP / "memory.failcnt").read_text())
        answer["max_usage"] = int((GROUP / "memory.max_usage_in_bytes").read_text())
    return answer


def interpolated(found: dict[str, float], rows: int) -> float:
    xs = sorted(int(k) for k in found)
    return float(np.interp(rows, xs, [found[str(x)] for x in xs]))


def roofline(passes: list[dict[str, Any]], costs: dict[str, float], pass_bytes: int, rate: float) -> list[float]:
    return [max(pass_bytes / rate, sum(interpolated(costs, r) for r in p["rows"])) for p in passes]


def main() -> None:
    if sys.argv[1:] == ["--child"]:
        print(json.dumps(child(json.loads(sys.stdin.read()))))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=5.0)
    parser.add_argument("--format")
    parser.add_argument("--limit", type=int, default=1536, help="MiB")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    folder = resolve().cache / "benchmarks"
    model = folder / f"inflated-{args.gigabytes:g}-{args.format or 'own'}.gguf"
    if not model.exists():
        inflate(smollm2(), model, int(args.gigabytes * 1e9), args.format, 0.0)
    asked = prompts(args.prompts, args.prompt_tokens)
    job = {"do": "run", "model": str(model), "packs": str(folder / "packs"), "threads": args.threads, "rows": args.rows}
    job |= {"runs": args.runs, "prompts": asked, "tokens": args.tokens, "ram": (args.limit - 128) << 20}
    small = launch({**job, "model": str(smollm2()), "ram": None}, None)
    launch({**job, "prompts": asked[:1], "tokens": 1}, None)  # packs the file
    packed = max((folder / "packs").glob("*.pack"), key=lambda p: p.stat().st_mtime)
    before = disk_rate(packed, 2 << 20, 4, 10)
    big = launch(job, args.limit << 20)
    after = disk_rate(packed, 2 << 20, 4, 10)
    counts = sorted({1, 8, 16, 32, args.rows, *(r for p in big["passes"] for r in p["rows"][:1])} & set(range(1, 129)))
    costs = launch({**job, "do": "curve", "counts": counts, "ram": None}, None)["curve"]
    rate = (before + after) / 2
    lines = roofline(big["passes"], costs, big["pass_bytes"], rate)
    took = [p["end"] - p["start"] for p in big["passes"]]
    decode = [i for i, p in enumerate(big["passes"]) if max(p["rows"]) <= args.prompts and len(p["rows"]) == 1][1:]
    result = {
        "benchmark": "streaming",
        "model": f"SmolLM2-135M inflated to {model.stat().st_size / 1e9:.2f} GB, random weights",
        "limit_mib": args.limit,
        "failcnt": big["failcnt"],
        "max_usage_mib": big["max_usage"] >> 20,
        "same_text": big["tokens"] == small["tokens"],
        "layers_streamed": big["layers_streamed"],
        "disk_gb_s": [round(before / 1e9, 3), round(after / 1e9, 3)],
        "streamed_gb": big["streamed"] / 1e9,
        "io_read_gb": big["io_read_bytes"] / 1e9,
        "passes": len(took),
        "whole_share": sum(lines) / big["seconds"],
        "decode_share": sum(lines[i] for i in decode) / max(1e-9, sum(took[i] for i in decode)),
        "tokens_per_s": sum(map(len, big["tokens"])) / big["seconds"],
        "decode_tokens_per_s": sum(sum(big["passes"][i]["rows"]) for i in decode)
        / max(1e-9, sum(took[i] for i in decode)),
        "seconds": big["seconds"],
        "load_s": big["load_s"],
        "waited_for_disk_s": big["waited"],
        "compute_s_by_rows": costs,
        "pass_seconds": [round(t, 2) for t in took],
        "pass_roofline": [round(t, 2) for t in lines],
        "pass_rows": [p["rows"] for p in big["passes"]],
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
