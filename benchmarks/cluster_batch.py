"""A batch over streaming ranks: how near its throughput comes to what the ranks' disks and arithmetic allow.

    python benchmarks/cluster_batch.py [--ranks 3] [--sequences 64] [--prompt 16] [--tokens 32] [--ram MIB[,MIB..]]
        [--disk MB/s] [--flops GFLOP/s] [--slow RANK:FACTOR] [--even] [--blocks N] [--no-together] [--out FILE]

``mpirun -n RANKS headrace batch`` on this machine, each rank in a memory cgroup of its own (v1, as root; without, no
limit). Two cores are no three computers, so the ranks are slowed down to known rates: reads of streamed weights pass
through one disk of ``--disk`` MB/s a rank, and each layer takes at least its multiply-adds at ``--flops``, asleep for
what is left. The planner knows these rates (``--machine``), as it would have measured them.

``value`` (asked: 0.9): the busiest rank's own time, the longer of bytes read at the disk's rate and padded arithmetic,
over the time from the first layer computed anywhere to the last. ``rounds``: how often the layers were read a new
token. ``cores``: that all ranks used, to be under 1.6. ``same``: the text is one process's. ``--slow 1:0.8``: rank 1
computes at 80%; ``--even``: layers as if all were alike, to see what the planner's split brings. ``--blocks``: blocks
in flight by hand; 1 is no pipeline at all. ``--no-together``: each block has its own reading.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.config import resolve
from inflate import inflate
from model_zoo import model_path, smollm2, tell

SRC = Path(__file__).resolve().parent.parent / "src"
GROUPS = Path("/sys/fs/cgroup/memory")
SLACK = 48 << 20
"""Over --ram: MPI's shared memory and the page cache of a moment."""
FAST = 1e15


# --- a rank -----------------------------------------------------------------------------------------------


class Paced:
    """The rates of one rank, and what it did."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        self.disk = job["disk"]
        self.flops = job["flops"] * job["slow"].get(str(rank), 1.0)
        self.lock, self.free_at = threading.Lock(), 0.0
        self.first = self.last = 0.0
        self.read = self.sweeps = 0
        self.computed = self.waited = 0.0
        self.macs: dict[int, int] = {}
        self.earliest = -1

    def patch(self) -> None:
        """Slow the product down at its two seams: the read of a piece of a layer, and the step of a layer."""
        from headrace.memory.stream import Streamed
        from headrace.run.compute import DeviceComputer
        from headrace.run.stage import Computer

        read, step, make = Streamed._read, DeviceComputer.step, DeviceComputer.__init__
        mine = self

        def paced_read(streamed: Any, out: memoryview, offset: int) -> None:
            with mine.lock:
                mine.free_at = end = max(time.monotonic(), mine.free_at) + out.nbytes / mine.disk
                mine.read += out.nbytes
            read(streamed, out, offset)
            time.sleep(max(0.0, end - time.monotonic()))

        def made(computer: Any, device: Any, layers: Any, own: Any, *rest: Any) -> None:
            for i in own:
                plans = [p for p in layers[i].tensors.values() if p.n > 1]
                mine.macs[i] = 0 if i == 0 else sum(p.n * p.k for p in plans)
            mine.earliest = min((i for i in own if layers[i].kv is not None), default=-1)
            make(computer, device, layers, own, *rest)

        def paced_step(computer: Any, layer: int, run: Any) -> None:
            start, waits = time.monotonic(), getattr(computer.weights, "waited", 0.0)
            holding = computer._holding
            step(computer, layer, run)
            waited = getattr(computer.weights, "waited", 0.0) - waits
            rows = int(run.rows.wanted.shape[0]) if layer == computer.last else run.rows.count
            asked = 2 * mine.macs[layer] * rows / mine.flops
            took = time.monotonic() - start - waited
            time.sleep(max(0.0, asked - took))
            mine.first, mine.last = mine.first or start, time.monotonic()
            mine.computed += max(asked, took)
            mine.waited += waited
            mine.sweeps += layer == mine.earliest and holding != layer

        Streamed._read = paced_read  # type: ignore[method-assign]
        DeviceComputer.__init__ = made  # type: ignore[method-assign,assignment]
        DeviceComputer.step = paced_step  # type: ignore[method-assign]
        DeviceComputer.steps = Computer.steps  # type: ignore[method-assign]  # one by one


def child(job: dict[str, Any], words: list[str]) -> int:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    group = Path(job["groups"][rank]) if job["groups"] else None
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    from headrace import sharing
    from headrace.cli.main import main
    from headrace.sharing import Sharing

    paced = Paced(job, rank)
    paced.patch()
    if job["blocks"]:
        shapes = Sharing.shapes
        Sharing.shapes = lambda s: (x for x in shapes(s) if x.blocks == job["blocks"])  # type: ignore[method-assign]
    if job["even"]:
        start = Sharing.__init__

        def alike(made: Any, *args: Any) -> None:
            same = [dataclasses.replace(rank, machine=args[4][0].machine) for rank in args[4]]
            start(made, *args[:4], same, *args[5:])

        Sharing.__init__ = alike  # type: ignore[method-assign]
    if job["apart"]:
        sharing.WORTH = 0.0
    status = main(words)
    used = resource.getrusage(resource.RUSAGE_SELF)
    told = {
        "first": paced.first, "last": paced.last, "read": paced.read, "computed": paced.computed,
        "waited": paced.waited, "layers": len(paced.macs), "cpu": used.ru_utime + used.ru_stime,
        "peak_rss": used.ru_maxrss << 10, "sweeps": paced.sweeps,
    }  # fmt: skip
    if group is not None:
        told |= {name: int((group / f"memory.{name}").read_text()) for name in ("failcnt", "max_usage_in_bytes")}
    (Path(job["folder"]) / f"rank{rank}.json").write_text(json.dumps(told))
    return status


# --- the job ----------------------------------------------------------------------------------------------


def machine(disk: float, flops: float) -> dict[str, Any]:
    """The paced rank as the planner's constants."""
    tiers = [{"name": n, "capacity": 1 << 40, "read": r, "write": r} for n, r in (("host", FAST), ("disk", disk))]
    links = [{"src": "disk", "dst": "host", "rate": disk, "resource": "disk"}]
    compute = {"tier": "host", "matmul": [[1, flops]], "attend": FAST, "attend_one": FAST}
    return {"version": 1, "name": "paced", "tiers": tiers, "links": links, "computes": [compute]}


def batch_file(path: Path, sequences: int, prompt: int, tokens: int) -> None:
    with path.open("w") as file:
        for i in range(sequences):
            ids = [1000 + (7919 * i + 31 * j) % 20000 for j in range(prompt)]
            body = {"model": "any", "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            file.write(
                json.dumps({"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
            )


def model_of(name: str | None) -> Path:
    if name is not None:
        return Path(name) if Path(name).exists() else model_path(name)
    path = resolve().cache / "benchmarks" / "inflated-0.5-own.gguf"
    if not path.exists():
        inflate(smollm2(), path, int(5e8), None, 0.0)
    return path


def texts(path: Path) -> list[Any]:
    return [json.loads(line)["response"]["body"]["choices"] for line in path.read_text().splitlines()]


def groups_of(rams: list[int]) -> list[str]:
    made = []
    for rank, ram in enumerate(rams):
        group = GROUPS / f"headrace-rank{rank}"
        try:
            group.mkdir(exist_ok=True)
            (group / "memory.limit_in_bytes").write_text(str(ram + SLACK))
            for name in ("failcnt", "max_usage_in_bytes"):
                (group / f"memory.{name}").write_text("0")
        except OSError:
            return []
        made.append(str(group))
    return made


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("ranks", 3), ("sequences", 64), ("prompt", 16), ("tokens", 32), ("blocks", 0)):
        p.add_argument(f"--{name}", type=int, default=usual)
    p.add_argument("--model", help="a file or a name of the zoo (default: SmolLM2 inflated to 0.5 GB)")
    p.add_argument("--ram", default="250", help="MiB of each rank, or one number for all; 0: no limit, nothing streams")
    p.add_argument("--disk", type=float, default=80.0, help="MB/s a rank")
    p.add_argument("--flops", type=float, default=12.0, help="GFLOP/s a rank")
    p.add_argument("--slow", default="", help="RANK:FACTOR, several with commas")
    p.add_argument("--even", action="store_true")
    p.add_argument("--no-together", action="store_true")
    p.add_argument("--unchecked", action="store_true", help="don't compute the text in one process too")
    p.add_argument("--trace", type=Path)
    p.add_argument("--out", type=Path)
    return p


def start(args: argparse.Namespace, folder: Path, path: Path) -> dict[str, Any]:
    """Run the job; what each rank told, and the head's last words."""
    rams = [int(x) << 20 for x in args.ram.split(",")] * (1 if "," in args.ram else args.ranks)
    slow = dict(part.split(":") for part in args.slow.split(",")) if args.slow else {}
    job = {
        "disk": args.disk * 1e6, "flops": args.flops * 1e9, "slow": {k: float(v) for k, v in slow.items()},
        "blocks": args.blocks, "apart": args.no_together, "even": args.even, "folder": str(folder),
        "groups": groups_of(rams) if all(rams) else [],
    }  # fmt: skip
    (folder / "job.json").write_text(json.dumps(job))
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    command = [str(mpirun), "--oversubscribe", "--bind-to", "none"]
    for rank, ram in enumerate(rams):
        constants = folder / f"machine{rank}.json"
        constants.write_text(json.dumps(machine(job["disk"], job["flops"] * job["slow"].get(str(rank), 1.0))))
        words = [
            "batch",
            folder / "in.jsonl",
            "-o",
            folder / "out.jsonl",
            "-m",
            path,
            "-t",
            1,
            "-c",
            512,
            "--any-model",
        ]
        words += ["--machine", constants, *(["--ram", f"{ram >> 20}M"] if ram else [])]
        words += ["--trace", args.trace.resolve()] if args.trace else []
        command += [":"] if rank else []
        command += ["-n", "1", sys.executable, __file__, "--child", str(folder / "job.json"), *map(str, words)]
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, env={**os.environ, **root}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the job failed ({done.returncode}): {done.stderr[-3000:]}")
    told = [json.loads((folder / f"rank{i}.json").read_text()) for i in range(args.ranks)]
    return {"ranks": told, "said": done.stderr.strip().splitlines(), "job": job}


def report(args: argparse.Namespace, found: dict[str, Any]) -> dict[str, Any]:
    ranks, disk = found["ranks"], found["job"]["disk"]
    span = max(r["last"] for r in ranks) - min(r["first"] for r in ranks)
    own = [max(r["read"] / disk, r["computed"]) for r in ranks]
    return {
        "value": max(own) / span, "seconds": span, "tokens_per_s": args.sequences * args.tokens / span,
        "rounds": max(r["sweeps"] for r in ranks) / args.tokens, "own_seconds": own,
        "disk_seconds": [r["read"] / disk for r in ranks], "compute_seconds": [r["computed"] for r in ranks],
        "layers": [r["layers"] for r in ranks], "waited": [r["waited"] for r in ranks],
        "cores": sum(r["cpu"] for r in ranks) / span, "peak_rss": [r["peak_rss"] for r in ranks],
        "failcnt": [r.get("failcnt") for r in ranks], "said": found["said"][-8:], "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(json.loads(Path(sys.argv[2]).read_text()), sys.argv[3:])
    args = parser().parse_args()
    path = model_of(args.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batch_file(folder / "in.jsonl", args.sequences, args.prompt, args.tokens)
        found = report(args, start(args, folder, path))
        if not args.unchecked:
            words = ["batch", folder / "in.jsonl", "-o", folder / "one.jsonl", "-m", path, "-c", "512", "--any-model"]
            alone = [sys.executable, "-m", "headrace", *map(str, words)]
            subprocess.run(alone, env={**os.environ, "PYTHONPATH": str(SRC)}, check=True, capture_output=True)
            found["same"] = texts(folder / "one.jsonl") == texts(folder / "out.jsonl")
    for rank in range(args.ranks):
        with suppress(OSError):
            (GROUPS / f"headrace-rank{rank}").rmdir()
    tell({**vars(args), **found, "trace": None, "out": None}, args.out)
    return 0 if found.get("same", True) else 1


if __name__ == "__main__":
    sys.exit(main())
