"""A model over the memory limit, streamed: measured passes beside their roofline, in a memory cgroup.

    python benchmarks/streaming.py [--model inflated|bf16|8b] [--cut] [--gigabytes 5] [--limit 1536] [--prompts 64]
        [--prompt-tokens 256] [--tokens 32] [--out FILE]

Makes the model, packs it, and runs the prompts in a child process in a cgroup (v1) of the given limit, page cache
included. Roofline of a pass: the longer of streamed bytes at the disk's rate and of the computing time of the same rows
with everything resident. The disk's rate is read directly, at the same request size and depth, for some seconds before
and after; the computing time of a run of so many rows is measured in another child without the limit.

inflated: SmolLM2 made wide in its own Q4_1; the text is compared with the small model's. bf16: the same made wide and
deep in BF16, twenty times the limit (of thirty blocks three buffers' worth would be a tenth of the model). 8b: a random
Llama of width 4096 and 32 blocks in Q4_K, compared with a run of the same without a limit. A number of either is that
model's. ``--cut``: fewer prompts and tokens, about five minutes on two cores of one's own once the model is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from cgroup import drop, launch, need
from headrace.config import resolve
from headrace.memory.buffers import HUGE, allocate
from inflate import inflate
from model_zoo import smollm2, tell, wide_q4_k

ROOT = Path(__file__).resolve().parent.parent
MODELS: dict[str, dict[str, Any]] = {
    "inflated": {"gigabytes": 5.0, "limit": 1536, "kv": "16/16"},
    "bf16": {"gigabytes": 12.0, "limit": 572, "kv": "8/8", "prompts": 32, "prompt_tokens": 24, "rows": 32},
    "8b": {"gigabytes": 4.1, "limit": 1536, "kv": "16/16"},
}
"""What each is run with unless flags say otherwise; limit in MiB."""
USUAL = {"prompts": 64, "prompt_tokens": 256, "tokens": 32, "rows": 64, "spare": 128}
CUT = {"prompts": 32, "prompt_tokens": 8, "tokens": 8}
DEEP = 240
"""Blocks of the bf16 model."""


def inflated(gigabytes: float, fmt: str | None, blocks: int = 0) -> Path:
    """SmolLM2 of that size, made when it isn't there yet."""
    name = f"inflated-{gigabytes:g}-{fmt or 'own'}{f'-{blocks}' if blocks else ''}.gguf"
    model = resolve().cache / "benchmarks" / name
    if not model.exists():
        model.parent.mkdir(parents=True, exist_ok=True)
        inflate(smollm2(), model, int(gigabytes * 1e9), fmt, 0.0, total=blocks)
    return model


def models(name: str, gigabytes: float, fmt: str | None) -> tuple[Path, Path | None]:
    """(the model, the small one that has the same text; None: there is none)"""
    if name == "inflated":
        return inflated(gigabytes, fmt), smollm2() if fmt is None else inflated(0, fmt)
    if name == "bf16":
        return inflated(gigabytes, "BF16", DEEP), inflated(0, "BF16")
    model = resolve().cache / "benchmarks" / f"wide-q4_k-{gigabytes:g}.gguf"
    if not model.exists():
        wide_q4_k(model, blocks=max(1, round(32 * gigabytes / 4.1)))
    return model, None


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
        computer.steps = lambda layer, through, run: (watched(layer, run), layer)[1]  # one by one


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Runs in the cgroup, or outside of it to measure what the same runs cost with everything resident."""
    import headrace
    from headrace.memory.stream import Streamed

    start = time.perf_counter()
    options = {"threads": job["threads"], "context": job["context"], "rows": job["rows"], "runs": job["runs"]}
    options |= {"sequences": max(len(job["prompts"]), *job.get("counts", [1]))}
    options |= {"packs": Path(job["packs"]), "ram": job["ram"], "caches": 0, "kv_bits": tuple(job["kv"])}
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


def interpolated(found: dict[str, float], rows: int) -> float:
    xs = sorted(int(k) for k in found)
    return float(np.interp(rows, xs, [found[str(x)] for x in xs]))


def roofline(passes: list[dict[str, Any]], costs: dict[str, float], pass_bytes: int, rate: float) -> list[float]:
    return [max(pass_bytes / rate, sum(interpolated(costs, r) for r in p["rows"])) for p in passes]


def main() -> None:
    if sys.argv[1:] == ["--child"]:
        print(json.dumps(child(json.loads(sys.stdin.read()))))
        return
    args = arguments()
    model, small = models(args.model, args.gigabytes, args.format)
    folder = model.parent
    asked = prompts(args.prompts, args.prompt_tokens)
    job = {"do": "run", "model": str(model), "packs": str(folder / "packs"), "threads": args.threads, "rows": args.rows}
    job |= {"runs": args.runs, "prompts": asked, "tokens": args.tokens, "ram": (args.limit - args.spare) << 20}
    job |= {"kv": [int(b) for b in args.kv.split("/")], "context": args.prompt_tokens + args.tokens}
    truth = need(launch(__file__, {**job, "model": str(small or model), "ram": None}, None))
    need(launch(__file__, {**job, "prompts": asked[:1], "tokens": 1}, None))  # packs the file
    packed = max((folder / "packs").glob("*.pack"), key=lambda p: p.stat().st_mtime)
    drop([model, packed])
    before = disk_rate(packed, 2 << 20, 4, 10)
    big = need(launch(__file__, job, args.limit << 20))
    after = disk_rate(packed, 2 << 20, 4, 10)
    counts = sorted({1, 8, 16, 32, args.rows, *(r for p in big["passes"] for r in p["rows"][:1])} & set(range(1, 129)))
    costs = need(launch(__file__, {**job, "do": "curve", "counts": counts, "ram": None}, None))["curve"]
    result = report(args, model, big, costs, (before, after)) | {"same_text": big["tokens"] == truth["tokens"]}
    tell(result, args.out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inflated", choices=list(MODELS))
    parser.add_argument("--cut", action="store_true", help=f"{CUT}")
    parser.add_argument("--gigabytes", type=float)
    parser.add_argument("--format", help="of the inflated model (default: its own)")
    parser.add_argument("--limit", type=int, help="MiB")
    for name in USUAL:
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    parser.add_argument("--runs", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", help="bits of keys/values")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    for name, value in {**USUAL, **MODELS[args.model], **(CUT if args.cut else {})}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def report(
    args: argparse.Namespace, model: Path, big: dict[str, Any], costs: dict[str, float], rates: tuple[float, float]
) -> dict[str, Any]:
    """The figures of the child under the limit."""
    lines = roofline(big["passes"], costs, big["pass_bytes"], sum(rates) / 2)
    took = [p["end"] - p["start"] for p in big["passes"]]
    decode = [i for i, p in enumerate(big["passes"]) if max(p["rows"]) <= args.prompts and len(p["rows"]) == 1][1:]
    size = model.stat().st_size
    return {
        "benchmark": "streaming",
        "model": f"{args.model}, {size / 1e9:.2f} GB, random weights; KV {args.kv}",
        "limit_mib": args.limit,
        "model_over_limit": round(size / (args.limit << 20), 1),
        "failcnt": big["failcnt"],
        "max_usage_mib": big["max_usage"] >> 20,
        "layers_streamed": big["layers_streamed"],
        "disk_gb_s": [round(rate / 1e9, 3) for rate in rates],
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


if __name__ == "__main__":
    main()
