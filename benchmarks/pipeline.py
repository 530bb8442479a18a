"""The pipeline's machinery: what two ranks take beside what their stages compute, what they send, what they idle.

    python benchmarks/pipeline.py [--model smollm2-q4_1] [--ranks 2] [--tokens 64] [--rounds 5] [--idle 10] [--out FILE]

One request, no drafter, one compute thread a rank. ``over``: seconds a token, from the first to the last, over the sum
of what the stages computed for it, less one (``loaded`` is the machine's load then: on a machine whose cores others
want too, every message waits for the scheduler). ``messages``: to rank 1 a run. ``wire``: bytes a token to rank 1 over
its activations' bytes. ``idle``: share of a core that a rank uses while there is nothing to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from model_zoo import model_path, tell

PROMPT = "Once upon a time there was"


def cpu_of(process: int) -> float:
    """Seconds of CPU a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rank(path: Path, tokens: int, rounds: int, idle: float, folder: Path) -> int:
    from headrace.cluster.mpi import join
    from headrace.engine import Options, load
    from headrace.ensemble import serve

    options = Options(threads=1, rank_threads=(1,), context=512)
    with join() as link:
        (folder / str(link.rank)).write_text(str(os.getpid()))
        if link.rank:
            return serve(lambda: path, options, link)
        with load(path, options, link=link) as engine:
            engine.watch()
            samples = []
            for _ in range(rounds + 1):
                before, sent, runs = engine.totals(), dict(link.sent), engine.head.counts.runs
                job = engine.submit(PROMPT, tokens, ignore_eos=True)
                while not job.finish:
                    engine.work()
                    if len(job.tokens) == 1:
                        before, sent, runs = engine.totals(), dict(link.sent), engine.head.counts.runs
                after = engine.totals()
                assert before is not None and after is not None
                count, f = len(job.tokens) - 1, job.figures
                busy = sum(after.since(before).busy) / count
                there = {what: link.sent[1, what] - sent.get((1, what), 0) for what in ("bytes", "messages")}
                samples.append({
                    "seconds": (f.last - f.first) / count, "busy": busy,
                    "over": (f.last - f.first) / count / busy - 1,
                    "messages": there["messages"] / (engine.head.counts.runs - runs),
                    "wire": there["bytes"] / count / (4 * engine.spec.width),
                    "loaded": os.getloadavg()[0],
                })  # fmt: skip
            time.sleep(0.5)
            pids = [int((folder / str(r)).read_text()) for r in range(link.size)]
            start = [cpu_of(pid) for pid in pids]
            time.sleep(idle)
            used = [(cpu_of(pid) - a) / idle for pid, a in zip(pids, start, strict=True)]
            print(json.dumps({"samples": samples[1:], "idle": used}), flush=True)
    return 0


def main() -> int:
    if len(sys.argv) == 7 and sys.argv[1] == "--rank":
        return rank(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), Path(sys.argv[6]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-q4_1")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--idle", type=float, default=10.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or "mpirun"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [mpirun, "-n", str(args.ranks), "--oversubscribe", "--bind-to", "none", sys.executable, __file__]
        words += ["--rank", str(model_path(args.model)), str(args.tokens), str(args.rounds), str(args.idle), folder]
        done = subprocess.run(words, env={**os.environ, **root}, stdout=subprocess.PIPE, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    middle = {k: round(statistics.median(s[k] for s in answer["samples"]), 5) for k in answer["samples"][0]}
    result = {"benchmark": "pipeline", "model": args.model, "ranks": args.ranks, "medians": middle, **answer}
    tell(result, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
